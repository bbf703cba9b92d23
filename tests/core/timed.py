"""A driver with a clock: a machine whose steps take exactly what is predicted."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.scheduler import sampled
from tests.core.drive import Driver, prompt_of

from legato.core.budget import Prefer, StepTime
from legato.core.cost import Curve, StepCost
from legato.core.plan import StepPlan
from legato.core.policy import SLO, Policy
from legato.core.request import Request, StopRule
from legato.core.schedule import plan_step
from legato.core.shape import Attention, StepShape

# 4 ms a step, 0.25 ms a row, a microsecond for each 10 keys behind a row.
MACHINE = StepCost(Attention(), rows=Curve((1,), (0.004,), 0.00025), pair_s=1e-7)


class Timed(Driver):
    """A driver with a clock: a step takes what `MACHINE` says. `gaps`: of each request, in seconds."""

    def __init__(self, *, itl_s: float, prefer: Prefer = "itl", policy: Policy = SLO, max_seqs: int = 64) -> None:
        super().__init__(blocks=4000, block_tokens=16, max_tokens=512, max_seqs=max_seqs, policy=policy)
        self.time = StepTime(MACHINE, 0.0, itl_s, prefer=prefer)
        self.plain = self.budget
        self.now_s = 0.0
        self.last_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        self.gaps: dict[int, list[float]] = {}

    def arrive(self, request: Request) -> None:
        self.submit(replace(request, arrival_s=self.now_s))

    def tick(self) -> StepPlan:
        self.budget = replace(self.plain, time=replace(self.time, now_s=self.now_s))
        plan = plan_step(self.state, self.budget, self.policy)
        self.state.apply(plan)
        result = sampled(plan)
        self.now_s += MACHINE.predict(StepShape.of(plan, MACHINE.attention))
        self.note(self.state.commit(result, self.now_s))
        for request_id in self.state.emitted.request_ids:
            if request_id in self.last_s:
                self.gaps.setdefault(request_id, []).append(self.now_s - self.last_s[request_id])
            self.first_s.setdefault(request_id, self.now_s)
            self.last_s[request_id] = self.now_s
        return plan

    def tick_until(self, request_id: int, most: int = 5000) -> None:
        for _ in range(most):
            if request_id in self.first_s:
                return
            self.tick()
        raise AssertionError(f"request {request_id} has no token after {most} steps")


def streams(driver: Timed, count: int, tokens: int = 100_000) -> None:
    for i in range(count):
        driver.arrive(Request(i, prompt_of(8, i), stop=StopRule(tokens)))
    while len(driver.first_s) < count:
        driver.tick()
    driver.gaps.clear()
