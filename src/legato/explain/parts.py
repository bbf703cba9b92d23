"""`Parts`: where the time of a gap went. `StepParts`: the same of a step, whoever waited for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from legato.core.cost import StepCost
from legato.core.shape import StepShape
from legato.explain.read import Trace
from legato.explain.record import Stepped, shape_of

KINDS = {
    "decodes": "one token for each running stream",
    "sampling": "logits, drawing, log-probabilities",
    "chunks": "prompts of other requests",
    "own_prompt": "its own prompt",
    "queueing": "steps for others, before its turn",
    "preemption": "its KV was given up and computed again",
    "planning": "planning the step",
    "between": "the engine computed nothing",
    "tokenizer": "the server turned texts into tokens",
    "delivery": "from the engine to the stream",
    "noise": "what a step took beyond what was foreseen",
}
"""Parts of a gap, and what they mean."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step; they add up to `step_s`. `noise` may be negative.

    `chunks`: (request, seconds) of each prompt in it, in the order of the plan. Of a step that was not foreseen, what
    it took is shared out by rows, and `sampling` and `noise` are 0.
    """

    decodes: float
    sampling: float
    chunks: tuple[tuple[int, float], ...]
    planning: float
    noise: float

    @property
    def foreseen(self) -> float:
        """What the step was expected to take."""
        return self.decodes + self.sampling + sum(seconds for _, seconds in self.chunks)


@dataclass(slots=True)
class Parts:
    """Seconds by kind (of `KINDS`) and, of chunks and of waiting, by the request that was computed meanwhile."""

    seconds: dict[str, float] = field(default_factory=dict)
    chunks: dict[int, float] = field(default_factory=dict)
    behind: dict[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Of all kinds: the gap."""
        return sum(self.seconds.values())

    def add(self, kind: str, seconds: float) -> None:
        """So much more of a kind."""
        if seconds:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def add_chunk(self, request_id: int, seconds: float) -> None:
        """So much more for another request's prompt."""
        self.add("chunks", seconds)
        self.chunks[request_id] = self.chunks.get(request_id, 0.0) + seconds

    def __getitem__(self, kind: str) -> float:
        return self.seconds.get(kind, 0.0)


def split_step(trace: Trace, index: int) -> StepParts:
    """Where the time of `trace.steps[index]` went. Cost: 20 µs and O(its prompts)."""
    step, cost = trace.steps[index], trace.cost(index)
    shape = shape_of(step)
    if cost is None or shape is None or step.predicted_s is None:
        return _by_rows(step)
    return _foreseen(step, shape, cost, step.predicted_s)


def _by_rows(step: Stepped) -> StepParts:
    work_s, rows = step.step_s - step.planned_s, max(sum(step.counts), 1)
    chunks = zip(step.ids[step.decodes :], step.counts[step.decodes :], strict=True)
    shares = tuple((request_id, work_s * count / rows) for request_id, count in chunks)
    decodes_s = work_s - sum(seconds for _, seconds in shares)
    return StepParts(decodes_s, 0.0, shares, step.planned_s, 0.0)


def _foreseen(step: Stepped, shape: StepShape, cost: StepCost, predicted_s: float) -> StepParts:
    """Decodes as if they were alone; prompts share what they add by what each would add alone."""
    bare = dataclasses.replace(shape, logit_rows=0, drawn_rows=0, nucleus_rows=0, logprob_rows=0)
    decodes = StepShape.of_decodes(step.starts[: step.decodes], cost.attention)
    decodes = dataclasses.replace(decodes, logit_rows=0)
    all_s, bare_s, decodes_s = cost.predict(shape), cost.predict(bare), cost.predict(decodes)
    entries = range(step.decodes, len(step.ids))
    if not entries:
        decodes_s = bare_s  # copies of blocks included
    alone = [
        cost.predict(decodes.with_chunk(cost.attention, step.starts[i], step.counts[i])) - decodes_s for i in entries
    ]
    # The fitted terms may be newer than the prediction: what was said then is what counts.
    factor = predicted_s / all_s if all_s else 0.0
    share = factor * (bare_s - decodes_s) / (sum(alone) or 1.0)
    chunks = tuple((step.ids[i], share * seconds) for i, seconds in zip(entries, alone, strict=True))
    noise = step.step_s - step.planned_s - predicted_s
    return StepParts(factor * decodes_s, factor * (all_s - bare_s), chunks, step.planned_s, noise)
