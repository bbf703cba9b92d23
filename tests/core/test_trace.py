"""`StepTrace` is bounded."""

from legato.core.plan import StepPlan
from legato.core.trace import StepRecord, StepTrace


def record(step: int) -> StepRecord:
    plan = StepPlan(step, (1, 2), (9, 0), (1, 7), (True, True), decodes=1)
    return StepRecord(plan, float(step), 0.25, 1.0, running=2, waiting=0, free_blocks=3)


def test_the_oldest_record_makes_room() -> None:
    trace = StepTrace(capacity=3)
    for step in range(5):
        trace.append(record(step))
    assert [r.plan.step for r in trace] == [2, 3, 4]
    assert len(trace) == 3


def test_prefill_rows_are_those_that_are_no_decodes() -> None:
    assert record(0).prefill_rows == 7
