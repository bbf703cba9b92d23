"""`StepTrace`: the last steps as they were, for metrics and for the question "why was this token late?"."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from legato.core.plan import StepPlan


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
