"""`Lane`: the life of one request in a trace, as it is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from legato.explain.read import Trace


@dataclass(slots=True)
class Lane:
    """From `begins_s` to `ends_s`. `waits`: (what for, from, to). Indices are those of `Trace.steps`.

    `chunks`: (step, first row, rows) of its prompt, or of what it had to compute again. `decodes`: steps that computed
    one token for it.
    """

    request_id: int
    begins_s: float
    ends_s: float
    waits: list[tuple[Literal["queued", "preempted"], float, float]] = field(default_factory=list)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First and last of each run of steps, one after the other, that computed a token for it."""
        runs: list[tuple[int, int]] = []
        for index in self.decodes:
            if runs and runs[-1][1] == index - 1:
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
        return runs


def begin_of(trace: Trace) -> float:
    """The first moment that the trace tells of."""
    if trace.is_cut:
        return trace.steps[0].started_s
    return min([step.started_s for step in trace.steps[:1]] + [asked.asked_s for asked in trace.requests.values()])


def lanes_of(trace: Trace) -> list[Lane]:
    """One a request, in order of arrival. Cost: O(rows of all plans' columns)."""
    begin_s, end_s = begin_of(trace), max(trace.steps[-1].dispatched_s, trace.steps[-1].ended_s)
    lanes: dict[int, Lane] = {}
    waiting: dict[int, tuple[Literal["queued", "preempted"], float]] = {}
    for request_id, asked in trace.requests.items():
        end = trace.ends.get(request_id)
        lanes[request_id] = Lane(request_id, max(asked.asked_s, begin_s), end_s if end is None else end.end_s)
        if asked.arrival_s >= begin_s:
            waiting[request_id] = ("queued", asked.arrival_s)
    for index, step in enumerate(trace.steps):
        for request_id in step.preempt:
            waiting[request_id] = ("preempted", step.started_s)
        for column, request_id in enumerate(step.ids):
            lane = lanes.setdefault(request_id, Lane(request_id, step.started_s, end_s))
            if request_id in waiting:
                what, since_s = waiting.pop(request_id)
                if step.started_s > since_s:
                    lane.waits.append((what, since_s, step.started_s))
            if column < step.decodes:
                lane.decodes.append(index)
            else:
                lane.chunks.append((index, step.starts[column], step.counts[column]))
    for request_id, (what, since_s) in waiting.items():
        if request_id in lanes and lanes[request_id].ends_s > since_s:
            lanes[request_id].waits.append((what, since_s, lanes[request_id].ends_s))
    return sorted(lanes.values(), key=lambda lane: (lane.begins_s, lane.request_id))
