"""Inputs that broke other engines, as far as the scheduler is concerned. Outputs are those of a request alone."""

from __future__ import annotations

import pytest
from tests.core.drive import Driver, request_of

from legato.core.plan import StepPlan
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState
from legato.errors import PromptTooLong

CHUNKS = [1, 2, 3, 5, 8, 16, 64]


@pytest.mark.parametrize("length", sorted({k * 16 + d for k in (1, 2, 3) for d in (-1, 0, 1)}))
def test_the_last_token_of_a_prompt_is_computed_at_every_chunk_boundary(length: int) -> None:
    """sglang#30181: at L = kC + 1 the last, random token was dropped, and a second request inherited the fault."""
    driver = Driver(blocks=64, max_tokens=16)
    driver.submit(request_of(1, length, 4))
    driver.run()
    driver.submit(request_of(2, length, 4))
    driver.run()
    assert driver.executor.rows == 2 * (length + 3)


def test_rows_are_told_apart_by_state_and_not_by_the_length_of_the_query() -> None:
    """vllm#51483: contexts 100, 50 and 1 all with one query row; only the middle of a prompt samples nothing."""
    driver = Driver(blocks=100, max_tokens=200, max_seqs=4)
    driver.submit(request_of(1, 99, 9), request_of(2, 49, 9))
    driver.step()
    driver.submit(request_of(3, 1, 9))
    driver.budget = type(driver.budget)(3, 3)
    step = driver.step()
    assert step.counts == (1, 1, 1)
    assert step.samples == (True, True, True)
    driver.submit(request_of(4, 65, 9))
    driver.budget = type(driver.budget)(4, 4)
    step = driver.step()
    assert step.counts == (1, 1, 1, 1)
    assert step.samples == (True, True, True, False), "one row of a prompt of 65 is no decode"
    driver.run()


@pytest.mark.parametrize("preempt_at", range(36))
def test_preemption_at_any_step_repeats_no_token_and_restarts_no_count(preempt_at: int) -> None:
    """vllm-tt-plugin#52: prompt 40, 30 to generate, C = 16, preempted at every step index, replayed in chunks."""
    driver = Driver(blocks=64, max_tokens=16, cache=False)
    driver.submit(request_of(1, 40, 30))

    def force(number: int) -> None:
        if number == preempt_at:
            preempt_all(driver)

    driver.run(each=force)
    assert driver.finished[1].generated_tokens == 30
    replayed = [
        (start, count)
        for plan in driver.plans[preempt_at:]
        for start, count in zip(plan.starts, plan.counts, strict=True)
    ]
    assert driver.finished[1].preemptions == (preempt_at < 32 and preempt_at > 0)
    if preempt_at == 32 - 1:
        assert replayed == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 5)], "rows 40 to 68 are recomputation"


@pytest.mark.parametrize("length", [12, 13])
def test_a_prompt_of_whole_blocks_sent_again_computes_its_last_token(length: int) -> None:
    """vllm#53706: L of 3B and 3B + 1, max_tokens 1, sent twice; then a third turn."""
    driver = Driver(blocks=16, block_tokens=4, max_tokens=8)
    for request_id in (1, 2):
        driver.submit(request_of(request_id, length, 1))
        driver.run()
    driver.submit(request_of(3, length + 5, 1))
    driver.run()
    assert all(len(output) == 1 for output in driver.outputs.values())


