"""What a request that comes now has before it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from legato.engine.forecast import Load, Pending, first_token_seconds, place_of
from legato.engine.live import Live
from legato.engine.metrics import EngineMetrics, Served
from legato.engine.outlook import Outlook
from legato.engine.stream import TokenStream
from legato.engine.terms import Terms
from legato.engine.wire import EngineInfo, PaceStats, StepStats

IDLE = Load(
    token_s=0.01,
    pending_tokens=10**9,
    waiting=9,
    running=0,
    free_places=9,
    free_tokens=10**9,
    held_tokens=0,
    stay_s=0.0,
)
INFO = EngineInfo(
    max_model_len=8192,
    vocab=1,
    kv_blocks=1000,
    block_tokens=10,
    max_num_batched_tokens=512,
    max_num_seqs=4,
    policy="slo",
    token_s=0.001,
)


def wait(own: Pending, *others: Pending, weights: dict[str, float] | None = None, **load: Any) -> float:
    return first_token_seconds(own, others, dataclasses.replace(IDLE, **load), weights)


def at(
    policy: str, arrival_s: float, tokens: int, *, due_s: float = math.inf, priority: int = 0, tenant: str = ""
) -> Pending:
    return Pending(place_of(policy, priority, arrival_s, due_s, tokens), tokens, tenant)


def live(prompt_tokens: int, *, terms: Terms | None = None, first_token_s: float = -1.0) -> Live:
    stream = TokenStream(lambda request_id, reason: None)
    pending = Pending(place_of("slo", 0, 0.0, math.inf, prompt_tokens), prompt_tokens)
    entry = Live(stream, 0.0, prompt_tokens, pending, terms or Terms(), Served())
    entry.first_token_s = entry.last_token_s = first_token_s
    return entry


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
    assert wait(at("fcfs", 1.0, 100), at("fcfs", 0.0, 5000), pending_tokens=700) == pytest.approx(8.0)


def test_with_no_place_free_it_waits_until_enough_have_ended() -> None:
    others = [at("fcfs", 0.0, 1), at("fcfs", 0.0, 1)]
    full = {"free_places": 0, "running": 5, "stay_s": 20.0}  # one ends every 4 s
    assert wait(at("fcfs", 1.0, 100), *others, **full, waiting=2) == pytest.approx(13.0)
    assert wait(at("fcfs", 1.0, 100), *others, **full, waiting=0) == pytest.approx(5.0)
    assert wait(at("fcfs", 1.0, 100), *others, **{**full, "free_places": 3}) == pytest.approx(1.02)


def test_with_no_memory_free_it_waits_until_enough_was_given_back() -> None:
    """Five that hold 400 tokens each, and 100 are free: for 1,000 tokens three have to end."""
    full = {"running": 5, "stay_s": 20.0, "free_tokens": 100, "held_tokens": 2000}
    assert wait(at("slo", 0.0, 1000), **full) == pytest.approx(3 * 4.0 + 10.0)
    assert wait(at("slo", 0.0, 100), **full) == pytest.approx(1.0)


def test_one_tenants_backlog_counts_for_another_only_by_its_share() -> None:
    backlog = [at("fair", -9.0, 1000, tenant="heavy") for _ in range(50)]
    own = at("fair", 1.0, 400, tenant="light")
    assert wait(own, *backlog) == pytest.approx(504.0), "without shares it would be behind all of it"
    assert wait(own, *backlog, weights={}) == pytest.approx(4.0 + 4.0)
    assert wait(own, *backlog, weights={"light": 4.0}) == pytest.approx(1.0 + 4.0)
    assert wait(own, *backlog, weights={"heavy": 4.0}) == pytest.approx(16.0 + 4.0)
    earlier = at("fair", 0.0, 100, tenant="light")
    assert wait(own, earlier, *backlog, weights={}) == pytest.approx(5.0 + 1.0 + 4.0)
    urgent = at("fair", 0.0, 2000, tenant="heavy", priority=-1)
    assert wait(own, urgent, *backlog, weights={}) == pytest.approx(20.0 + 4.0 + 4.0)


def test_a_tenant_gets_no_more_than_it_has_asked_for() -> None:
    assert wait(at("fair", 1.0, 4000, tenant="a"), at("fair", 0.0, 100, tenant="b"), weights={}) == pytest.approx(41.0)


def test_a_deadline_leaves_time_for_the_answer() -> None:
    assert Terms().due_s(10.0, 0.05) == math.inf
    assert Terms(ttft_s=2.0).due_s(10.0, 0.05) == 12.0
    assert Terms(deadline_s=6.0, answer_tokens=21).due_s(10.0, 0.05) == pytest.approx(15.0)
    assert Terms(deadline_s=6.0, ttft_s=1.0).due_s(10.0, 0.05) == 11.0
    assert Terms(deadline_s=1.0, answer_tokens=500).due_s(10.0, 0.05) == 10.0


class TestOutlook:
    def own(self, outlook: Outlook, tokens: int = 1000) -> Pending:
        return outlook.pending(INFO, Terms(), tokens, 0.0)

    def test_with_nobody_there_a_prompt_takes_what_the_machine_takes(self) -> None:
        outlook = Outlook()
        outlook.heard(StepStats(rows=9, chunk_tokens=8, free_blocks=1000, pace=PaceStats(token_s=0.5)))
        assert outlook.first_token_seconds(INFO, self.own(outlook), []) == pytest.approx(1.0)
        beside = [live(10, first_token_s=1.0)]
        assert outlook.first_token_seconds(INFO, self.own(outlook), beside) == pytest.approx(500.0)

    def test_an_engine_that_plans_by_tokens_knows_its_pace_once_it_has_run(self) -> None:
        """Or --shed with a budget in tokens would never refuse anybody."""
        outlook, info = Outlook(), info_without_times()
        assert outlook.first_token_seconds(info, self.own(outlook), []) == 0.0
        outlook.heard(StepStats(free_blocks=1000, pace=PaceStats(token_s=0.002, decode_s=0.1)))
        assert outlook.decode_s == 0.1
        assert outlook.first_token_seconds(info, self.own(outlook), []) == pytest.approx(2.0)

    def test_what_was_sent_and_not_heard_of_counts_until_a_whole_step_has_passed(self) -> None:
        outlook, waiting = Outlook(), [live(300)]
        outlook.submitted(300)
        for expected_s in (1.3, 1.3, 1.0):
            assert outlook.first_token_seconds(INFO, self.own(outlook), waiting) == pytest.approx(expected_s)
            outlook.heard(StepStats(free_blocks=1000))

    def test_a_quiet_hour_says_nothing_of_how_soon_a_place_is_free(self) -> None:
        """Ends were counted per second: after an hour of few requests, a burst was told to wait for minutes."""
        outlook = Outlook()
        for _ in range(40):
            outlook.ended(2.0)
        outlook.heard(StepStats(running=4, free_blocks=1000, pace=PaceStats(token_s=0.001)))
        running = [live(10, first_token_s=1.0) for _ in range(4)]
        assert outlook.first_token_seconds(INFO, self.own(outlook), running) == pytest.approx(0.5 + 1.0)

    def test_before_any_has_ended_answers_take_what_they_may_have(self) -> None:
        outlook = Outlook()
        outlook.heard(StepStats(running=4, free_blocks=1000, pace=PaceStats(token_s=0.001, decode_s=0.1)))
        running = [live(10, terms=Terms(answer_tokens=400), first_token_s=1.0) for _ in range(4)]
        assert outlook.first_token_seconds(INFO, self.own(outlook), running) == pytest.approx(10.0 + 1.0)

    def test_what_is_cached_of_a_prompt_is_no_work_and_does_not_change_its_turn(self) -> None:
        outlook = Outlook()
        again = outlook.pending(INFO, Terms(), 1000, 0.0, missing_tokens=10)
        assert again.place == self.own(outlook).place
        assert (self.own(outlook).prompt_tokens, again.prompt_tokens) == (1000, 10)


def info_without_times() -> EngineInfo:
    return msgspec.structs.replace(INFO, token_s=0.0)


class TestWishes:
    def counted(self, entry: Live, reason: str, now_s: float) -> dict[tuple[str, bool], int]:
        metrics = EngineMetrics()
        entry.record_end(metrics, reason, now_s)
        return metrics.wishes

    def test_a_client_that_waited_longer_than_it_wanted_and_leaves_is_a_wish_not_kept(self) -> None:
        terms = Terms(ttft_s=1.0, deadline_s=5.0, itl_s=0.1)
        assert self.counted(live(10, terms=terms), "abort", 2.0) == {("ttft", False): 1}
        assert self.counted(live(10, terms=terms), "abort", 0.5) == {}, "it left before: nobody can tell"
        stuck = self.counted(live(10, terms=terms, first_token_s=1.0), "abort", 9.0)
        assert stuck == {("deadline", False): 1, ("itl", False): 1}

    def test_of_one_that_was_served_all_are_told(self) -> None:
        terms, metrics = Terms(ttft_s=1.0, deadline_s=5.0, itl_s=0.1), EngineMetrics()
        entry = live(10, terms=terms)
        for now_s in (0.9, 1.0, 1.3):
            entry.record_token(metrics, now_s)
        entry.record_end(metrics, "length", 1.3)
        assert metrics.wishes == {("ttft", True): 1, ("deadline", True): 1, ("itl", False): 1}

    def test_prompt_tokens_found_in_the_cache_are_no_service(self) -> None:
        entry = live(100)
        entry.found(64)
        assert entry.pending.prompt_tokens == 36
        entry.record_token(EngineMetrics(), 1.0)
        assert (entry.served.prompt_tokens, entry.served.generated_tokens) == (36, 1)
