"""What a request that comes now has before it."""

from __future__ import annotations

import math

import pytest

from legato.engine.forecast import FinishRate, Pending, first_token_seconds, place_of
from legato.engine.terms import Terms


def wait(
    own: Pending, *others: Pending, pending: int = 10**9, free: int = 9, waiting: int = 9, every: float = 0.0
) -> float:
    return first_token_seconds(
        own, others, token_s=0.01, pending_tokens=pending, free_places=free, waiting=waiting, finish_interval_s=every
    )


def at(policy: str, arrival_s: float, tokens: int, *, due_s: float = math.inf, priority: int = 0) -> Pending:
    return Pending(place_of(policy, priority, arrival_s, due_s, tokens), tokens)


def test_alone_it_is_its_own_work() -> None:
    assert wait(at("slo", 0.0, 100)) == pytest.approx(1.0)


def test_in_order_of_arrival_all_who_came_earlier_come_first() -> None:
    others = [at("fcfs", 0.0, 5000), at("fcfs", 2.0, 300)]
    assert wait(at("fcfs", 1.0, 100), *others) == pytest.approx(51.0)


def test_otherwise_a_longer_prompt_comes_later_unless_it_has_waited() -> None:
    own = at("slo", 1.0, 100)
    assert wait(own, at("slo", 0.0, 5000)) == pytest.approx(1.0)
    assert wait(own, at("slo", -20.0, 5000)) == pytest.approx(51.0)


def test_who_is_due_earlier_or_more_important_comes_first() -> None:
    own = at("slo", 1.0, 100)
    assert wait(own, at("slo", 1.0, 200, due_s=1.1)) == pytest.approx(3.0)
    assert wait(own, at("slo", 1.0, 9000, priority=-1)) == pytest.approx(91.0)


def test_what_is_computed_already_does_not_count() -> None:
    assert wait(at("fcfs", 1.0, 100), at("fcfs", 0.0, 5000), pending=700) == pytest.approx(8.0)


def test_with_no_place_free_it_waits_until_enough_have_ended() -> None:
    others = [at("fcfs", 0.0, 1), at("fcfs", 0.0, 1)]
    assert wait(at("fcfs", 1.0, 100), *others, free=0, waiting=2, every=4.0) == pytest.approx(13.0)
    assert wait(at("fcfs", 1.0, 100), *others, free=0, waiting=0, every=4.0) == pytest.approx(5.0)
    assert wait(at("fcfs", 1.0, 100), *others, free=3, waiting=2, every=4.0) == pytest.approx(1.02)


def test_how_often_requests_end_is_told_from_the_last_ones() -> None:
    rate = FinishRate()
    assert rate.interval_s(5.0) == 0.0
    for second in range(100):
        rate.record(float(second))
    assert rate.interval_s(100.0) == pytest.approx(1.0)
    assert rate.interval_s(131.0) == pytest.approx(62 / 32 + 1 / 32)


def test_a_deadline_leaves_time_for_the_answer() -> None:
    assert Terms().due_s(10.0, 0.05) == math.inf
    assert Terms(ttft_s=2.0).due_s(10.0, 0.05) == 12.0
    assert Terms(deadline_s=6.0, answer_tokens=21).due_s(10.0, 0.05) == pytest.approx(15.0)
    assert Terms(deadline_s=6.0, ttft_s=1.0).due_s(10.0, 0.05) == 11.0
    assert Terms(deadline_s=1.0, answer_tokens=500).due_s(10.0, 0.05) == 10.0
