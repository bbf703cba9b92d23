"""`legato bench compare`: what a recorded run becomes on a virtual clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from explain.rig import Rig
from legato.bench.record import percentile
from legato.cli.compare import _setup, _simulate
from legato.cli.main import app
from legato.cli.traffic import arrivals_from
from legato.explain.arrivals import arrivals_of
from legato.explain.read import Trace, read_trace


def recorded(tmp_path: Path) -> Trace:
    """Forty requests on a machine that becomes half again as slow on the way, and a step in ten a little more."""
    rig = Rig(0.06, blocks=400)
    sent = steps = 0
    while sent < 40 or rig.engine.has_work:
        while sent < 40 and rig.now_s >= 100.0 + 0.31 * sent:
            sent += 1
            rig.ask(sent, 20 + sent * 37 % 300, 5 + sent * 7 % 30)
        if not rig.engine.has_work:
            rig.pass_s(0.01)
            continue
        steps += 1
        rig.machine.slowdown = (1.5 if 104.0 < rig.now_s < 108.0 else 1.0) * (1.2 if steps % 10 == 0 else 1.0)
        rig.step()
    path = tmp_path / "steps.jsonl"
    path.write_bytes(rig.bytes())
    return read_trace(path)


def test_a_recorded_run_is_simulated_as_it_was(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    first, gaps, last = dict[int, float](), list[float](), dict[int, float]()
    for step in trace.steps:
        for request_id, sampled in zip(step.ids, step.samples, strict=True):
            if sampled:
                if request_id in last:
                    gaps.append(step.ended_s - last[request_id])
                first.setdefault(request_id, step.ended_s - trace.requests[request_id].arrival_s)
                last[request_id] = step.ended_s
    setup, _ = _setup(trace, 100.0, 0.0)
    found = _simulate(setup, list(arrivals_of(trace)))
    for kind, values in (("ttft_ms", list(first.values())), ("itl_ms", gaps)):
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            assert found[kind][name] == pytest.approx(1000 * percentile(values, share), rel=0.1), (kind, name)
    assert found["requests"]["completed"] == 40


def test_the_distance_of_a_client_is_what_tiny_requests_take_beside_their_step(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    alone_s = sorted(step.step_s for step in trace.steps if step.decodes == 0 and step.started_s < 103.0)
    begin_s = 103.0
    _, door_s = _setup(trace, begin_s, 5.0)
    assert 5.0 - alone_s[-1] <= door_s <= 5.0 - alone_s[0]


def test_a_recorded_run_is_traffic_as_well(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    arrivals = list(arrivals_from(tmp_path / "steps.jsonl", speed=2.0))
    assert len(arrivals) == 40 and arrivals[0].at_s == 0.0
    assert arrivals[3].at_s == pytest.approx((trace.requests[4].arrival_s - trace.requests[1].arrival_s) / 2)
    assert [a.output_tokens for a in arrivals] == [trace.ends[n].generated for n in range(1, 41)]
    told = CliRunner().invoke(app, ["simulate", "--trace", str(tmp_path / "steps.jsonl"), "--json"])
    assert told.exit_code == 0 and json.loads(told.output)["requests"]["completed"] == 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-num-batched-tokens", "256"], "are not foreseen; compare with --itl-ms"),
        (["--trace", __file__, "--rate", "3"], "--rate is of random traffic"),
        (["--speed", "2"], "--speed is that of a trace"),
    ],
)
def test_what_would_be_ignored_or_in_vain_is_refused_before_a_server_is_started(
    arguments: list[str], words: str
) -> None:
    told = CliRunner().invoke(app, ["bench", "compare", *arguments])
    assert told.exit_code == 1 and words in told.output


@pytest.mark.slow
def test_a_server_and_its_simulation_are_near_each_other() -> None:
    """On a busy machine too: it is simulated as busy as it was. The bar of 10 % is for longer runs."""
    told = CliRunner().invoke(app, ["bench", "compare", "--rate", "2", "--requests", "40", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["served"]["requests"]["completed"] == 40
    assert abs(found["errors"]["itl_ms"]["p50"]) < 0.25 and abs(found["errors"]["ttft_ms"]["p50"]) < 0.25
