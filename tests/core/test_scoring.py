"""Prompts whose own tokens get log-probabilities: one entry each, in order, whatever happens, and nobody else pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.drive import Driver, request_of

from legato.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from legato.core.request import Request, Sampling
from legato.errors import ConfigError, EngineError


def scored(request: Request, start: int = 0) -> Request:
    return replace(request, sampling=Sampling(prompt_logprobs=1, prompt_logprobs_start=start))


@pytest.mark.parametrize(
    ("prompt_tokens", "start", "rows"),
    [(10, 0, (0, 9)), (10, 1, (0, 9)), (10, 2, (1, 9)), (10, 9, (8, 9)), (10, 10, (0, 0)), (10, 99, (0, 0)),
     (2, 0, (0, 1)), (1, 0, (0, 0))],
)  # fmt: skip
def test_the_rows_that_score_a_prompt_end_before_its_last_one(
    prompt_tokens: int, start: int, rows: tuple[int, int]
) -> None:
    assert scored(request_of(1, prompt_tokens, 1), start).scored_rows == rows
    assert request_of(1, prompt_tokens, 1).scored_rows == (0, 0)


@pytest.mark.parametrize("start", range(101))
def test_a_prompt_of_100_in_chunks_of_32_has_an_entry_for_each_token_from_every_start(start: int) -> None:
    """vllm#8268, #14239: chunked prefill lost prompt logprobs at the edges of chunks. Neighbours do not ask."""
    driver = Driver(blocks=200, block_tokens=4, max_tokens=32, max_seqs=4)
    driver.submit(request_of(2, 30, 9), scored(request_of(1, 100, 3), start), request_of(3, 50, 3))
    driver.run()
    assert len(driver.scores[1]) == (100 - max(start, 1) if start < 100 else 0)
    assert not driver.scores[2] and not driver.scores[3]


def test_a_chunk_ends_where_the_logits_of_the_step_end_and_the_rest_goes_to_those_who_do_not_ask() -> None:
    driver = Driver(blocks=200, max_tokens=40, max_seqs=4, logit_rows=5)
    driver.submit(scored(request_of(1, 20, 2)), request_of(2, 60, 2))
    step = driver.step()
    assert (step.request_ids, step.counts, step.scores) == ((1, 2), (5, 35), ((1, 0, 5),))
    driver.run()
    assert [plan.scores for plan in driver.plans[:5]] == [((1, 5 * i, min(5 * i + 5, 19)),) for i in range(4)] + [()]
    assert driver.plans[3].counts == (5,), "the last row of the prompt gives a token and no entry"


def test_who_finds_no_logits_left_waits_and_holds_up_nobody() -> None:
    driver = Driver(blocks=200, max_tokens=40, max_seqs=4, logit_rows=5)
    driver.submit(scored(request_of(1, 12, 2)), scored(request_of(2, 12, 2)), request_of(3, 6, 9))
    steps = [driver.step() for _ in range(4)]
    assert [step.admit for step in steps] == [(1, 3), (), (2,), ()]
    assert [step.scores for step in steps] == [((1, 0, 5),), ((1, 5, 10),), ((1, 10, 11), (2, 0, 4)), ((2, 4, 9),)]
    driver.run()


def test_two_that_run_share_the_logits_of_a_step_in_order() -> None:
    driver = Driver(blocks=200, max_tokens=40, max_seqs=4, logit_rows=30)
    driver.submit(scored(request_of(1, 20, 2)), scored(request_of(2, 60, 2)))
    driver.step()
    driver.budget = replace(driver.budget, prompt_logit_rows=3)
    driver.submit(scored(request_of(3, 60, 2)))
    step = driver.step()
    assert step.request_ids == (1, 2), "a decode, and all logits to the one before"
    driver.run()


