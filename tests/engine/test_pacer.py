"""`Pacer` and the engine's steps: streams get their time, and what is late is counted by its cause."""

from __future__ import annotations

import pytest
from tests.fakes import FakeExecutor

from legato.core.budget import StepBudget
from legato.core.cost import Curve, StepCost
from legato.core.pacer import Pacer
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import SLO
from legato.core.request import Request, StopRule
from legato.core.shape import Attention, StepShape
from legato.core.state import SchedulerState
from legato.core.tracker import CostTracker
from legato.engine.loop import Engine
from legato.engine.wire import ToEngine
from legato.engine.worker import pace_stats, serve_engine

# 4 ms a step and 1 ms for each further row.
MACHINE = StepCost(Attention(), rows=Curve((1,), (0.004,), 0.001))


class Timed(FakeExecutor):
    """Takes what `MACHINE` says, `slowdown` times, on a clock of its own."""

    def __init__(self) -> None:
        super().__init__(16)
        self.now_s = 0.0
        self.slowdown = 1.0

    def __call__(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        self.now_s += self.slowdown * MACHINE.predict(StepShape.of(plan, MACHINE.attention))
        return super().execute(plan)


def engine_of(itl_s: float, *, blocks: int = 200) -> tuple[Engine, Timed]:
    executor = Timed()
    pacer = Pacer(CostTracker(MACHINE, margin=1.0), itl_s=itl_s, slack_s=0.0)
    state = SchedulerState(blocks, 16, 3000, policy=SLO)
    return Engine(state, executor, StepBudget(128, 32), executor, pacer=pacer), executor


def submit(engine: Engine, request_id: int, tokens: int, max_tokens: int) -> None:
    prompt = tuple((request_id * 31 + i * i) % 97 for i in range(tokens))
    engine.submit(Request(request_id, prompt, stop=StopRule(max_tokens)))


def test_a_prompt_beside_streams_makes_no_token_late() -> None:
    engine, _ = engine_of(0.03)
    for request_id in range(4):
        submit(engine, request_id, 5, 100)
    engine.step()
    submit(engine, 9, 500, 3)
    rows = [record.plan.rows for _ in range(30) if (record := engine.step().record) is not None]
    assert max(rows) == 27, "4 ms and 26 more"
    assert engine.pacer is not None and not engine.pacer.late


def test_a_step_that_takes_longer_than_foreseen_is_counted_as_slow() -> None:
    engine, executor = engine_of(0.03)
    submit(engine, 1, 5, 100)
    submit(engine, 2, 5, 100)
    for _ in range(3):
        engine.step()
    executor.slowdown = 10.0
    engine.step()
    assert engine.pacer is not None and engine.pacer.late == {"slow": 2}


def test_a_pause_between_steps_is_counted_as_such() -> None:
    engine, executor = engine_of(0.03)
    submit(engine, 1, 5, 100)
    engine.step()
    engine.step()
    executor.now_s += 1.0
    engine.step()
    assert engine.pacer is not None and engine.pacer.late == {"between": 1}


def test_decodes_that_alone_take_too_long_are_named() -> None:
    engine, _ = engine_of(0.03)
    for request_id in range(20):
        submit(engine, request_id, 2, 50)
    for _ in range(12):
        engine.step()
    assert engine.pacer is not None
    engine.pacer.itl_s = 0.01
    engine.step()
    assert set(engine.pacer.late) == {"decodes"}


def test_a_stream_that_was_preempted_is_told_from_the_others() -> None:
    engine, executor = engine_of(0.2, blocks=9)
    submit(engine, 1, 50, 70)
    submit(engine, 2, 50, 60)
    while engine.has_work:
        executor.now_s += 0.001
        engine.step()
    assert engine.state.preemptions == 1
    assert engine.pacer is not None and engine.pacer.late == {"preempted": 1}


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_budget_follows_a_machine_that_changes(factor: float) -> None:
    engine, executor = engine_of(0.06)
    for request_id in range(4):
        submit(engine, request_id, 5, 1000)
    engine.step()
    executor.slowdown = factor
    submit(engine, 9, 2500, 1)
    gaps = [record.step_s for _ in range(40) if (record := engine.step().record) is not None]
    assert max(gaps[20:]) <= 0.0601
    if factor < 1.0:
        assert max(gaps[20:]) > 0.05, "what became free is used"


class Quiet:
    """The socket of a server that sends nothing, and is gone after a while."""

    def is_quiet(self, for_s: float) -> bool:
        return True

    def receive(self, *, wait: bool) -> list[ToEngine]:
        raise EOFError


def test_an_idle_engine_fits_the_cost_of_steps_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of(0.03)
    submit(engine, 1, 5, 2)
    while engine.has_work:
        engine.step()
    fitted: list[bool] = []
    assert engine.pacer is not None
    monkeypatch.setattr(engine.pacer.tracker, "refit", lambda: fitted.append(True))
    with pytest.raises(EOFError):
        serve_engine(Quiet(), engine)  # type: ignore[arg-type]
    assert fitted == [True]


def test_metrics_are_told_each_number_by_its_name() -> None:
    engine, executor = engine_of(0.03)
    executor.slowdown = 2.0
    submit(engine, 1, 200, 100)
    for _ in range(90):
        engine.step()
    assert engine.pacer is not None
    stats, tracker, pace = pace_stats(engine), engine.pacer.tracker, engine.pace
    assert (stats.token_s, stats.decode_s) == (pace.token_s, pace.decode_s)
    assert (stats.margin, stats.scale) == (tracker.margin, tracker.cost.scale)
    assert stats.scale == pytest.approx(2.0, rel=0.1)
    assert stats.memory_scale == tracker.cost.memory_scale
    assert stats.median_error <= stats.p95_error
    assert stats.late == dict(engine.pacer.late)
