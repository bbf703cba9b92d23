"""An engine on a virtual clock: 4 ms a step, and 1 ms for each row but the first."""

from __future__ import annotations

from functools import cache
from random import Random

from tests.fakes import VOCAB, FakeExecutor

from legato.core.budget import StepBudget
from legato.core.cost import Curve, StepCost
from legato.core.pacer import Pacer
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import SLO
from legato.core.shape import Attention, StepShape
from legato.core.state import SchedulerState
from legato.core.tracker import CostTracker
from legato.demo.run import Run, Setup, record
from legato.engine.loop import Engine

MACHINE = StepCost(Attention(), rows=Curve((1,), (0.004,), 0.001))
SETUP = Setup(streams=4, prompt_tokens=600, step_tokens=100, itl_ms=30.5, lead_s=0.1, tail_s=0.1)


class Timed(FakeExecutor):
    """Is its own clock, and is interrupted in the step after `steps_left`."""

    def __init__(self, steps_left: int | None = None) -> None:
        super().__init__(16)
        self.now_s = 0.0
        self._steps_left = steps_left

    def __call__(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        if self._steps_left is not None:
            if not self._steps_left:
                raise KeyboardInterrupt
            self._steps_left -= 1
        self.now_s += MACHINE.predict(StepShape.of(plan, MACHINE.attention))
        return super().execute(plan)


def engine_of(*, itl_ms: float = 30.5, most_tokens: int = 1024, steps_left: int | None = None) -> tuple[Engine, Timed]:
    executor = Timed(steps_left)
    pacer = Pacer(CostTracker(MACHINE, margin=1.0), itl_s=itl_ms / 1000, slack_s=0.0)
    state = SchedulerState(400, 16, 3000, policy=SLO)
    return Engine(state, executor, StepBudget(most_tokens, 64), executor, pacer=pacer), executor


@cache
def recorded(setup: Setup = SETUP, steps_left: int | None = None) -> list[Run]:
    """The three runs, or what came of them before the interrupt."""
    engine, clock = engine_of(itl_ms=setup.itl_ms, steps_left=steps_left)
    runs: list[Run] = []
    try:
        record(engine, setup, VOCAB, clock, Random(1), lambda run: None, into=runs)
    except KeyboardInterrupt:
        assert steps_left is not None
    return runs