def test_rows_before_the_start_need_no_logits_and_may_be_cached() -> None:
    driver = Driver(blocks=50, block_tokens=4, max_tokens=64, logit_rows=4)
    driver.submit(request_of(1, 40, 1))
    driver.run()
    driver.submit(scored(request_of(2, 40, 1, salt=2), 35))  # rows 34 to 38
    step = driver.step()
    assert (step.starts, step.counts, step.scores) == ((32,), (6,), ((2, 34, 38),))
    driver.submit(scored(request_of(3, 40, 1, salt=2)))
    assert driver.step().starts == (38, 0), "all of its rows are needed"
    driver.run()
    assert len(driver.scores[2]) == 5 and len(driver.scores[3]) == 39


def test_what_a_scored_request_computed_is_cached_for_others_and_nobody_waits_for_it() -> None:
    driver = Driver(blocks=100, block_tokens=4, max_tokens=64, logit_rows=4)
    driver.submit(scored(request_of(1, 40, 1)))
    driver.step()
    driver.submit(request_of(2, 40, 1, salt=2))
    assert 2 in driver.step().admit, "one that computes four rows a step is not waited for"
    driver.run()
    driver.submit(request_of(3, 40, 1, salt=2))
    assert driver.step().starts == (36,)
    driver.run()


@pytest.mark.parametrize("preempt_at", range(12))
def test_a_preemption_at_any_step_loses_no_entry_and_repeats_none(preempt_at: int) -> None:
    """Rows whose entry was delivered are computed again without logits: the fake asserts it."""
    driver = Driver(blocks=64, max_tokens=8, cache=False)
    driver.submit(scored(request_of(1, 40, 5)))

    def force(number: int) -> None:
        if number == preempt_at and driver.state.running:
            plan = StepPlan(driver.state.next_step, (), (), (), (), preempt=(1,))
            driver.state.apply(plan)
            driver.end(plan)

    driver.run(each=force)
    assert len(driver.scores[1]) == 39


def test_an_entry_that_is_in_flight_at_a_preemption_is_not_computed_again() -> None:
    driver = Driver(blocks=64, max_tokens=8, cache=False)
    driver.submit(scored(request_of(1, 40, 5)))
    result = driver.executor.execute(driver.begin())
    preemption = StepPlan(driver.state.next_step, (), (), (), (), preempt=(1,))
    driver.state.apply(preemption)
    driver.commit(result)
    driver.end(preemption)
    assert [driver.step().scores for _ in range(2)] == [(), ((1, 8, 16),)]
    driver.run()


def test_steps_planned_ahead_score_on() -> None:
    driver = Driver(blocks=64, max_tokens=16, logit_rows=7)
    driver.submit(scored(request_of(1, 40, 5)), scored(request_of(2, 30, 5), 11), request_of(3, 30, 5))
    driver.run_ahead()


def test_entries_of_a_request_that_left_are_not_emitted() -> None:
    driver = Driver(blocks=64, max_tokens=8)
    driver.submit(scored(request_of(1, 40, 5)), scored(request_of(2, 40, 5)))
    plan = driver.begin()
    driver.abort(1)
    driver.end(plan)
    assert driver.state.emitted.prompt_logprobs == ()
    driver.run()


def test_a_result_without_the_scores_that_were_planned_is_refused() -> None:
    driver = Driver(blocks=64, max_tokens=8)
    driver.submit(scored(request_of(1, 40, 5)))
    plan = driver.begin()
    result = driver.executor.execute(plan)
    for wrong in ((), (PromptLogprobs(1, 1, (TokenLogprobs(0.0),)),)):
        with pytest.raises(EngineError, match="prompt logprobs"):
            driver.state.commit(StepResult(result.step, (), (), (), wrong))
    driver.commit(result)
    driver.run()


def test_a_budget_without_logits_for_prompts_is_refused() -> None:
    driver = Driver(blocks=8)
    with pytest.raises(ConfigError, match="prompt_logit_rows is 0"):
        replace(driver.budget, prompt_logit_rows=0)
    assert replace(driver.budget, max_tokens=100, max_seqs=8, prompt_logit_rows=10).logit_rows == 18
    assert replace(driver.budget, max_tokens=12, max_seqs=8, prompt_logit_rows=10).logit_rows == 12
