"""What is written for Perfetto is valid: typed, in order, one track a request, chunks that make up the prompt."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from explain.rig import Rig
from legato.explain.chrome import ENGINE, REQUESTS, chrome_trace


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    rig = Rig(itl_s=0.05, blocks=30)
    rig.ask(1, 40, 90)
    rig.ask(2, 60, 90)
    rig.step(4)
    rig.ask(3, 300, 60)
    rig.ask(4, 100, 10)
    rig.pass_s(0.002)
    rig.finish()
    assert rig.engine.state.preemptions
    document: dict[str, Any] = json.loads(json.dumps(chrome_trace(rig.explain(0.03))))
    return document


def slices(document: dict[str, Any], request_id: int) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (REQUESTS, request_id)]


def test_every_event_has_the_fields_of_its_kind_and_they_are_in_order(document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "C", "M", "i")
        assert isinstance(event["name"], str) and event["ts"] >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] == "t" and "over the budget" in event["args"]["why"]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert any(event["ph"] == "i" for event in events)


def test_each_request_has_one_track_with_a_name(document: dict[str, Any]) -> None:
    named = [e for e in document["traceEvents"] if e["name"] == "thread_name" and e["pid"] == REQUESTS]
    assert sorted(e["tid"] for e in named) == [1, 2, 3, 4]
    assert {e["args"]["name"] for e in named} >= {"request 3 · 300 tokens"}


def test_chunks_make_up_the_prompt_and_what_had_to_be_computed_again(document: dict[str, Any]) -> None:
    preempted = {i for i in range(1, 5) if any(e["name"] == "preempted" for e in slices(document, i))}
    assert preempted
    for request_id, tokens in ((1, 40), (2, 60), (3, 300), (4, 100)):
        chunks = [e["args"] for e in slices(document, request_id) if e["name"].startswith("chunk")]
        if request_id not in preempted:
            assert sum(chunk["rows"] for chunk in chunks) == tokens
        assert chunks[0]["start"] == 0
        for before, after in pairwise(chunks):
            assert after["start"] in (before["start"] + before["rows"], 0) or request_id in preempted


def test_slices_of_a_track_do_not_overlap(document: dict[str, Any]) -> None:
    for request_id in range(1, 5):
        for before, after in pairwise(slices(document, request_id)):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.2
    names = {e["name"] for e in slices(document, 4)}
    assert {"queued", "decode"} <= names


def test_counters_follow_the_steps(document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == ENGINE]
    times = [e for e in events if e["ph"] == "C" and e["name"] == "step, ms"]
    blocks = [e["args"]["in use"] for e in events if e["ph"] == "C" and e["name"] == "KV blocks"]
    assert [t["args"]["measured"] for t in times] == [pytest.approx(s["dur"] / 1000, abs=0.01) for s in steps]
    assert (blocks[0], max(blocks) <= 30, blocks[-1]) == (0, True, 0)
    assert all("budget" in t["args"] for t in times)
