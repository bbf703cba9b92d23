"""`Replica`: an engine on a virtual clock. The same state and planning; steps take what is predicted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from legato.core.budget import StepBudget
from legato.core.cost import StepCost
from legato.core.leap import leap, quiet_seconds, quiet_steps
from legato.core.pacer import Pacer, lead_seconds
from legato.core.plan import StepPlan, StepResult
from legato.core.request import Finished, Request
from legato.core.schedule import plan_step
from legato.core.shape import StepShape
from legato.core.slot import Slot
from legato.core.state import SchedulerState
from legato.errors import RequestError

Noise = Callable[[StepShape, float], float]
"""How many times as long as it should a step takes, by its shape and the second in which it begins."""


class Witness(Protocol):
    """Sees what happens. Seconds are the simulation's."""

    def steps(self, replica: Replica, begin_s: float, ends_s: Sequence[float], shape: StepShape) -> None:
        """Steps that follow one another, each beginning when the one before it ends; `shape`: of the first."""

    def tokens(self, request_ids: Sequence[int], steps_s: Sequence[float]) -> None:
        """Each of these got a token at each of `steps_s`."""

    def finished(self, ended: Finished, at_s: float) -> None:
        """A request ended."""

    def refused(self, request: Request, reason: str) -> None:
        """A request can never be served."""


class Replica:
    """Requests come by `arrive`, in order of time, never before `ready_s` of a step that `turn` has begun.

    `truth`: what steps take; `noise`: times so much. `ahead`: steps are planned while the one before is computed, so
    that whoever comes shortly before its end is in the step after. `pacer`: gives steps their time, as the engine's
    does; None: tokens alone bound them. `learns`: it is told what steps took, as the engine's is; else it knows
    `truth` from the start, and with `leaps` steps that are alike are taken many at once, which changes nothing but the
    time that this takes. `planned` is called with every plan; then none are taken at once.
    """

    def __init__(
        self,
        state: SchedulerState,
        budget: StepBudget,
        truth: StepCost,
        witness: Witness,
        *,
        pacer: Pacer | None = None,
        learns: bool = False,
        noise: Noise | None = None,
        planned: Callable[[StepPlan], None] | None = None,
        leaps: bool = True,
        ahead: bool = False,
    ) -> None:
        self.state = state
        self.ready_s = math.inf
        """When the step that is being computed ends; endless if there is nothing to do."""
        self.unfinished = 0
        """Requests that have come and not ended."""
        self._budget = budget
        self._truth = truth
        self._witness = witness
        self._pacer = pacer
        self._learns = learns and pacer is not None
        self._noise = noise
        self._planned = planned
        self._leaps = leaps and planned is None and not self._learns and not state.memory.host.slots
        self._ahead = ahead
        self._inbox: deque[tuple[float, Request]] = deque()
        self._plan: StepPlan | None = None
        self._shape = StepShape()
        self._begin_s = 0.0
        self._quiet: list[Slot] = []  # who decodes in the steps that are taken at once
        self._quiet_ends_s: list[float] = []

    def arrive(self, request: Request, now_s: float) -> None:
        """Takes a request. It is in the first step that begins then or later."""
        self._inbox.append((now_s, request))
        self.unfinished += 1
        if self.ready_s == math.inf:
            self.ready_s = now_s
        elif self._quiet_ends_s and now_s < self.ready_s:
            # Of the steps taken at once, those that have begun go on; the next one is planned anew.
            step_s = self._quiet_ends_s[0] - self._begin_s
            begun = bisect_left(self._quiet_ends_s, now_s + self._lead_s(step_s)) + 1
            del self._quiet_ends_s[begun:]
            self.ready_s = self._quiet_ends_s[-1]

    def turn(self) -> None:
        """At `ready_s`: ends the step that was computed, and begins the next one. Cost: O(running)."""
        now_s = self.ready_s
        step_s = now_s - self._begin_s
        if self._quiet_ends_s:
            step_s = self._quiet_ends_s[0] - self._begin_s
            self._land(now_s)
        elif self._plan is not None:
            self._commit(self._plan, now_s)
            self._plan = None
        if self._inbox:
            self._take_in(now_s - self._lead_s(step_s) if self.state.has_work else now_s)
        if not self.state.has_work:
            self.ready_s = math.inf
            return
        if self._inbox or not (self._leaps and self._begin_leap(now_s)):
            self._begin_step(now_s)

    def _begin_step(self, now_s: float) -> None:
        state, pacer = self.state, self._pacer
        plan = plan_step(state, self._budget if pacer is None else pacer.budget(self._budget, now_s), state.policy)
        state.apply(plan)
        if self._planned is not None:
            self._planned(plan)
        shape = StepShape.of(plan, self._truth.attention, copied_blocks=len(state.moves(plan.step)))
        self._plan, self._shape, self._begin_s = plan, shape, now_s
        self.ready_s = now_s + self._seconds(shape, now_s)

    def _begin_leap(self, now_s: float) -> bool:
        steps = quiet_steps(self.state, self._budget.max_seqs, self._truth.attention)
        if steps < 2:
            return False
        self._quiet = list(self.state.running)
        self._begin_s = now_s
        self._shape, seconds = quiet_seconds(self._quiet, steps, self._truth)
        if self._noise is None:
            self._quiet_ends_s = list(accumulate(seconds, initial=now_s))[1:]
        else:
            for step_s in seconds:
                now_s += step_s * self._noise(self._shape, now_s)
                self._quiet_ends_s.append(now_s)
        self.ready_s = self._quiet_ends_s[-1]
        return True

    def _land(self, now_s: float) -> None:
        ends_s, self._quiet_ends_s = self._quiet_ends_s, []
        finished = leap(self.state, len(ends_s), now_s)
        self._witness.steps(self, self._begin_s, ends_s, self._shape)
        self._witness.tokens([slot.request_id for slot in self._quiet], ends_s)
        self._end(finished, now_s)

    def _commit(self, plan: StepPlan, now_s: float) -> None:
        sampled = tuple(i for i, samples in zip(plan.request_ids, plan.samples, strict=True) if samples)
        if self._learns:
            assert self._pacer is not None
            self._pacer.observe(self._shape, now_s - self._begin_s, plan.decodes)
        finished = self.state.commit(StepResult(plan.step, sampled, sampled), now_s)
        self._witness.steps(self, self._begin_s, (now_s,), self._shape)
        self._witness.tokens(sampled, (now_s,))
        self._end(finished, now_s)

    def _end(self, finished: Sequence[Finished], now_s: float) -> None:
        for ended in finished:
            self.unfinished -= 1
            self._witness.finished(ended, now_s)

    def _take_in(self, until_s: float) -> None:
        """Those that came by then; all, if there is nothing else to do."""
        while self._inbox and (self._inbox[0][0] <= until_s or not self.state.has_work):
            _, request = self._inbox.popleft()
            try:
                self.state.submit(request)
            except RequestError as error:
                self.unfinished -= 1
                self._witness.refused(request, str(error))

    def _lead_s(self, step_s: float) -> float:
        """How long before the end of a step the next one is planned."""
        return min(lead_seconds(step_s), step_s) if self._ahead else 0.0

    def _seconds(self, shape: StepShape, begin_s: float) -> float:
        seconds = self._truth.predict(shape)
        return seconds if self._noise is None else seconds * self._noise(shape, begin_s)
