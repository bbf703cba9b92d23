"""A step costs what runs, not what waits."""

from __future__ import annotations

import dataclasses
import sys
import time
from types import FrameType
from typing import Any

import pytest
from benchmarks.scheduler import FULL, TIMED, loaded_state, sampled

from legato.core.budget import StepBudget
from legato.core.policy import FAIR, FCFS, POLICIES, Policy
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState

BUDGET = StepBudget(max_tokens=512, max_seqs=257)


def lines_run(state: SchedulerState, budget: StepBudget = BUDGET) -> tuple[int, int]:
    """Lines of Python that planning, and applying with committing, execute for one step."""
    count = 0

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        plan = plan_step(state, budget, FULL[state.policy.name])
        planned = count
        state.apply(plan)
        state.commit(sampled(plan))
    finally:
        sys.settrace(before)
    return planned, count - planned


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_step_runs_the_same_lines_with_100_and_with_10000_waiting(policy: Policy) -> None:
    """With time to keep, three tenants and deadlines, where the policy has them."""
    budget = BUDGET if policy is FCFS else dataclasses.replace(BUDGET, time=TIMED)
    few, many = (lines_run(loaded_state(256, n, budget, policy=policy), budget) for n in (100, 10_000))
    assert many[0] <= 1.3 * few[0]
    assert many[1] <= 1.3 * few[1]


@pytest.mark.parametrize(
    ("policy", "waiting"), [(FCFS, 100), (FCFS, 10_000), (FAIR, 10_000)], ids=["fcfs 100", "fcfs 10,000", "fair 10,000"]
)
def test_planning_256_running_takes_under_half_a_millisecond(policy: Policy, waiting: int) -> None:
    """20 to 80 microseconds on a fast machine; the best of many, since machines that run tests are slow and busy."""
    budget = BUDGET if policy is FCFS else dataclasses.replace(BUDGET, time=TIMED)
    state = loaded_state(256, waiting, budget, policy=policy)
    best = float("inf")
    for _ in range(200):
        started = time.perf_counter()
        plan_step(state, budget, FULL[policy.name])
        best = min(best, time.perf_counter() - started)
    assert best < 500e-6
