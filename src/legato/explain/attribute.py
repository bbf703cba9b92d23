"""`explain`: each gap between two tokens, and the time to each first one, as a sum of causes."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from legato.explain.parts import Parts, StepParts, split_step
from legato.explain.read import Trace
from legato.explain.record import Asked

_CLOCK_S = 1e-6  # what two readings of a clock may differ by
# What a plan does not reckon with. A gap that is late by it was planned to be in time.
UNPLANNED = ("preemption", "planning", "between", "tokenizer", "delivery", "noise")


@dataclass(frozen=True, slots=True)
class Gap:
    """What a stream waited for one token: the server handed on the one before at `begins_s`, and this one at `ends_s`.

    `token`: 1 for the first, whose wait begins when the server begins with the request. `first`, `last`: indices of the
    steps that lie in it. `budget_s`: how long it may be; None: nobody said. `parts` add up to `seconds`.
    `cause`: the one kind to name.
    """

    request_id: int
    token: int
    begins_s: float
    ends_s: float
    first: int
    last: int
    budget_s: float | None
    parts: Parts
    cause: str

    @property
    def seconds(self) -> float:
        """How long it is, by the server's clock."""
        return self.ends_s - self.begins_s

    @property
    def over_s(self) -> float:
        """How much longer than it may be; 0 if it is in time."""
        return 0.0 if self.budget_s is None else max(0.0, self.seconds - self.budget_s)

    @property
    def is_late(self) -> bool:
        """Whether it is longer than it may be, by more than clocks differ."""
        return self.over_s > _CLOCK_S


@dataclass(slots=True)
class Explanation:
    """What is said of a trace. `late`: all gaps over the budget, in order of time. `firsts`: of each request that has
    one, the wait for its first token. `gaps`: how many there are in all, `tokens` likewise.
    """

    trace: Trace
    budget_s: float | None
    late: list[Gap] = field(default_factory=list)
    firsts: dict[int, Gap] = field(default_factory=dict)
    gaps: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Of each request, indices of the steps that its tokens came of."""

    @property
    def causes(self) -> dict[str, tuple[int, float]]:
        """Late gaps by cause: how many, and how many seconds over the budget in all. The most seconds first."""
        count: Counter[str] = Counter(gap.cause for gap in self.late)
        over = {cause: sum(gap.over_s for gap in self.late if gap.cause == cause) for cause in count}
        return {cause: (count[cause], over[cause]) for cause in sorted(count, key=over.__getitem__, reverse=True)}

    @property
    def deviation(self) -> float:
        """How far parts are from adding up to what was measured, relative, at worst."""
        every = [*self.late, *self.firsts.values()]
        return max((abs(gap.parts.total / gap.seconds - 1) for gap in every if gap.seconds > 0.0), default=0.0)

    def of(self, request_id: int) -> list[Gap]:
        """Every gap of a request, late or not, in order of time; the first token's first, if that is known."""
        attribution = Attribution(self.trace)
        gaps = [gap for gap in (self.firsts.get(request_id),) if gap is not None]
        gaps += [
            attribution.gap(request_id, token, a, b, self.budget_s)
            for token, a, b in _pairs(self.trace, request_id, self.tokens.get(request_id, ()))
        ]
        return gaps

    def worst(self, count: int) -> list[tuple[Gap, int]]:
        """The longest gaps, the longest first, or the most over the budget; and how many others end with the same step.

        They have one story: one of them tells it. If none is late, those that are in time.
        """
        if self.late:
            every = [(gap.over_s, gap.request_id, gap.token, gap.first - 1, gap.last) for gap in self.late]
        else:
            steps = self.trace.steps
            every = [
                (steps[b].dispatched_s - steps[a].dispatched_s, request_id, token, a, b)
                for request_id, indices in self.tokens.items()
                for token, a, b in _pairs(self.trace, request_id, indices)
            ]
        every.sort(key=lambda entry: (-entry[0], entry[1]))
        others = Counter(b for *_, b in every)
        attribution, told = Attribution(self.trace), dict[int, tuple[int, int, int, int]]()
        for _, request_id, token, a, b in every:
            if len(told) < count or b in told:
                told.setdefault(b, (request_id, token, a, b))
        return [(attribution.gap(*entry, self.budget_s), others[b] - 1) for b, entry in told.items()]


