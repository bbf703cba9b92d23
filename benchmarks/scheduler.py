"""Cost of scheduling, in microseconds a step: planning, and applying and committing, by number running and waiting.

python benchmarks/scheduler.py             a table
python benchmarks/scheduler.py --json      one JSON line
python benchmarks/scheduler.py --overload  what spare blocks at admission cost and save (core/policy.py)
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence

from legato.core.budget import StepBudget, StepTime
from legato.core.cost import Curve, StepCost
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import FAIR, FCFS, POLICIES, SLO, Policy
from legato.core.request import Request, StopRule
from legato.core.schedule import plan_step
from legato.core.shape import Attention
from legato.core.state import SchedulerState

BLOCK_TOKENS = 32
MAX_STEPS = 400
# Nobody fits, so that every step reads as much of the queue as it may and admits nobody: the dearest kind.
FULL = {p.name: dataclasses.replace(p, spare_blocks=lambda inside: 1_000_000) for p in POLICIES.values()}
# With a gap to keep, on a machine that never gets there.
TIMED = StepTime(StepCost(Attention(), rows=Curve((1,), (0.004,), 1e-5)), 1.0, 60.0, token_s=1e-5)
TENANTS = ("", "a", "b")

NEWEST = dataclasses.replace(FCFS, victims=lambda running: sorted(running, key=lambda r: -r.rank))


def sampled(plan: StepPlan) -> StepResult:
    """A result with token 1 for every row that the plan samples."""
    ids = tuple(i for i, sample in zip(plan.request_ids, plan.samples, strict=True) if sample)
    return StepResult(plan.step, ids, (1,) * len(ids))


def loaded_state(
    running: int, waiting: int, budget: StepBudget, prompt_tokens: int = 100, policy: Policy = FCFS
) -> SchedulerState:
    """`running` requests that decode, and `waiting` more in the queue, all with other prompts. To plan with `FULL`.

    But for FCFS, of three tenants, and two in three are due at some time.
    """
    kv_blocks = running * (-(-(prompt_tokens + MAX_STEPS) // BLOCK_TOKENS) + 1)
    state = SchedulerState(kv_blocks, block_tokens=BLOCK_TOKENS, max_model_len=200_000, policy=policy)
    stop = StopRule(max_tokens=100_000)
    for request_id in range(running + waiting):
        prompt = (request_id, *range(prompt_tokens - 1))
        due_s = math.inf if policy is FCFS or request_id % 3 == 0 else 100.0 + request_id % 1009
        tenant = "" if policy is FCFS else TENANTS[request_id % 7 % 3]
        state.submit(Request(request_id, prompt, stop=stop, due_s=due_s, tenant=tenant))
        if request_id == running - 1:
            while state.waiting or any(r.known - r.scheduled > 1 for r in state.running):
                plan = plan_step(state, budget, policy)
                state.apply(plan)
                state.commit(sampled(plan))
    return state


def step_costs_us(running: int, waiting: int, policy: Policy, steps: int = 200) -> dict[str, float | str]:
    """Median and 99th percentile, in microseconds, of `plan_step`, and the medians of `apply` and `commit`.

    But for FCFS, with time to keep too.
    """
    budget = StepBudget(max_tokens=512, max_seqs=running + 1, time=None if policy is FCFS else TIMED)
    state = loaded_state(running, waiting, budget, policy=policy)
    full = FULL[policy.name]
    plan_us, apply_us, commit_us = [], [], []
    gc.collect()
    for _ in range(steps):
        started = time.perf_counter()
        plan = plan_step(state, budget, full)
        planned = time.perf_counter()
        state.apply(plan)
        applied = time.perf_counter()
        result = sampled(plan)
        answered = time.perf_counter()
        state.commit(result)
        committed = time.perf_counter()
        assert len(plan.request_ids) == running
        plan_us.append((planned - started) * 1e6)
        apply_us.append((applied - planned) * 1e6)
        commit_us.append((committed - answered) * 1e6)
    return {
        "policy": policy.name,
        "running": running,
        "waiting": waiting,
        "plan_us": round(statistics.median(plan_us), 1),
        "plan_p99_us": round(statistics.quantiles(plan_us, n=100)[98], 1),
        "apply_us": round(statistics.median(apply_us), 1),
        "commit_us": round(statistics.median(commit_us), 1),
    }


def overload(spare_per_request: int, cache: bool, policy: Policy = FCFS) -> dict[str, float | str]:
    """400 requests in a pool for about six: rows computed for each that an endless pool would compute, and steps.

    `policy`: FCFS, or NEWEST, by which whoever came last is preempted however often he was before. All prompts differ:
    what the cache saves is what preempted requests need not compute again.
    """
    rng = random.Random(0)
    policy = dataclasses.replace(policy, spare_blocks=lambda inside: inside * spare_per_request)
    budget = StepBudget(max_tokens=512, max_seqs=64)
    root = b"" if cache else None
    state = SchedulerState(
        kv_blocks=64, block_tokens=BLOCK_TOKENS, max_model_len=100_000, cache_root=root, policy=policy
    )
    needed_rows = rows = steps = most = 0
    for request_id in range(400):
        prompt_tokens, output_tokens = rng.randint(50, 400), rng.randint(50, 300)
        needed_rows += prompt_tokens + output_tokens - 1
        prompt = (request_id,) * prompt_tokens
        state.submit(Request(request_id, prompt, stop=StopRule(max_tokens=output_tokens)))
    while state.has_work:
        plan = plan_step(state, budget, policy)
        state.apply(plan)
        most = max([most, *(end.preemptions for end in state.commit(sampled(plan)))])
        rows += plan.rows
        steps += 1
    return {
        "newest_preempted": int(policy.victims is NEWEST.victims),
        "prefix_cache": int(cache),
        "spare_blocks_each": spare_per_request,
        "rows_per_needed_row": round(rows / needed_rows, 3),
        "steps": steps,
        "preemptions": state.preemptions,
        "most_of_one": most,
    }


def print_table(rows: Sequence[Mapping[str, float | str]]) -> None:
    print(" ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:>12}" if isinstance(value, str) else f"{value:>12,}" for value in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument(
        "--overload", action="store_true", help="compare spare blocks at admission, and whom to preempt"
    )
    arguments = parser.parse_args()
    if arguments.overload:
        rows = [overload(spare, cache) for cache in (False, True) for spare in (0, 1, 2)]
        rows += [overload(spare, False, NEWEST) for spare in (0, 1, 2)]
    else:
        shapes = [(64, 100), (256, 0), (256, 100), (256, 10_000), (256, 100_000)]
        rows = [step_costs_us(running, waiting, FCFS) for running, waiting in shapes]
        rows += [step_costs_us(256, waiting, policy) for policy in (SLO, FAIR) for waiting in (100, 100_000)]
    if arguments.json:
        print(json.dumps({"benchmark": "overload" if arguments.overload else "scheduler", "rows": rows}))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
