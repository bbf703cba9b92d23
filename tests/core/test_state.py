"""`SchedulerState`: refusals, stop rules, aborts at any moment, blocks that come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.core.drive import Driver, prompt_of, request_of
from tests.fakes import expected_output

from legato.core.plan import StepPlan, StepResult, TokenLogprobs
from legato.core.policy import FCFS
from legato.core.request import Request, StopRule
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState
from legato.errors import ConfigError, EngineError, PromptTooLong, RequestError


def test_one_request_gives_the_tokens_one_computes_by_hand() -> None:
    driver = Driver(blocks=8)
    driver.submit(Request(1, (3, 5), stop=StopRule(max_tokens=2)))
    driver.run()
    assert driver.outputs[1] == [1 * 3 + 2 * 5, 1 * 3 + 2 * 5 + 3 * 13]
    assert driver.reasons() == {1: "length"}


def test_the_last_token_is_emitted_and_never_computed() -> None:
    driver = Driver(blocks=8)
    driver.submit(request_of(1, 10, 5))
    driver.run()
    assert driver.executor.rows == 10 + 5 - 1


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as refusal:
        SchedulerState(4, 4, 100).submit(Request(1, ()))
    assert refusal.value.field == "prompt"


def test_a_request_for_no_token_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens is 0"):
        SchedulerState(4, 4, 100).submit(Request(1, (1,), stop=StopRule(max_tokens=0)))


def test_an_id_in_use_is_refused_and_comes_back_when_finished() -> None:
    driver = Driver(blocks=4)
    driver.submit(request_of(1, 3, 1))
    with pytest.raises(RequestError, match="1 is in use"):
        driver.state.submit(request_of(1, 3, 1))
    driver.run()
    driver.state.submit(request_of(1, 3, 1))


@pytest.mark.parametrize(("blocks", "block_tokens", "max_model_len"), [(0, 4, 9), (4, 0, 9), (4, 4, 1), (1, 1, 9)])
def test_sizes_that_serve_nothing_are_refused(blocks: int, block_tokens: int, max_model_len: int) -> None:
    with pytest.raises(ConfigError):
        SchedulerState(blocks, block_tokens, max_model_len)


@pytest.mark.parametrize(("max_model_len", "limit"), [(20, 20), (1000, 32)])
def test_a_prompt_without_room_for_an_answer_is_refused_with_both_numbers(max_model_len: int, limit: int) -> None:
    state = SchedulerState(8, 4, max_model_len)
    with pytest.raises(PromptTooLong, match=rf"{limit} tokens .* holds {limit},"):
        state.submit(request_of(1, limit, 1))
    state.submit(request_of(1, limit - 1, 1))
    state.check()


def test_a_request_ends_with_length_at_the_models_context() -> None:
    driver = Driver(blocks=20, max_model_len=30)
    driver.submit(request_of(1, 25, 100))
    driver.run()
    assert driver.finished[1].reason == "length"
    assert driver.finished[1].generated_tokens == 5


def test_a_stop_id_ends_the_request_and_is_its_last_token() -> None:
    outputs = expected_output(prompt_of(5, 2), 10)
    driver = Driver(blocks=20)
    driver.submit(request_of(1, 5, 50, token_ids=frozenset({outputs[3]})))
    driver.run()
    assert driver.outputs[1] == outputs[: outputs.index(outputs[3]) + 1]
    assert driver.reasons() == {1: "stop"}


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    outputs = expected_output(prompt_of(5, 2), 2)
    driver = Driver(blocks=20)
    driver.submit(request_of(1, 5, 2, token_ids=frozenset({outputs[1]})))
    driver.run()
    assert driver.reasons() == {1: "stop"}


def test_no_stop_id_counts_before_min_tokens() -> None:
    outputs = expected_output(prompt_of(5, 2), 8)
    driver = Driver(blocks=20)
    driver.submit(request_of(1, 5, 8, token_ids=frozenset(range(97)), min_tokens=6))
    driver.run()
    assert driver.outputs[1] == outputs[:6]


def test_an_aborted_waiting_request_is_gone_at_once() -> None:
    driver = Driver(blocks=4, max_seqs=1)
    driver.submit(request_of(1, 3, 9), request_of(2, 3, 9), request_of(3, 3, 1))
    driver.step()
    driver.abort(2)
    driver.run()
    assert driver.reasons() == {1: "length", 2: "abort", 3: "length"}
    assert driver.outputs[2] == []


def test_an_aborted_running_request_frees_its_blocks_at_once_between_steps() -> None:
    driver = Driver(blocks=4)
    driver.submit(request_of(1, 9, 5))
    driver.step()
    assert driver.state.free_blocks == 1
    driver.abort(1)
    assert driver.state.free_blocks == 4
    assert not driver.state.has_work


def test_blocks_of_a_request_aborted_in_flight_are_free_only_after_the_commit() -> None:
    driver = Driver(blocks=4)
    driver.submit(request_of(1, 9, 5))
    plan = driver.begin()
    driver.abort(1)
    assert (driver.state.free_blocks, driver.state.returning_blocks) == (1, 3)
    driver.submit(request_of(2, 9, 1))
    assert plan_step(driver.state, driver.budget, FCFS).admit == (), "its blocks are still written"
    driver.end(plan)
    assert (driver.state.free_blocks, driver.state.returning_blocks) == (4, 0)
    driver.run()
    assert driver.outputs[1] == []
    assert driver.reasons() == {1: "abort", 2: "length"}


def test_a_prefill_aborted_in_flight_gives_its_reservation_back_at_once() -> None:
    driver = Driver(blocks=8, max_tokens=4)
    driver.submit(request_of(1, 30, 1))
    plan = driver.begin()
    assert driver.state.free_blocks == 0
    driver.abort(1)
    assert (driver.state.free_blocks, driver.state.returning_blocks) == (7, 1)
    driver.end(plan)
    assert driver.state.free_blocks == 8


def test_aborting_twice_or_after_the_end_is_nothing() -> None:
    driver = Driver(blocks=4)
    driver.submit(request_of(1, 3, 1), request_of(2, 3, 5))
    driver.step()
    driver.abort(2)
    assert driver.state.abort(1) is None
    assert driver.state.abort(2) is None
    assert driver.state.abort(77) is None


def test_tokens_sampled_for_a_request_that_left_are_not_emitted() -> None:
    driver = Driver(blocks=8)
    driver.submit(request_of(1, 3, 5), request_of(2, 3, 5), request_of(3, 3, 5))
    plan = driver.begin()
    driver.abort(2)
    result = driver.executor.execute(plan)
    logprobs = tuple(TokenLogprobs(-float(i)) for i in result.request_ids)
    driver.state.commit(StepResult(result.step, result.request_ids, result.token_ids, logprobs))
    emitted = driver.state.emitted
    assert emitted.request_ids == (1, 3)
    assert emitted.token_ids == (result.token_ids[0], result.token_ids[2])
    assert emitted.logprobs == (logprobs[0], logprobs[2])


def test_a_result_of_another_step_or_shape_is_refused_and_changes_nothing() -> None:
    driver = Driver(blocks=8)
    driver.submit(request_of(1, 3, 5), request_of(2, 3, 5))
    plan = driver.begin()
    for wrong in (
        StepResult(plan.step + 1, (1, 2), (5, 5)),
        StepResult(plan.step, (2, 1), (5, 5)),
        StepResult(plan.step, (1,), (5,)),
        StepResult(plan.step, (1, 2), (5,)),
        StepResult(plan.step, (1, 2), (5, 5), (None,)),
    ):
        with pytest.raises(EngineError):
            driver.state.commit(wrong)
        driver.state.check()
    driver.end(plan)
    driver.run()


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    driver = Driver(blocks=20, max_seqs=2)
    driver.submit(request_of(1, 3, 5), request_of(2, 3, 5), request_of(3, 3, 5))
    driver.begin()
    ended = driver.state.abort_steps("the machine is on fire")
    assert [(end.request_id, end.reason, end.message) for end in ended] == [
        (1, "error", "the machine is on fire"),
        (2, "error", "the machine is on fire"),
    ]
    driver.note(ended)
    driver.run()
    assert driver.reasons() == {1: "error", 2: "error", 3: "length"}


def test_a_plan_from_before_an_abort_is_not_applied() -> None:
    driver = Driver(blocks=20)
    driver.submit(request_of(1, 3, 5), request_of(2, 3, 5))
    plan = plan_step(driver.state, driver.budget, FCFS)
    driver.state.abort(1)
    with pytest.raises(AssertionError, match="another state"):
        driver.state.apply(plan)


def test_whoever_is_preempted_stands_before_later_arrivals_in_order_of_arrival() -> None:
    driver = Driver(blocks=20, block_tokens=4)
    driver.submit(*(request_of(i, 3, 9) for i in (1, 2, 3)))
    driver.step()
    driver.submit(request_of(4, 3, 9))
    driver.state.apply(StepPlan(1, (1,), (3,), (1,), (True,), preempt=(3, 2), decodes=1))
    assert [slot.request_id for slot in driver.state.waiting] == [2, 3, 4]


def test_a_victim_in_flight_keeps_the_token_that_is_under_way() -> None:
    driver = Driver(blocks=20, block_tokens=4)
    driver.submit(request_of(1, 3, 9), request_of(2, 5, 9))
    result = driver.executor.execute(driver.begin())
    driver.state.apply(StepPlan(1, (1,), (3,), (1,), (True,), preempt=(2,), decodes=1))
    driver.state.check()
    assert driver.state.returning_blocks == 2
    driver.commit(result)
    assert len(driver.outputs[2]) == 1
    (slot,) = driver.state.waiting
    assert (slot.computed, slot.known) == (0, 6)
    assert driver.state.returning_blocks == 0


def test_planning_changes_nothing() -> None:
    driver = Driver(blocks=6, max_tokens=8)
    driver.submit(*(request_of(i, 9, 5) for i in range(3)))
    driver.step()

    def picture() -> list[tuple[object, ...]]:
        slots = [*driver.state.running, *driver.state.waiting]
        return [(s.request_id, s.known, s.scheduled, s.computed, s.covered, tuple(s.blocks)) for s in slots]

    before = picture()
    plans = {plan_step(driver.state, driver.budget, FCFS) for _ in range(3)}
    assert len(plans) == 1
    assert picture() == before


def test_check_finds_a_planted_fault() -> None:
    faults: dict[str, Callable[[SchedulerState], object]] = {
        "cursors": lambda s: setattr(s.running[0], "computed", 99),
        "held by nobody": lambda s: s.memory.pool.take(),
        "are reserved": lambda s: setattr(s.running[0], "covered", s.running[0].covered + 4),
        "reserved": lambda s: s.running[0].blocks.append(s.memory.pool.take()[0]),
        "is lost": lambda s: s._waiting.remove(next(iter(s.waiting))),
    }
    for message, plant in faults.items():
        driver = Driver(blocks=9, max_tokens=4)
        driver.submit(request_of(1, 9, 5), request_of(2, 9, 5))
        driver.step()
        plant(driver.state)
        with pytest.raises(AssertionError, match=rf"{message}|neither waiting nor running"):
            driver.state.check()
