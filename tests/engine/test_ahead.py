"""Planning one step ahead: the same answers, with arrivals and aborts at any moment, and planning off the clock."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import pytest
from tests.fakes import FakeExecutor, expected_output

from legato.core.budget import StepBudget
from legato.core.cost import Curve, StepCost
from legato.core.pacer import Pacer
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import POLICIES
from legato.core.request import Finished, Request, StopRule
from legato.core.shape import Attention
from legato.core.state import SchedulerState
from legato.core.tracker import CostTracker
from legato.engine.lane import Background
from legato.engine.loop import Engine, StepEvents

STEP_S = 0.004


class Slow(FakeExecutor):
    """Computes in the lane's thread: each step takes `step_s`."""

    def __init__(self, block_tokens: int = 4) -> None:
        super().__init__(block_tokens)
        self.fail_at: set[int] = set()
        self.threads: set[str] = set()
        self.step_s = STEP_S

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = None if plan.step in self.fail_at else self.execute(plan)

        def run() -> StepResult:
            self.threads.add(threading.current_thread().name)
            time.sleep(self.step_s)
            if result is None:
                raise MemoryError("no scratch")
            return result

        return run


def engine_of(executor: Slow, *, blocks: int = 200, policy: str = "fcfs", max_tokens: int = 16) -> Engine:
    state = SchedulerState(blocks, executor.block_tokens, 1000, policy=POLICIES[policy])
    cost = StepCost(Attention(), rows=Curve((1,), (STEP_S,), 0.0))
    pacer = Pacer(CostTracker(cost), itl_s=1.0)
    return Engine(state, executor, StepBudget(max_tokens, 8), time.perf_counter, pacer=pacer, ahead=executor)


def request(request_id: int, prompt_tokens: int = 5, max_tokens: int = 6) -> Request:
    prompt = tuple((request_id * 7 + i) % 97 for i in range(prompt_tokens))
    return Request(request_id, prompt, stop=StopRule(max_tokens), arrival_s=time.perf_counter())


class Seen:
    """What came out of an engine."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}

    def take(self, events: StepEvents) -> None:
        for request_id, token in zip(events.request_ids, events.token_ids, strict=True):
            self.outputs.setdefault(request_id, []).append(token)
        for end in events.finished:
            assert end.request_id not in self.ends
            self.ends[end.request_id] = end

    def drain(self, engine: Engine, each: Callable[[int], None] | None = None) -> None:
        for number in range(2000):
            if not engine.has_work:
                return
            if each is not None:
                each(number)
            self.take(engine.step())
            engine.state.check()
        raise AssertionError("still at work")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("blocks", [12, 200])
def test_answers_are_those_of_each_request_alone(policy: str, blocks: int) -> None:
    """In a pool so small that some are preempted, too."""
    executor, seen = Slow(), Seen()
    engine = engine_of(executor, policy=policy, blocks=blocks)
    requests = {i: request(i, 3 + 5 * i, 4 + i) for i in range(6)}

    def arrive(number: int) -> None:
        if number < 6:
            engine.submit(requests[number])

    engine.submit(request(99, 1, 1))
    seen.drain(engine, arrive)
    engine.close()
    for request_id, asked in requests.items():
        assert seen.outputs[request_id] == expected_output(asked.prompt, asked.stop.max_tokens)
    assert executor.threads == {"legato-steps"}
    assert engine.state.free_blocks == engine.state.total_blocks


def test_a_step_is_planned_while_the_one_before_computes() -> None:
    executor = Slow()
    engine = engine_of(executor)
    for request_id in range(4):
        engine.submit(request(request_id, 2, 30))
    engine.step()
    in_flight = []
    for _ in range(10):
        engine.step()
        in_flight.append(engine.state.in_flight)
    assert sum(in_flight) >= 8, "the next step has begun when the events of the last are handed out"
    Seen().drain(engine)
    engine.close()


def test_whoever_comes_while_a_step_computes_is_in_the_next_one() -> None:
    executor = Slow()
    engine = engine_of(executor, max_tokens=64)
    engine.submit(request(1, 2, 50))
    engine.step()
    engine.step()
    late = request(2, 5, 3)
    heard: list[float] = []

    def listen(for_s: float, done: Background) -> None:
        if not heard:
            engine.submit(late)
        heard.append(for_s)
        done.wait(for_s)

    engine.step(listen)
    events = engine.step()
    assert heard
    assert 2 in events.request_ids
    Seen().drain(engine)
    engine.close()


def test_an_abort_at_any_moment_loses_nothing() -> None:
    executor, seen = Slow(), Seen()
    engine = engine_of(executor, blocks=30)
    for request_id in range(5):
        engine.submit(request(request_id, 9, 12))

    def listen(for_s: float, done: Background) -> None:
        engine.abort(2)
        done.wait(for_s)

    for _ in range(4):
        seen.take(engine.step(listen))
    engine.abort(0)
    seen.drain(engine)
    engine.close()
    assert {i: end.reason for i, end in seen.ends.items()} == {
        0: "abort", 1: "length", 2: "abort", 3: "length", 4: "length"
    }  # fmt: skip
    assert engine.state.free_blocks == engine.state.total_blocks


def test_a_step_that_fails_ends_its_requests_and_the_step_planned_after_it_is_given_up() -> None:
    executor, seen = Slow(), Seen()
    executor.fail_at = {4}
    engine = engine_of(executor)
    engine.submit(request(1, 3, 20))
    for _ in range(6):
        seen.take(engine.step())
        engine.state.check()
    assert seen.ends[1].reason == "error"
    assert "no scratch" in seen.ends[1].message
    engine.submit(request(2, 3, 3))
    seen.drain(engine)
    engine.close()
    assert seen.ends[2].reason == "length"


def test_an_interrupt_while_a_step_computes_leaves_an_engine_that_goes_on() -> None:
    executor, seen = Slow(), Seen()
    engine = engine_of(executor)
    engine.submit(request(1, 3, 8))
    seen.take(engine.step())

    def interrupt(for_s: float, done: Background) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.step(interrupt)
    seen.drain(engine)
    engine.close()
    assert seen.outputs[1] == expected_output(request(1, 3, 8).prompt, 8)


def test_closing_waits_for_the_step_that_computes() -> None:
    executor = Slow()
    engine = engine_of(executor)
    engine.submit(request(1, 3, 50))
    engine.step()
    engine.step()
    assert engine.state.in_flight
    engine.close()
    assert not any(thread.name == "legato-steps" for thread in threading.enumerate())


def test_planning_is_no_part_of_the_gap_between_steps() -> None:
    """With planning that takes nearly as long as a step: the steps follow each other all the same."""
    executor, delay_s = Slow(), 0.02
    executor.step_s = 0.03
    engine = engine_of(executor)
    engine.submit(request(1, 3, 60))
    plan = engine._plan

    def slow_plan(begins_s: float, *, ahead: bool = False) -> object:
        time.sleep(delay_s)
        return plan(begins_s, ahead=ahead)

    engine._plan = slow_plan  # type: ignore[method-assign, assignment]
    assert engine.pacer is not None
    engine.pacer.predict = lambda shape: 0.0  # type: ignore[method-assign]  # plan at once
    took_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        engine.step()
        took_s.append(time.perf_counter() - started_s)
    Seen().drain(engine)
    engine.close()
    assert statistics.median(took_s) < executor.step_s + 0.5 * delay_s