def explain(trace: Trace, budget_s: float | None = None) -> Explanation:
    """Every gap longer than `budget_s`: the header's if None, and what a request wanted for itself before both.

    Cost: 1 µs a token, 30 µs a late one.
    """
    budget_s = budget_s or trace.header.itl_s or None
    steps, attribution = trace.steps, Attribution(trace)
    found = Explanation(trace, budget_s, tokens=_tokens(trace))
    for request_id, indices in found.tokens.items():
        limit_s = attribution.limit(request_id, budget_s)
        for token, a, b in _pairs(trace, request_id, indices):
            found.gaps += 1
            if limit_s is not None and steps[b].dispatched_s - steps[a].dispatched_s > limit_s + _CLOCK_S:
                found.late.append(attribution.gap(request_id, token, a, b, budget_s))
        first = attribution.first(request_id, indices)
        if first is not None:
            found.firsts[request_id] = first
    found.late.sort(key=lambda gap: gap.ends_s)
    return found


def _tokens(trace: Trace) -> dict[int, list[int]]:
    """Indices of steps, of each request those that a token came of before its end."""
    tokens: dict[int, list[int]] = {}
    ends = {request_id: end.end_s + _CLOCK_S for request_id, end in trace.ends.items()}
    for index, step in enumerate(trace.steps):
        for request_id, sample in zip(step.ids, step.samples, strict=True):
            if sample and step.dispatched_s <= ends.get(request_id, step.dispatched_s):
                tokens.setdefault(request_id, []).append(index)
    return tokens


