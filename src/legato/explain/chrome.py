"""A trace in the format of Chrome's trace viewer, which ui.perfetto.dev opens: one track a request, counters beside."""

from __future__ import annotations

from typing import Any

from legato.explain.attribute import Attribution, Explanation
from legato.explain.lanes import Lane, begin_of, lanes_of
from legato.explain.parts import StepParts
from legato.explain.sentence import Teller

ENGINE, REQUESTS = 1, 2
"""Process ids of the two groups of tracks."""

Event = dict[str, Any]


def chrome_trace(found: Explanation) -> dict[str, Any]:
    """`{"traceEvents": […]}`, in order of time. Times are microseconds from the first moment that the trace tells of.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
    """
    trace, attribution, begin_s = found.trace, Attribution(found.trace), begin_of(found.trace)
    events: list[Event] = []
    for index, step in enumerate(trace.steps):
        events.extend(_step(found, index, attribution.split(index), begin_s))
        if index == len(trace.steps) - 1:
            events.append(_counter("KV blocks", step.ended_s - begin_s, {"in use": _used(found, index)}))
    lanes = lanes_of(trace)
    for lane in lanes:
        events.extend(_lane(found, lane, attribution, begin_s))
    teller = Teller(found)
    for gap in found.late:
        event = {"name": f"late: {gap.cause}", "ph": "i", "s": "t", "ts": _us(gap.ends_s - begin_s)}
        told = {"why": teller.sentence(gap), "ms": {kind: _ms(s) for kind, s in gap.parts.seconds.items()}}
        events.append({**event, "pid": REQUESTS, "tid": gap.request_id, "args": told})
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": [*_names(found, lanes), *events],
        "displayTimeUnit": "ms",
        "otherData": {"model": trace.header.model, "legato": trace.header.legato},
    }


def _names(found: Explanation, lanes: list[Lane]) -> list[Event]:
    named = [
        _name("process_name", ENGINE, 0, f"engine: {found.trace.header.model}"),
        _name("process_name", REQUESTS, 0, "requests"),
        _name("thread_name", ENGINE, 1, "steps"),
    ]
    for order, lane in enumerate(lanes):
        asked = found.trace.requests.get(lane.request_id)
        prompt = "" if asked is None else f" · {asked.prompt_tokens:,} tokens"
        named.append(_name("thread_name", REQUESTS, lane.request_id, f"request {lane.request_id}{prompt}"))
        sort = {"name": "thread_sort_index", "ph": "M", "ts": 0, "pid": REQUESTS, "tid": lane.request_id}
        named.append({**sort, "args": {"sort_index": order}})
    return named


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _step(found: Explanation, index: int, parts: StepParts, begin_s: float) -> list[Event]:
    step = found.trace.steps[index]
    at_s, rows = step.started_s - begin_s, sum(step.counts)
    told = {
        "step": step.step,
        "rows": rows,
        "decodes": step.decodes,
        "foreseen ms": None if step.predicted_s is None else _ms(step.predicted_s),
        "allowed ms": None if step.budget_s is None else _ms(step.budget_s),
        "decodes ms": _ms(parts.decodes),
        "chunks ms": {str(request_id): _ms(seconds) for request_id, seconds in parts.chunks},
        "sampling ms": _ms(parts.sampling),
        "planning ms": _ms(parts.planning),
        "noise ms": _ms(parts.noise),
        "waiting": step.waiting,
    }
    times = {"measured": _ms(step.step_s)}
    budget_s = step.budget_s or found.budget_s
    if budget_s is not None:
        times["budget"] = _ms(budget_s)
    return [
        _slice(f"step of {rows}", at_s, step.step_s, ENGINE, 1, told),
        _counter("step, ms", at_s, times),
        _counter("KV blocks", at_s, {"in use": _used(found, index - 1)}),
    ]


def _used(found: Explanation, index: int) -> int:
    """Blocks in use after a step; before the first, none."""
    return found.trace.header.engine.kv_blocks - found.trace.steps[index].free_blocks if index >= 0 else 0


def _lane(found: Explanation, lane: Lane, attribution: Attribution, begin_s: float) -> list[Event]:
    steps, request_id = found.trace.steps, lane.request_id
    events = [
        _slice(what, start_s - begin_s, stop_s - start_s, REQUESTS, request_id, {})
        for what, start_s, stop_s in lane.waits
    ]
    for index, start, rows in lane.chunks:
        step = steps[index]
        told = {
            "step": step.step,
            "start": start,
            "rows": rows,
            "foreseen ms": _ms(dict(attribution.split(index).chunks)[request_id]),
        }
        name = f"chunk {start:,}–{start + rows:,}"
        events.append(_slice(name, step.started_s - begin_s, step.step_s, REQUESTS, request_id, told))
    for index in lane.decodes:
        step = steps[index]
        told = {"step": step.step, "position": step.starts[step.ids.index(request_id)]}
        events.append(_slice("decode", step.started_s - begin_s, step.step_s, REQUESTS, request_id, told))
    return events


def _slice(name: str, at_s: float, seconds: float, pid: int, tid: int, told: dict[str, Any]) -> Event:
    times = {"ts": _us(at_s), "dur": _us(seconds)}
    return {"name": name, "ph": "X", **times, "pid": pid, "tid": tid, "args": told}


def _counter(name: str, at_s: float, values: dict[str, float]) -> Event:
    return {"name": name, "ph": "C", "ts": _us(at_s), "pid": ENGINE, "tid": 0, "args": values}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
