"""Who goes before whom: tenants, deadlines, prompts beside each other, gaps of single requests."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.drive import Driver, prompt_of, request_of
from tests.core.timed import MACHINE, Timed, streams

from legato.core.budget import StepTime
from legato.core.plan import StepPlan
from legato.core.policy import FAIR, FCFS, SLO, Policy
from legato.core.request import Request, StopRule
from legato.core.tenants import Price, Tenants

SEQS, STEP, PROMPT, ANSWER = 4, 16, 60, 3


class Shares(Driver):
    """A driver that adds up what each tenant is served, from the plans alone."""

    def __init__(self, weights: Mapping[str, float], policy: Policy = FAIR, **options: int) -> None:
        super().__init__(
            blocks=400,
            max_tokens=options.get("max_tokens", STEP),
            max_seqs=options.get("max_seqs", SEQS),
            policy=policy,
            cache=False,
            tenants=Tenants(weights),
        )
        self.weights = weights
        self.served: Counter[str] = Counter()

    def ask(self, tenant: str, prompt_tokens: int, max_tokens: int = ANSWER) -> int:
        request_id = len(self.requests)
        prompt = prompt_of(prompt_tokens, request_id)
        self.submit(Request(request_id, prompt, stop=StopRule(max_tokens), tenant=tenant))
        return request_id

    def step(self) -> StepPlan:
        plan = super().step()
        for request_id, count in zip(plan.request_ids, plan.counts, strict=True):
            tenant = self.requests[request_id].tenant
            self.served[tenant] += count / self.weights.get(tenant, 1.0)  # type: ignore[assignment]
        return plan

    def backlogged(self, tenant: str) -> bool:
        return any(slot.request.tenant == tenant for slot in self.state.waiting)


@given(
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 2.0])),
    lengths=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, PROMPT)), min_size=60, max_size=120),
)
@settings(max_examples=30, deadline=None)
def test_two_tenants_that_both_wait_are_served_alike_within_the_stated_bound(
    weights: tuple[float, float], lengths: list[tuple[str, int]]
) -> None:
    """What those admitted have left to compute, and one step, by weight."""
    by_name = dict(zip("ab", weights, strict=True))
    driver = Shares(by_name)
    for tenant, length in lengths:
        driver.ask(tenant, length)
    bound = (SEQS * (PROMPT + ANSWER) + STEP) / min(weights)
    while driver.backlogged("a") and driver.backlogged("b"):
        driver.step()
        assert abs(driver.served["a"] - driver.served["b"]) <= bound
    driver.run()


@pytest.mark.parametrize(("policy", "fair"), [(FAIR, True), (SLO, False), (FCFS, False)])
def test_a_flood_of_one_tenant_does_not_take_the_share_of_another(policy: Policy, fair: bool) -> None:
    driver = Shares({}, policy)
    for _ in range(300):
        driver.ask("flood", 10)
    for _ in range(60):
        driver.ask("calm", 40)
    while driver.backlogged("flood") and driver.backlogged("calm"):
        driver.step()
    ratio = driver.served["calm"] / driver.served["flood"]
    assert (0.9 < ratio < 1.1) == fair


def test_service_is_shared_by_weight() -> None:
    driver = Shares({"a": 3.0, "b": 1.0})
    for _ in range(200):
        driver.ask("a", 30)
        driver.ask("b", 30)
    for _ in range(400):
        driver.step()
    assert driver.backlogged("a")
    assert driver.backlogged("b")
    assert driver.served["a"] == pytest.approx(driver.served["b"], rel=0.05)  # each by its own weight


def test_nobody_saves_up_service_by_staying_away() -> None:
    driver = Shares({})
    for _ in range(100):
        driver.ask("busy", 40)
    for _ in range(100):
        driver.step()
    before = driver.served["busy"]
    for _ in range(100):
        driver.ask("late", 40)
    while driver.backlogged("busy") and driver.backlogged("late"):
        driver.step()
    assert driver.served["late"] == pytest.approx(driver.served["busy"] - before, abs=SEQS * (40 + ANSWER) + STEP)


def test_a_tenant_that_comes_back_at_once_has_not_lost_its_debt() -> None:
    """One request at a time, each of which is long: leaving for a moment is no way to be served first."""
    driver = Shares({})
    for _ in range(200):
        driver.ask("many", 10)
    current = driver.ask("one", 50)
    while driver.backlogged("many"):
        driver.step()
        if current in driver.finished:
            current = driver.ask("one", 50)
    assert driver.served["one"] <= driver.served["many"] + SEQS * (PROMPT + ANSWER) + STEP


def test_no_row_is_left_unused_while_somebody_waits() -> None:
    driver = Shares({"a": 1.0, "b": 50.0})
    for n in range(60):
        driver.ask("ab"[n % 2], 40, 1)
    while driver.state.waiting:
        assert driver.step().rows == STEP


def test_counters_of_tenants_that_are_gone_are_few() -> None:
    tenants = Tenants({}, Price())
    stays = tenants.join("stays")
    for n in range(10_000):
        tenant = tenants.join(f"passer-by {n}")
        tenant.charge(0, n % 7, decode=False)
        tenants.leave(tenant)
    assert len(tenants._known) <= 2100
    tenants.leave(stays)
    assert not tenants._known


def test_work_late_in_a_long_prompt_counts_for_more() -> None:
    price = Price(row=1.0, pair=0.01)
    assert price.of(1000, 10) == pytest.approx(sum(1.0 + 0.01 * (1000 + i + 1) for i in range(10)))


def due(request_id: int, prompt_tokens: int, due_s: float) -> Request:
    return replace(request_of(request_id, prompt_tokens, 1), due_s=due_s)


def test_the_earliest_deadline_goes_first_and_a_pause_keeps_what_was_computed() -> None:
    driver = Timed(itl_s=0.05)
    streams(driver, 2)
    now_s = driver.now_s
    driver.arrive(due(100, 4000, now_s + 30.0))
    for _ in range(5):
        driver.tick()
    done = next(slot.computed for slot in driver.state.running if slot.request_id == 100)
    driver.arrive(due(101, 2000, now_s + 3.0))
    driver.tick_until(101)
    paused = next(slot.computed for slot in driver.state.running if slot.request_id == 100)
    assert driver.first_s[101] <= now_s + 3.0
    assert done <= paused <= done + 200  # what fitted into the last chunk of the other
    driver.tick_until(100)
    assert driver.state.preemptions == 0
    assert driver.first_s[100] <= now_s + 30.0


def test_one_that_cannot_be_in_time_holds_up_nobody_who_can() -> None:
    driver = Timed(itl_s=0.05)
    driver.time = replace(driver.time, token_s=0.0004)
    streams(driver, 2)
    now_s = driver.now_s
    driver.arrive(due(100, 8000, now_s + 0.5))  # takes three seconds
    driver.arrive(due(101, 2000, now_s + 2.0))
    driver.tick_until(101)
    assert driver.first_s[101] <= now_s + 2.0
    slot = next(slot for slot in driver.state.running if slot.request_id == 100)
    assert slot.due_s == math.inf
    driver.tick_until(100)


def test_a_queue_of_requests_that_are_too_late_does_not_hide_one_that_is_not() -> None:
    """More of them than planning looks at in one step: they go to the back, each once."""
    driver = Timed(itl_s=0.05)
    driver.time = replace(driver.time, token_s=0.0004)
    streams(driver, 2)
    now_s = driver.now_s
    for request_id in range(100, 200):
        driver.arrive(due(request_id, 3000, now_s + 0.001))
    driver.arrive(due(300, 500, now_s + 1.5))
    driver.tick_until(300)
    assert driver.first_s[300] <= now_s + 1.5


def test_three_prompts_of_5000_advance_together_and_a_short_one_waits_for_none() -> None:
    """ATOM#1835, sglang#34623."""
    driver = Timed(itl_s=0.05)
    streams(driver, 4)
    for request_id in (100, 101, 102):
        driver.arrive(request_of(request_id, 5000, 1))
    driver.tick()
    for _ in range(20):
        step = driver.tick()
        assert {100, 101, 102} <= set(step.request_ids)
    driver.arrive(request_of(103, 50, 1))
    asked_s = driver.now_s
    driver.tick_until(103)
    assert driver.first_s[103] - asked_s <= 0.11
    for request_id in (100, 101, 102):
        driver.tick_until(request_id)
    together_s = max(driver.first_s[i] for i in (100, 101, 102))
    alone = Timed(itl_s=0.05, policy=FCFS)
    streams(alone, 4)
    for request_id in (100, 101, 102):
        alone.arrive(request_of(request_id, 5000, 1))
    for request_id in (100, 101, 102):
        alone.tick_until(request_id)
    one_by_one_s = max(alone.first_s[i] for i in (100, 101, 102))
    assert together_s <= 1.05 * one_by_one_s