def _pairs(trace: Trace, request_id: int, indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(number of the token, step of the one before, its own step), from 2 on if the first is known."""
    asked = trace.requests.get(request_id)
    before = 0 if asked is None else asked.generated
    for n in range(1, len(indices)):
        yield before + n + 1, indices[n - 1], indices[n]


class Attribution:
    """Makes gaps. Keeps what it has found of steps: many streams wait for the same."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ended_s = [step.ended_s for step in trace.steps]
        spans = [(*r.tokenized_s, r.id) for r in trace.requests.values() if r.tokenized_s is not None]
        self._spans = sorted(spans)
        self._longest_s = max((stop - start for start, stop, _ in spans), default=0.0)
        self._split = functools.cache(functools.partial(split_step, trace))

    def split(self, index: int) -> StepParts:
        """`split_step`, once a step."""
        return self._split(index)

    def limit(self, request_id: int, budget_s: float | None) -> float | None:
        """How long a gap of a request may be."""
        asked = self._trace.requests.get(request_id)
        return budget_s if asked is None or asked.itl_s is None else asked.itl_s

    def gap(self, request_id: int, token: int, a: int, b: int, budget_s: float | None) -> Gap:
        """Between the tokens of steps `a` and `b`."""
        steps = self._trace.steps
        begins_s, ends_s = steps[a].dispatched_s, steps[b].dispatched_s
        parts = Parts()
        at_s = begins_s
        for index in range(a + 1, b + 1):
            share, at_s = self._enter(parts, index, at_s, ends_s)
            if index < b:  # no token came of it: it was out, or computed again what it had
                parts.add("preemption", share * steps[index].step_s)
            else:
                self._work(parts, index, request_id, share, "preemption")
        self._tail(parts, request_id, at_s, ends_s)
        limit_s = self.limit(request_id, budget_s)
        return Gap(request_id, token, begins_s, ends_s, a + 1, b, limit_s, parts, _cause(parts, limit_s))

    def first(self, request_id: int, indices: Sequence[int]) -> Gap | None:
        """The wait for a first token; None if a part of it is not in the trace."""
        steps, asked = self._trace.steps, self._trace.requests.get(request_id)
        if asked is None or asked.generated or not indices:
            return None
        if self._trace.is_cut and asked.asked_s < steps[0].started_s:
            return None
        parts, last = Parts(), indices[0]
        ends_s, at_s = steps[last].dispatched_s, min(asked.arrival_s, steps[last].dispatched_s)
        self._read(parts, asked)
        first = bisect_right(self._ended_s, at_s)
        computed, is_out = 0, False
        for index in range(first, last + 1):
            step = steps[index]
            share, at_s = self._enter(parts, index, at_s, ends_s)
            is_out = is_out or request_id in step.preempt
            column = step.ids.index(request_id) if request_id in step.ids else None
            if column is None and is_out:
                parts.add("preemption", share * step.step_s)
            elif column is None:
                self._wait(parts, index, share)
            else:
                is_out = False
                again = step.starts[column] < computed
                self._work(parts, index, request_id, share, "preemption" if again else "own_prompt")
                computed = max(computed, step.starts[column] + step.counts[column])
        self._tail(parts, request_id, at_s, ends_s)
        cause = max(parts.seconds, key=parts.__getitem__, default="own_prompt")
        return Gap(request_id, 1, asked.asked_s, ends_s, first, last, asked.ttft_s, parts, cause)

    def tokenized(self, request_id: int, start_s: float, stop_s: float) -> list[tuple[int, float]]:
        """(other request, seconds of that time in which its text was turned into tokens), each second once."""
        found, at_s = [], start_s
        begin = bisect_right(self._spans, (start_s - self._longest_s, 0.0, 0))
        for span_start_s, span_stop_s, other in self._spans[begin:]:
            if span_start_s >= stop_s:
                break
            seconds = min(span_stop_s, stop_s) - max(span_start_s, at_s)
            if other != request_id and seconds > 0.0:
                found.append((other, seconds))
                at_s = min(span_stop_s, stop_s)
        return found

    def _enter(self, parts: Parts, index: int, at_s: float, ends_s: float) -> tuple[float, float]:
        """From `at_s` to the end of a step: the share of it that lies after `at_s`, and its end."""
        step = self._trace.steps[index]
        if step.started_s > at_s:
            parts.add("between", min(step.started_s, ends_s) - at_s)
        overlap_s = min(step.ended_s, ends_s) - max(step.started_s, at_s)
        share = max(0.0, overlap_s) / step.step_s if step.step_s > 0.0 else 0.0
        return share, min(max(at_s, step.ended_s), ends_s)

    def _work(self, parts: Parts, index: int, request_id: int, share: float, own: str) -> None:
        """A step that the request had rows in. `own`: what its own chunk counts as."""
        split = self.split(index)
        for kind in ("decodes", "sampling", "planning", "noise"):
            parts.add(kind, share * getattr(split, kind))
        for other, seconds in split.chunks:
            if other == request_id:
                parts.add(own, share * seconds)
            else:
                parts.add_chunk(other, share * seconds)

    def _wait(self, parts: Parts, index: int, share: float) -> None:
        """A step that the request had no rows in."""
        parts.add("queueing", share * self._trace.steps[index].step_s)
        for other, seconds in self.split(index).chunks:
            parts.behind[other] = parts.behind.get(other, 0.0) + share * seconds

    def _tail(self, parts: Parts, request_id: int, at_s: float, ends_s: float) -> None:
        """From the end of the last step to the server's door."""
        tokenizing_s = sum(seconds for _, seconds in self.tokenized(request_id, at_s, ends_s))
        parts.add("tokenizer", tokenizing_s)
        parts.add("delivery", ends_s - at_s - tokenizing_s)

    def _read(self, parts: Parts, asked: Asked) -> None:
        """Before a request was sent to the engine."""
        if asked.tokenized_s is not None:
            start_s, stop_s = asked.asked_s, min(asked.tokenized_s[1], asked.arrival_s)
            parts.add("tokenizer", max(0.0, stop_s - start_s))
            parts.add("delivery", asked.arrival_s - max(start_s, stop_s))


def _cause(parts: Parts, limit_s: float | None) -> str:
    """What is to be named for a gap. What was not planned comes first if it makes half of what is too much.

    Beside a prompt a step is planned to last as long as it may: the chunk is always the largest part then, and in time.
    """
    over_s = 0.0 if limit_s is None else parts.total - limit_s
    if limit_s is not None and over_s > 0.0:
        unplanned = {kind: parts[kind] for kind in UNPLANNED if parts[kind] > 0.0}
        if unplanned and sum(unplanned.values()) >= over_s / 2:
            return max(unplanned, key=unplanned.__getitem__)
        if parts["chunks"] > 0.0 and parts["decodes"] + parts["sampling"] <= limit_s:
            return "chunks"
    return max(parts.seconds, key=parts.__getitem__, default="decodes")