def test_sixty_prompts_of_67_never_exceed_a_budget_of_64() -> None:
    """sglang#2255: the remainders of 60 prompts meet the budget exactly, without a fault."""
    driver = Driver(blocks=2000, max_tokens=64)
    driver.submit(*(request_of(i, 67, 1) for i in range(60)))
    driver.run()
    assert max(plan.rows for plan in driver.plans) == 64
    assert len(driver.plans) == -(-60 * 67 // 64), "every step but the last is full"


@pytest.mark.parametrize("length", range(65, 73))
def test_a_prompt_just_over_a_chunk_finishes_after_fifty_others(length: int) -> None:
    """koboldcpp#2493: C = 64, L = C + 1 … C + 8 after 50 requests: one that failed kept its slot."""
    driver = Driver(blocks=64, max_tokens=64, max_seqs=4)
    for request_id in range(50):
        driver.submit(request_of(request_id, 5, 2))
    driver.run()
    driver.submit(request_of(99, length, 3))
    driver.run()
    assert driver.reasons()[99] == "length"


@pytest.mark.parametrize("block_tokens", [16, 64, 128])
def test_a_block_larger_than_the_chunk_queues_nobody_for_ever(block_tokens: int) -> None:
    """sglang#36344, vllm#34445: block or alignment of 64, C = 32, L = 33."""
    driver = Driver(blocks=4, block_tokens=block_tokens, max_tokens=32)
    driver.submit(request_of(1, 33, 3))
    driver.run(limit_steps=10)


def test_two_long_prompts_advance_although_an_equal_share_is_under_one_block() -> None:
    """vLLM-2080Ti-Definitive#206: budget 64, blocks of 48, two prompts of 1,000."""
    driver = Driver(blocks=60, block_tokens=48, max_tokens=64)
    driver.submit(request_of(1, 1000, 2), request_of(2, 1000, 2))
    driver.run(limit_steps=40)
    assert driver.reasons() == {1: "length", 2: "length"}


def test_a_prompt_larger_than_the_pool_is_refused_and_holds_up_nobody() -> None:
    """vllm#39734: pool 1,024; a request of 1,100 blocked the queue; the next, of 10, must answer in its next step."""
    driver = Driver(blocks=64, block_tokens=16, max_tokens=512)
    with pytest.raises(PromptTooLong, match=r"1100 tokens .* 1024"):
        driver.submit(request_of(1, 1100, 5))
    driver.submit(request_of(2, 10, 5))
    driver.step()
    assert len(driver.outputs[2]) == 1
    driver.run()


def test_an_output_that_outgrows_the_pool_ends_with_length() -> None:
    """local-inference-lab/vllm#394: pool 1,024; 1,000 tokens with max_tokens 64 was prefilled again without end."""
    driver = Driver(blocks=64, block_tokens=16, max_tokens=128)
    driver.submit(request_of(1, 1000, 64))
    driver.run(limit_steps=40)
    assert driver.finished[1].reason == "length"
    assert driver.finished[1].generated_tokens == 24
    assert driver.state.preemptions == 0


def test_two_outputs_that_outgrow_the_pool_together_both_end_and_preemptions_are_counted() -> None:
    driver = Driver(blocks=64, block_tokens=16, max_tokens=128)
    driver.submit(request_of(1, 480, 200), request_of(2, 480, 200))
    driver.run(limit_steps=450)
    assert driver.reasons() == {1: "length", 2: "length"}
    assert driver.finished[1].preemptions == 0, "the oldest always goes on"
    assert driver.finished[2].preemptions == driver.state.preemptions == 1


@pytest.mark.parametrize("max_tokens", [8, 16, 64])
@pytest.mark.parametrize("every", [3, 7])
def test_forced_preemption_changes_no_output(max_tokens: int, every: int) -> None:
    """sglang-jax#1010: preemption every 3 steps, C of 8, 16 and 64."""
    driver = Driver(blocks=64, max_tokens=max_tokens, max_seqs=8)
    driver.submit(*(request_of(i, 5 + 3 * i, 12) for i in range(6)))

    def force(number: int) -> None:
        # The newest only: taking all of them every 3 steps would outpace the replay of 25 tokens at 8 a step.
        if number % every == every - 1 and len(driver.state.running) > 1:
            preempt(driver, [driver.state.running[-1].request_id])

    driver.run(limit_steps=1000, each=force)
    assert driver.state.preemptions > 0
    assert all(len(output) == 12 for output in driver.outputs.values())


def test_three_prompts_of_5000_end_in_the_order_in_which_they_came() -> None:
    """ATOM#1835, sglang#34623, the first-come part: no decode waits while they prefill, and each is started once."""
    driver = Driver(blocks=1200, block_tokens=16, max_tokens=512)
    driver.submit(request_of(0, 10, 60), *(request_of(i, 5000, 1) for i in (1, 2, 3)))
    driver.run()
    assert list(driver.finished) == [1, 2, 3, 0]
    assert all(0 in plan.request_ids for plan in driver.plans)
    assert sum(len(plan.admit) for plan in driver.plans) == 4


def test_nine_prompts_of_500_at_64_all_answer() -> None:
    """vllm#48214."""
    driver = Driver(blocks=400, block_tokens=16, max_tokens=64)
    driver.submit(*(request_of(i, 500, 4) for i in range(9)))
    driver.run()
    assert len(driver.finished) == 9


@pytest.mark.parametrize("chunk", range(11))
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_client_that_leaves_after_any_chunk_frees_everything_within_one_step(chunk: int, in_flight: bool) -> None:
    """sglang#34149, ds4#333: L = 640, C = 64; the client leaves after chunk 0 … 10 and sends the same body again."""
    driver = Driver(blocks=45, block_tokens=16, max_tokens=64)
    driver.submit(request_of(1, 640, 3))
    for _ in range(chunk):
        driver.step()
    if in_flight:
        plan = driver.begin()
        driver.abort(1)
        driver.end(plan)
    else:
        driver.abort(1)
    assert driver.state.free_blocks == 45
    driver.submit(request_of(2, 640, 3))
    driver.run(limit_steps=13)
    assert driver.reasons() == {1: "abort", 2: "length"}


@pytest.mark.parametrize("max_tokens", CHUNKS)
def test_no_chunk_width_changes_an_output_under_a_short_pool(max_tokens: int) -> None:
    driver = Driver(blocks=9, block_tokens=4, max_tokens=max_tokens, max_seqs=min(4, max_tokens))
    driver.submit(*(request_of(i, 1 + 4 * i % 19, 1 + 5 * i % 13) for i in range(12)))
    driver.run(limit_steps=2000)
    assert len(driver.finished) == 12


def preempt_all(driver: Driver) -> None:
    preempt(driver, [slot.request_id for slot in reversed(driver.state.running)])


def preempt(driver: Driver, request_ids: list[int]) -> None:
    """One step that does nothing but preempt, as a plan may."""
    state: SchedulerState = driver.state
    if not request_ids:
        return
    plan = StepPlan(state.next_step, (), (), (), (), preempt=tuple(request_ids))
    assert plan_step(state, driver.budget, driver.policy).step == plan.step
    state.apply(plan)
    driver.end(plan)