def test_what_was_left_to_others_and_not_taken_is_used() -> None:
    driver = Timed(itl_s=0.05)
    streams(driver, 2)
    driver.arrive(request_of(100, 4000, 1))
    driver.arrive(request_of(101, 4000, 1))
    driver.plain = replace(driver.plain, partial_prefills=1)
    first = driver.tick()
    assert [i for i in first.request_ids if i >= 100] == [100]
    driver.plain = replace(driver.plain, partial_prefills=None)
    both = driver.tick()
    assert {100, 101} <= set(both.request_ids)
    assert both.counts[-2] > 2 * both.counts[-1] > 0
    assert first.rows >= both.rows


def test_a_chunk_is_no_longer_than_the_user_allows() -> None:
    driver = Timed(itl_s=10.0)
    driver.plain = replace(driver.plain, chunk_tokens=100)
    for request_id in (100, 101, 102):
        driver.arrive(request_of(request_id, 1000, 1))
    assert sorted(driver.tick().counts) == [100, 100, 100]


def gap_of_own(own_s: float, *, prefer_share: float = 0.2) -> tuple[float, float, Timed]:
    """Worst gaps of a stream with a gap of its own and of seven others, beside a long prompt."""
    driver = Timed(itl_s=0.05)
    driver.time = replace(driver.time, prefill_share=prefer_share)
    driver.arrive(replace(Request(50, prompt_of(8, 50), stop=StopRule(100_000)), itl_s=own_s))
    streams(driver, 7)
    while 50 not in driver.first_s:
        driver.tick()
    driver.gaps.clear()
    driver.arrive(request_of(100, 4000, 1))
    driver.tick_until(100)
    return max(driver.gaps[50]), max(driver.gaps[0]), driver


