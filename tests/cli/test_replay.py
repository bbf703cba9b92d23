"""`legato replay` as one types it, against a server over a real socket."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner, Result

from bench.fake_server import FakeServer, serving_apart
from legato.bench.load import Prompts, WordScale
from legato.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [{"at_s": 0.1 * n, "prompt_tokens": 50, "output_tokens": 6} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_trace_is_sent_at_its_times_and_judged_by_the_names_of_the_simulator(trace: Path) -> None:
    with serving_apart(FakeServer(gap_s=0.01, s_per_token=0.0004)) as server:
        told = run(str(trace), "--url", server.url, "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["requests"] == {"arrived": 8, "completed": 8, "unfinished": 0, "failed": 0}
    assert found["seconds"] == pytest.approx(0.7 + 0.07, abs=0.25)
    assert found["itl_ms"]["p50"] == pytest.approx(10, abs=8)
    assert found["ttft_ms"]["p50"] == pytest.approx(20, abs=30)
    simulated = CliRunner().invoke(app, ["simulate", "--trace", str(trace), "--json"])
    assert {"ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "seconds"} <= found.keys() & json.loads(simulated.stdout).keys()


def test_it_is_told_in_words_and_cut_to_a_part(trace: Path) -> None:
    with serving_apart(FakeServer(gap_s=0.005, s_per_token=0.0001)) as server:
        told = run(str(trace), "--url", server.url, "--speed", "4", "--requests", "5")
    assert told.exit_code == 0, told.output
    for words in ("5 of 5", "TTFT", "ITL", "tokens/s"):
        assert words in told.output


def test_a_server_that_is_not_there_is_told(trace: Path) -> None:
    told = run(str(trace), "--url", "http://127.0.0.1:9")
    assert told.exit_code == 1 and "nothing answers" in told.output


def test_a_trace_without_requests_is_told(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("")
    told = run(str(tmp_path / "none"))
    assert told.exit_code == 1 and "has no requests" in told.output


def test_prompts_share_the_texts_that_they_are_to_share() -> None:
    prompts = Prompts(Random(1), range(300, 20000))
    one, two = (prompts.composed(((7, 64), (n, 32)), 120) for n in (8, 9))
    assert len(one) == len(two) == 120
    assert one[:64] == two[:64] and one[64:96] != two[64:96]
    assert prompts.composed(((7, 64), (8, 32)), 120)[:96] == one[:96] and one[96:] != two[96:]
    assert prompts.composed(((7, 64),), 40) == one[:40]
    assert Prompts(Random(2), range(300, 20000)).composed(((7, 64),), 64) != one[:64], "another run, other texts"
    in_words = Prompts(Random(1), range(300, 400), WordScale(1.0, 0.0))
    first, second = (in_words.composed(((7, 20),), 30) for _ in range(2))
    assert isinstance(first, str) and isinstance(second, str)
    assert first.split()[:20] == second.split()[:20] and len(first.split()) == 30 and first != second
