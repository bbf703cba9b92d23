"""`Pacer`: from the gap that streams may see to the time of each step, and back from what steps took."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from legato.core.budget import Prefer, StepBudget, StepTime
from legato.core.pace import Pace
from legato.core.shape import StepShape
from legato.core.tracker import CostTracker

LateCause = Literal["preempted", "decodes", "slow", "prompts", "between"]

_CLOCK_S = 1e-6  # what two readings of a clock may differ by
# Errors are looked up so often: they are sorted out of the last steps, 50 microseconds each time.
_ERRORS_EVERY = 32
_GUESS_EVERY, _GUESS_AT, _GUESS_ROWS = 8, 1024, 512


# The next step is planned so long before the end of the current one: what planning 256 requests takes, and what
# predictions are off by.
_LEAD_S, _LEAD_SHARE = 0.002, 0.05


def lead_seconds(step_s: float) -> float:
    """How long before the end of a step, which takes `step_s`, the one after it is planned."""
    return _LEAD_S + _LEAD_SHARE * step_s


class Pacer:
    """Gives each step its `StepTime`, from predictions that follow the machine.

    `itl_s`: the longest gap wanted between two tokens of a stream. `prefill_share`, `prefer`: see `StepTime`.
    `slack_s`: what lies between two steps and after the last of the planned work: sending, receiving.
    """

    def __init__(
        self,
        tracker: CostTracker,
        *,
        itl_s: float,
        prefill_share: float = 0.2,
        prefer: Prefer = "itl",
        slack_s: float = 0.0005,
    ) -> None:
        self.tracker = tracker
        self.itl_s = itl_s
        self.prefill_share = prefill_share
        self.prefer: Prefer = prefer
        self._slack_s = slack_s
        self.late: Counter[LateCause] = Counter()
        """Tokens that came later than `itl_s` after the one before, by cause: see `cause`."""
        self.pace = Pace()
        """What tokens take at present; where no prompt is computed, by prediction."""
        self.errors = (0.0, 0.0)
        """Of predictions, median and 95th percentile, at most 32 steps old."""
        self._steps = 0

    def budget(self, budget: StepBudget, now_s: float) -> StepBudget:
        """`budget` for a step that begins at `now_s`."""
        time = StepTime(
            self.tracker.safe,
            now_s,
            max(0.0, self.itl_s - self._slack_s),
            self.prefill_share,
            self.prefer,
            token_s=self.pace.token_s,
        )
        return dataclasses.replace(budget, time=time)

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step will take, most likely."""
        return self.tracker.cost.predict(shape)

    def observe(self, shape: StepShape, seconds: float, decodes: int = 0) -> None:
        """Learns what a step took, from its beginning to its commit. `decodes`: how many of its rows were."""
        self.tracker.observe(shape, seconds)
        self.pace.observe(shape.rows - decodes, decodes, seconds)
        if shape.rows == decodes and self._steps % _GUESS_EVERY == 0:
            # Nobody's prompt was computed: what it would take beside these, or nobody would know when load has gone.
            rows = max(self.tracker.cost.rows_within(shape, _GUESS_AT, _GUESS_ROWS, self.itl_s), 1)
            step_s = self.tracker.cost.predict(shape.with_chunk(self.tracker.cost.attention, _GUESS_AT, rows))
            self.pace.suppose(rows, step_s, _GUESS_EVERY)
        self._steps += 1
        if self._steps % _ERRORS_EVERY == 0:
            self.errors = (self.tracker.median_error, self.tracker.p95_error)

    def count_late(
        self, waited_since: Iterable[tuple[float, bool]], shape: StepShape, decodes: int, step_s: float, now_s: float
    ) -> None:
        """Counts the tokens of a step that ended at `now_s` which are late. Before `observe`.

        `waited_since`: of `SchedulerState.waited_since`. `decodes`: how many of the step's rows were decodes.
        """
        for since_s, again in waited_since:
            if now_s - since_s > self.itl_s + _CLOCK_S:
                self.late[self.cause(again, shape, decodes, step_s, now_s - since_s)] += 1

    def cause(self, again: bool, shape: StepShape, decodes: int, step_s: float, gap_s: float) -> LateCause:
        """Why a token came so late.

        "preempted": its KV had to be computed again. "between": most of the time passed outside the step. "slow": the
        step took longer than foreseen, margin included. "decodes": those alone take too long. "prompts": what is left,
        the share of prompts, or the row that one gets in any case.
        """
        if again:
            return "preempted"
        if step_s < gap_s / 2:
            return "between"
        if step_s > 1.001 * self.tracker.safe.predict(shape):
            return "slow"
        return "decodes" if shape.rows == decodes else "prompts"