def test_a_stream_may_have_a_smaller_gap_of_its_own() -> None:
    own, others, _ = gap_of_own(0.02)
    assert own <= 0.0201
    assert others <= 0.0201  # they are in the same steps


def test_a_gap_of_its_own_never_takes_the_share_of_prompts() -> None:
    """A client that asks for the impossible gets what is possible: the others' prompts go on."""
    own, _, driver = gap_of_own(0.001)
    decode_s = MACHINE.rows.at(8)
    assert own == pytest.approx(decode_s + 0.2 * 0.05, rel=0.1)
    assert driver.first_s[100] < 30


def test_a_stream_that_can_wait_holds_up_no_prompt() -> None:
    """Where all streams can."""
    driver = Timed(itl_s=0.02)
    for request_id in range(4):
        driver.arrive(replace(Request(request_id, prompt_of(8, request_id), stop=StopRule(9999)), itl_s=0.5))
    while len(driver.first_s) < 4:
        driver.tick()
    driver.arrive(request_of(100, 2000, 1))
    assert driver.tick().rows > 400


def test_ahead_of_a_commit_the_gap_is_counted_from_its_end() -> None:
    time = StepTime(MACHINE, now_s=10.0, itl_s=0.05)
    driver = Driver(blocks=10)
    driver.submit(request_of(0, 3, 9))
    driver.step()
    slot = driver.state.running[0]
    slot.last_token_s = 9.97
    assert time.step_seconds([slot], 0.001) == pytest.approx(0.02)
    plan = driver.begin()
    assert time.step_seconds([slot], 0.001) == pytest.approx(0.05)
    driver.end(plan)


def test_tenants_are_told_apart_within_a_priority_only() -> None:
    driver = Shares({})
    rng = random.Random(1)
    for n in range(40):
        tenant = rng.choice("ab")
        request = Request(n, prompt_of(20, n), stop=StopRule(1), tenant=tenant, priority=-1 if n >= 30 else 0)
        driver.submit(request)
    order = [slot.request_id for slot in driver.state.waiting]
    assert set(order[:10]) == set(range(30, 40))


def test_what_an_important_prompt_could_leave_is_not_for_less_important_ones() -> None:
    """The room was there when the second was admitted, and gone when it was packed: nobody could apply that."""
    driver = Driver(blocks=400, max_tokens=16, policy=SLO)
    for request_id, priority in enumerate((0, 1)):
        driver.submit(replace(request_of(request_id, 100, 1), priority=priority))
    step = driver.step()
    assert step.request_ids == (0,)
    assert step.counts == (16,)
    driver.run()
