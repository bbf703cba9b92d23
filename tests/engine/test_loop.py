"""`Engine`: submit, step, abort, and an executor that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes import FakeClock, FakeExecutor, expected_output, expected_scores

from legato.core.budget import StepBudget
from legato.core.plan import StepPlan, StepResult, TokenLogprobs
from legato.core.request import Request, Sampling, StopRule
from legato.core.state import SchedulerState
from legato.engine.loop import Engine, StepEvents
from legato.errors import PromptTooLong


class Failing(FakeExecutor):
    """Raises in the steps named, and answers as the fake does in the others."""

    def __init__(self, block_tokens: int, fail_at: set[int]) -> None:
        super().__init__(block_tokens)
        self.fail_at = fail_at

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step in self.fail_at:
            raise MemoryError("no scratch")
        return super().execute(plan)


class Confused(FakeExecutor):
    """Answers with a token too few in its first step."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.steps > 1:
            return result
        return StepResult(result.step, result.request_ids[1:], result.token_ids[1:])


class Chatty(FakeExecutor):
    """Adds log-probabilities."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        logprobs = tuple(TokenLogprobs(-0.5) for _ in result.token_ids)
        return StepResult(result.step, result.request_ids, result.token_ids, logprobs)


def engine_of(executor: FakeExecutor, *, blocks: int = 32, max_tokens: int = 16, max_seqs: int = 8) -> Engine:
    state = SchedulerState(blocks, executor.block_tokens, 1000)
    return Engine(state, executor, StepBudget(max_tokens, max_seqs), FakeClock())


def request(request_id: int, prompt_tokens: int = 5, max_tokens: int = 4) -> Request:
    return Request(request_id, tuple(range(request_id, request_id + prompt_tokens)), stop=StopRule(max_tokens))


def drain(engine: Engine) -> list[StepEvents]:
    events = []
    while engine.has_work:
        events.append(engine.step())
        engine.state.check()
    return events


def tokens_of(events: list[StepEvents], request_id: int) -> list[int]:
    return [t for e in events for i, t in zip(e.request_ids, e.token_ids, strict=True) if i == request_id]


def reasons(events: list[StepEvents]) -> dict[int, str]:
    ends = [end for e in events for end in e.finished]
    assert len({end.request_id for end in ends}) == len(ends), "a request ended twice"
    return {end.request_id: end.reason for end in ends}


def test_every_request_gets_its_own_tokens_and_one_end() -> None:
    engine = engine_of(FakeExecutor(4))
    requests = [request(i, 3 + 7 * i, 5) for i in range(4)]
    for one in requests:
        engine.submit(one)
    events = drain(engine)
    for one in requests:
        assert tokens_of(events, one.request_id) == expected_output(one.prompt, 5)
    assert reasons(events) == dict.fromkeys(range(4), "length")


def test_the_last_token_comes_with_the_end() -> None:
    engine = engine_of(FakeExecutor(4))
    engine.submit(request(1, max_tokens=1))
    (event,) = drain(engine)
    assert event.request_ids == (1,)
    assert event.finished[0].generated_tokens == 1


def test_an_engine_that_plans_by_tokens_knows_what_they_take() -> None:
    engine = engine_of(FakeExecutor(4))
    engine.submit(request(1, 16, 4))
    prompt, *decodes = drain(engine)
    assert prompt.record is not None
    assert engine.pace.token_s == pytest.approx(prompt.record.step_s / 16)
    assert engine.pace.decode_s == pytest.approx(decodes[0].record.step_s)  # of the fake clock all steps are alike


def test_an_engine_without_work_computes_nothing() -> None:
    executor = FakeExecutor(4)
    engine = engine_of(executor)
    assert not engine.has_work
    assert engine.step() == StepEvents((), (), (), (), None)
    assert executor.steps == 0


def test_an_abort_is_reported_with_the_next_step_also_if_nothing_else_is_left() -> None:
    executor = FakeExecutor(4)
    engine = engine_of(executor)
    engine.submit(request(1))
    engine.abort(1)
    assert engine.has_work
    event = engine.step()
    assert [end.reason for end in event.finished] == ["abort"]
    assert event.record is None
    assert executor.steps == 0
    assert not engine.has_work


def test_an_abort_of_a_request_that_is_gone_is_ignored() -> None:
    engine = engine_of(FakeExecutor(4))
    engine.submit(request(1, max_tokens=1))
    drain(engine)
    engine.abort(1)
    engine.abort(2)
    assert not engine.has_work


def test_a_client_that_leaves_frees_its_blocks_within_one_step() -> None:
    engine = engine_of(FakeExecutor(4))
    engine.submit(request(1, 20, 50))
    engine.submit(request(2, 5, 3))
    engine.step()
    engine.abort(1)
    event = engine.step()
    assert [end.request_id for end in event.finished] == [1]
    assert event.record is not None
    assert 1 not in event.record.plan.request_ids
    assert len(engine.state.running) == 1


def test_a_prompt_too_long_is_refused_at_once_and_disturbs_nobody() -> None:
    engine = engine_of(FakeExecutor(4), blocks=4)
    engine.submit(request(1))
    with pytest.raises(PromptTooLong, match=r"17 tokens .* 16"):
        engine.submit(request(2, 17))
    assert reasons(drain(engine)) == {1: "length"}


def test_a_step_that_fails_ends_its_requests_with_the_reason_and_the_engine_goes_on() -> None:
    engine = engine_of(Failing(4, fail_at={1}), max_seqs=2)
    for request_id in range(3):
        engine.submit(request(request_id))
    events = drain(engine)
    assert reasons(events) == {0: "error", 1: "error", 2: "length"}
    (first, *_) = [end for e in events for end in e.finished]
    assert first.message == "step 1 failed: MemoryError: no scratch"
    assert tokens_of(events, 2) == expected_output(request(2).prompt, 4)
    assert engine.state.free_blocks == engine.state.total_blocks


def test_an_executor_that_always_fails_wedges_nothing() -> None:
    engine = engine_of(Failing(4, fail_at=set(range(100))), max_seqs=2)
    for request_id in range(9):
        engine.submit(request(request_id))
    assert set(reasons(drain(engine)).values()) == {"error"}


def test_an_answer_of_the_wrong_shape_fails_the_step_and_not_the_engine() -> None:
    engine = engine_of(Confused(4), max_seqs=2)
    for request_id in range(4):
        engine.submit(request(request_id))
    events = drain(engine)
    assert reasons(events) == {0: "error", 1: "error", 2: "length", 3: "length"}
    assert "2 were due" in events[0].finished[0].message


def test_log_probabilities_come_beside_their_tokens() -> None:
    engine = engine_of(Chatty(4))
    engine.submit(request(1, max_tokens=2))
    assert [event.logprobs for event in drain(engine)] == [(TokenLogprobs(-0.5),)] * 2


def test_log_probabilities_of_a_prompt_come_before_its_first_token_or_with_it() -> None:
    engine = engine_of(FakeExecutor(4))
    asks = replace(request(1, 40, max_tokens=2), sampling=Sampling(prompt_logprobs=1))
    engine.submit(asks)
    events = drain(engine)
    scored = [p for event in events for p in event.prompt_logprobs]
    assert [p.start for p in scored] == [1, 17, 33]
    assert [entry for p in scored for entry in p.entries] == expected_scores(asks)
    assert [bool(event.token_ids) for event in events] == [False, False, True, True]
    assert not events[3].prompt_logprobs


def test_the_record_tells_the_shape_and_the_time_of_a_step() -> None:
    engine = engine_of(FakeExecutor(4), max_tokens=8, max_seqs=2)
    engine.submit(request(1, 5))
    engine.step()
    engine.submit(request(2, 20))
    engine.submit(request(3, 5))
    record = engine.step().record
    assert record is not None
    assert (record.plan.decodes, record.prefill_rows) == (1, 7)
    assert (record.running, record.waiting) == (2, 1)
    assert record.free_blocks == 32 - 2 - 5
    assert (record.started_s, record.plan_s, record.step_s) == (6.0, 1.0, 4.0), "the clock is read five times a step"
    assert [r.plan.step for r in engine.trace] == [0, 1]
