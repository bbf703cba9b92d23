"""Arrivals and lengths."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import mean, stdev

import pytest

from legato.errors import ConfigError
from legato.workload.arrivals import PrefixTree, Process, Traffic, periodic, poisson_trace
from legato.workload.lengths import Lengths


def test_a_trace_depends_on_its_arguments_only_and_a_higher_rate_is_the_same_one_faster() -> None:
    one = poisson_trace(2.0, 50.0, Lengths(100, 0.5), Lengths(10), seed=3)
    assert one == poisson_trace(2.0, 50.0, Lengths(100, 0.5), Lengths(10), seed=3)
    assert one != poisson_trace(2.0, 50.0, Lengths(100, 0.5), Lengths(10), seed=4)
    twice = poisson_trace(4.0, 25.0, Lengths(100, 0.5), Lengths(10), seed=3)
    assert [a.at_s for a in one] == pytest.approx([2 * a.at_s for a in twice])
    assert [a.prompt_tokens for a in one] == [a.prompt_tokens for a in twice]


def test_poisson_arrivals_come_at_the_rate() -> None:
    trace = poisson_trace(50.0, 100.0, Lengths(1), Lengths(1), seed=1)
    assert len(trace) == pytest.approx(5000, rel=0.05)
    assert all(a.at_s < b.at_s for a, b in pairwise(trace))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_vary_as_asked_for(cv: float) -> None:
    times = list(islice(Process(10.0, cv).times(1), 40_000))
    gaps = [b - a for a, b in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.05)


def test_nobody_comes_in_the_pauses_and_the_rate_holds_in_between() -> None:
    times = [t for t in islice(Process(20.0, on_s=2.0, off_s=3.0).times(1), 4000) if t < 100.0]
    assert all(t % 5.0 <= 2.0 for t in times)
    assert len(times) == pytest.approx(20 * 2 * 20, rel=0.1)


def test_prompts_of_a_tree_begin_with_a_path_from_its_root() -> None:
    tree = PrefixTree.of("1x500,3x200,2x100")
    arrivals = list(islice(Traffic(Process(1.0), Lengths(50), Lengths(5), tree), 600))
    assert {a.shared[0] for a in arrivals} == {(0, 500)}
    paths = Counter(tuple(text for text, _ in a.shared) for a in arrivals)
    assert len(paths) == 6 and min(paths.values()) > 60
    parents = {path[2]: path[1] for path in paths}
    assert len(parents) == 6 and set(Counter(parents.values()).values()) == {2}, "a text belongs to one before it"
    assert {a.prompt_tokens for a in arrivals} == {850}


def test_a_skewed_tree_prefers_its_first_texts() -> None:
    choose, random = PrefixTree.of("100x10", skew=1.0).chooser(), Random(1)
    seen = Counter(choose(random)[0][0] for _ in range(20_000))
    assert seen[0] / seen[9] == pytest.approx(10, rel=0.3)


def test_tenants_send_alike() -> None:
    seen = Counter(a.tenant for a in islice(Traffic(Process(1.0), Lengths(5), Lengths(5), tenants=4), 4000))
    assert len(seen) == 4 and min(seen.values()) > 850


def test_lognormal_lengths_have_the_mean_and_an_end() -> None:
    random = Random(1)
    drawn = [Lengths(400, 0.8).draw(random) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(400, rel=0.05)
    assert min(drawn) >= 1 and max(drawn) <= 3200
    assert {Lengths(400).draw(random) for _ in range(9)} == {400}


def test_lengths_are_drawn_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("10\n\n20\n30\n")
    lengths, random = Lengths.of(f"@{file}", "--prompt-tokens"), Random(1)
    assert {lengths.draw(random) for _ in range(99)} == {10, 20, 30}
    assert lengths.mean == 20 and str(lengths) == f"@{file}"


@pytest.mark.parametrize(
    ("content", "words"), [("5\nx\n", "line 2: 'x' is no length"), ("5\n-1\n", "line 2"), ("\n", "has no lengths")]
)
def test_a_file_of_lengths_is_refused_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Lengths.of(f"@{file}", "--prompt-tokens")


@pytest.mark.parametrize("text", ["", "0", "x", "4:", "4:x", "400:-1", "400:9", "1.5", "@/nowhere/at/all"])
def test_a_length_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-tokens"):
        Lengths.of(text, "--output-tokens")


def test_lengths_read_back_as_written() -> None:
    assert str(Lengths.of("400:0.6", "x")) == "400:0.6"
    assert str(Lengths.of("400", "x")) == "400"


@pytest.mark.parametrize("text", ["", "512", "0x5", "5x0", "1x2,", "ax5"])
def test_a_tree_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="BRANCHESxTOKENS"):
        PrefixTree.of(text)


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"cv": 0.0}, {"on_s": 0.0}, {"off_s": -1.0}])
def test_a_process_that_is_none_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Process(**{"rate": 1.0, **options})


def test_periodic_arrivals_stop_before_the_end() -> None:
    assert list(periodic(10, 60)) == [0, 10, 20, 30, 40, 50]
    assert list(periodic(10, 5)) == [0]
