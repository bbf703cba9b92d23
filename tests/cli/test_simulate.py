"""`legato simulate` as one types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from legato.cli.main import app
from legato.sim.fleet import Fleet


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_a_run_is_told_in_words() -> None:
    told = run("--rate", "5", "--requests", "60", "--slo-ttft-ms", "900", "--tenants", "2", "--price-per-hour", "3")
    assert told.exit_code == 0, told.output
    for words in ("60 completed", "TTFT", "goodput", "TTFT ≤ 900 ms", "tenant-1", "a million tokens", "steps/s"):
        assert words in told.output, words


def test_json_is_the_same_every_time_but_for_how_long_it_took() -> None:
    arguments = ("--rate", "5", "--requests", "40", "--replicas", "2", "--json")
    one, two = (json.loads(run(*arguments).output) for _ in range(2))
    assert one.pop("simulation") and two.pop("simulation")
    assert one == two
    assert one["requests"]["completed"] == 40 and one["complete"] and one["fleet"]["replicas"] == 2
    assert len(one["curves"]["ttft_ms"]) == 101 and one["curves"]["series"]


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": 100 * n, "input_length": 600, "output_length": 9, "hash_ids": [1, n + 9]} for n in range(50)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(run("--trace", str(trace), "--json").output)
    assert found["requests"]["completed"] == 50 and found["cached_share"] == pytest.approx(0.8, abs=0.06)
    assert found["seconds"] == pytest.approx(4.96, abs=0.1)
    assert json.loads(run("--trace", str(trace), "--speed", "2", "--json").output)["seconds"] < 2.6
    assert json.loads(run("--trace", str(trace), "--duration", "1", "--json").output)["requests"]["completed"] == 10
    cut = run("--trace", str(trace), "--requests", "7", "--no-enable-prefix-caching", "--json")
    assert (json.loads(cut.output)["requests"]["completed"], json.loads(cut.output)["cached_share"]) == (7, 0.0)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"day.{suffix}"
    told = run("--requests", "30", "--plot", str(path), "--slo-ttft-ms", "100")
    assert told.exit_code == 0, told.output
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == "png" else b"until the first token" in content
    assert len(content) > 5000


def test_ctrl_c_keeps_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Fleet._advance

    def interrupted(self: Fleet, until_s: float) -> None:
        if self.ledger.arrived == 20:
            raise KeyboardInterrupt
        advance(self, until_s)

    monkeypatch.setattr(Fleet, "_advance", interrupted)
    told = run("--requests", "30", "--json")
    assert told.exit_code == 130
    found = json.loads(told.output)
    assert not found["complete"] and found["requests"]["arrived"] == 20 and found["requests"]["completed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "h100"),
        (["--itl-ms", "1"], "6 ms and more can be kept"),
        (["--max-num-batched-tokens", "10"], "raise max_tokens to 64"),
        (["--on-off", "5"], "as in 10:30"),
        (["--prompt-tokens", "0"], "--prompt-tokens is '0'"),
        (["--prefix-tree", "x"], "BRANCHESxTOKENS"),
        (["--plot", "day.pdf"], "neither"),
        (["--plot", "/nowhere/day.svg"], "there is no folder"),
        (["--kv-tokens", "9000000"], "no room"),
        (["--model", "llama-3.1-70b"], "not even the weights fit"),
        (["--speed", "2"], "--speed is that of a trace"),
        (["--prefix-skew", "1"], "give --prefix-tree"),
        (["--trace", __file__, "--rate", "3"], "--rate is of random traffic"),
        (["--device", "this", "--weight-bits", "4"], "this machine is measured"),
        (["--max-num-batched-tokens", "256", "--prefill-share", "0.3"], "none is planned for"),
        (["--policy", "fcfs", "--ttft-ms", "100"], "fcfs keeps their order"),
    ],
)
def test_bad_input_says_what_there_is(arguments: list[str], words: str) -> None:
    told = run(*arguments)
    assert told.exit_code == 1, told.output
    assert words in told.output, told.output
