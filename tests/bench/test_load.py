"""Arrivals, lengths, prompts."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import mean

import pytest

from legato.bench.load import (
    Lengths,
    Prompts,
    WordScale,
    parse_tokens,
    parse_vocab,
    periodic,
    poisson_trace,
)
from legato.errors import ConfigError


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


def test_lognormal_lengths_have_the_mean_and_an_end() -> None:
    random = Random(1)
    drawn = [Lengths(400, 0.8).draw(random) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(400, rel=0.05)
    assert min(drawn) >= 1 and max(drawn) <= 3200
    assert {Lengths(400).draw(random) for _ in range(9)} == {400}


@pytest.mark.parametrize("text", ["", "0", "x", "4:", "4:x", "400:-1", "400:9", "1.5"])
def test_a_length_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-tokens is"):
        Lengths.of(text, "--output-tokens")


def test_lengths_read_back_as_written() -> None:
    assert str(Lengths.of("400:0.6", "x")) == "400:0.6"
    assert str(Lengths.of("400", "x")) == "400"
    assert parse_tokens("4000,8000", "x") == (4000, 8000)
    assert parse_vocab("300:20000") == range(300, 20000)


@pytest.mark.parametrize("text", ["300", "300-2000", "300:310", ":"])
def test_a_vocabulary_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--vocab is"):
        parse_vocab(text)


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts(Random(1), range(300, 20000))
    assert len({tuple(prompts.long(4000)[:8]) for _ in range(200)}) == 200
    assert len({prompts.short() for _ in range(200)}) == 200


def test_prompts_have_the_tokens_asked_for_in_ids_or_about_so_many_in_words() -> None:
    assert len(Prompts(Random(1), range(300, 400)).long(123)) == 123
    text = Prompts(Random(1), range(300, 400), WordScale(per_word=1.5, extra=10)).long(160)
    assert isinstance(text, str) and len(text.split()) == 100


def test_periodic_arrivals_stop_before_the_end() -> None:
    assert list(periodic(10, 60)) == [0, 10, 20, 30, 40, 50]
    assert list(periodic(10, 5)) == [0]
