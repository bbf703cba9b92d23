"""Every arrival order of tiny systems, one by one: nothing sampled, nothing left to chance."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from tests.core.drive import Driver, request_of

from legato.core.policy import FAIR, FCFS, SLO, Policy
from legato.core.request import Request

# Prompt tokens, tokens to generate. Blocks hold 2 and the pool 8: two that grow cannot both stay.
KINDS = [(1, 1), (1, 5), (3, 1), (3, 3), (4, 4)]
POLICIES = [FCFS, replace(FCFS, name="greedy", spare_blocks=lambda inside: 0), SLO, FAIR]


def arrivals(requests: list[Request], at: tuple[int, ...], driver: Driver) -> None:
    """Runs `driver` with request i submitted before step `at[i]`, and checks the bound on its steps.

    The oldest unfinished request computes at least one row in every step and is never preempted, so all are done
    within the sum of their rows, counted from the last arrival.
    """
    number = 0
    left = list(zip(at, requests, strict=True))
    while left or driver.state.has_work:
        while left and left[0][0] <= number:
            driver.submit(left.pop(0)[1])
        if driver.state.has_work:
            driver.step()
        number += 1
        assert number <= at[-1] + sum(len(r.prompt) + r.stop.max_tokens - 1 for r in requests), "too slow: thrashing"
    driver.run()
    for request in requests:
        assert driver.reasons()[request.request_id] == "length"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(1, 1), (2, 2), (5, 1), (5, 3)])
def test_every_arrival_order_of_three_requests_ends_in_time_with_the_right_tokens(
    policy: Policy, max_tokens: int, max_seqs: int
) -> None:
    preemptions = 0
    for kinds in product(KINDS, repeat=3):
        requests = [request_of(i, *kind) for i, kind in enumerate(kinds)]
        for at in combinations_with_replacement((0, 1, 3), 3):
            if at[0] == 0:
                driver = Driver(blocks=4, block_tokens=2, max_tokens=max_tokens, max_seqs=max_seqs, policy=policy)
                arrivals(requests, at, driver)
                preemptions += driver.state.preemptions
    assert (preemptions > 0) == (max_seqs > 1), "the pool is too roomy to show anything"


@pytest.mark.parametrize("host_blocks", [0, 2])
@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(2, 2), (5, 3)])
def test_every_arrival_order_of_three_prompts_with_a_common_beginning(
    max_tokens: int, max_seqs: int, host_blocks: int
) -> None:
    """Blocks shared, waited for, evicted, copied to host memory and back, in a pool that holds hardly more than one."""
    cached = restored = 0
    for kinds in product([(3, 3), (5, 1), (6, 2)], repeat=3):
        for salts in product((7, 8), repeat=3):
            requests = [
                request_of(i, *kind, salt=salt) for i, (kind, salt) in enumerate(zip(kinds, salts, strict=True))
            ]
            for at in combinations_with_replacement((0, 1, 3, 6), 3):
                if at[0] == 0:
                    driver = Driver(
                        blocks=4, block_tokens=2, max_tokens=max_tokens, max_seqs=max_seqs, host_blocks=host_blocks
                    )
                    arrivals(requests, at, driver)
                    cached += driver.state.cached_tokens
                    restored += driver.state.memory.restored_blocks
    assert cached > 0
    assert (restored > 0) == (host_blocks > 0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(2, 2), (5, 3)])
def test_planning_one_step_ahead_gives_the_same_tokens(policy: Policy, max_tokens: int, max_seqs: int) -> None:
    preemptions = 0
    for kinds in product(KINDS, repeat=3):
        driver = Driver(blocks=4, block_tokens=2, max_tokens=max_tokens, max_seqs=max_seqs, policy=policy)
        driver.submit(*(request_of(i, *kind) for i, kind in enumerate(kinds)))
        driver.run_ahead(limit_steps=100)
        assert list(driver.reasons().values()) == ["length"] * 3
        preemptions += driver.state.preemptions
    assert preemptions > 0


def test_an_abort_while_the_next_step_is_planned_ahead_loses_nothing() -> None:
    for kinds in product([(1, 5), (3, 3), (4, 4)], repeat=3):
        for victim, step in product((0, 1, 2), range(8)):
            driver = Driver(blocks=4, block_tokens=2, max_tokens=4, max_seqs=3, policy=POLICIES[1])
            driver.submit(*(request_of(i, *kind) for i, kind in enumerate(kinds)))

            def leave(number: int, driver: Driver = driver, victim: int = victim, step: int = step) -> None:
                if number == step:
                    driver.abort(victim)

            driver.run_ahead(limit_steps=100, each=leave)
            assert len(driver.finished) == 3


@pytest.mark.parametrize("blocks", [4, 5])
def test_an_abort_at_every_step_and_in_every_flight_loses_nothing(blocks: int) -> None:
    for kinds in product(KINDS, repeat=2):
        for victim, step, in_flight in product((0, 1), range(7), (False, True)):
            driver = Driver(blocks=blocks, block_tokens=2, max_tokens=3, max_seqs=2)
            driver.submit(*(request_of(i, *kind) for i, kind in enumerate(kinds)))
            for number in range(20):
                if not driver.state.has_work:
                    break
                if number == step and not in_flight:
                    driver.abort(victim)
                    if not driver.state.has_work:
                        break
                plan = driver.begin()
                if number == step and in_flight:
                    driver.abort(victim)
                driver.end(plan)
            driver.run(limit_steps=0)
            assert driver.reasons()[1 - victim] == "length"
            assert driver.reasons()[victim] in ("abort", "length")
