"""`StepTrace`: the last steps as they were, for metrics. `TracedStep`: one of them for a trace that is kept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from legato.core.budget import StepBudget
from legato.core.plan import StepPlan
from legato.core.shape import StepShape
from legato.core.view import Progress


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step carried out. Seconds are the engine's clock; counts are as the step left them.

    `plan_s`: planning and `apply`. `step_s`: to the end of `commit`, from the beginning of planning or, of a step that
    was planned ahead, from the commit of the one before: what a stream waits between two tokens.
    """

    plan: StepPlan
    started_s: float
    plan_s: float
    step_s: float
    running: int
    waiting: int
    free_blocks: int

    @property
    def prefill_rows(self) -> int:
        """Rows of the step that belong to prompts (or to their recomputation)."""
        return self.plan.rows - self.plan.decodes


class StepTrace:
    """The newest `capacity` records, oldest first."""

    __slots__ = ("_records",)

    def __init__(self, capacity: int = 1024) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        """Adds a record; the oldest makes room."""
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step, and what was foreseen of it: all that the question "why was this token late?" needs.

    `emitted`: requests that a token came for. `ahead`: planned while the step before was computed, so that `plan_s` is
    no part of `step_s`. Of steps that are bounded by tokens alone the rest is None or 0: `shape`; `predicted_s`, by
    what was known just before, without a margin; `scale`, `memory_scale` of that prediction and `margin` of the next;
    `budget_s`: what the step was allowed to take, None also if endless.
    """

    record: StepRecord
    emitted: tuple[int, ...]
    ahead: bool = False
    shape: StepShape | None = None
    predicted_s: float | None = None
    budget_s: float | None = None
    scale: float = 0.0
    memory_scale: float = 0.0
    margin: float = 0.0


def allowed_seconds(running: Iterable[Progress], plan: StepPlan, budget: StepBudget) -> float | None:
    """What the step of `plan`, not applied yet, may take; None if nothing bounds it. Cost: O(running)."""
    time = budget.time
    if time is None:
        return None
    inside = set(plan.request_ids[: plan.decodes])
    decodes = [r for r in running if r.request_id in inside]
    alone = StepShape.of_decodes([r.scheduled for r in decodes], time.cost.attention)
    seconds = time.step_seconds(decodes, time.cost.predict(alone))
    return seconds if seconds < math.inf else None
