"""What a trace costs, in microseconds a step: the engine's process and the server's, by streams; bytes on disk.

python benchmarks/trace.py   one JSON line
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from legato.core.budget import StepBudget
from legato.core.cost import Curve, StepCost
from legato.core.pacer import Pacer
from legato.core.plan import StepPlan, StepResult
from legato.core.request import Request, StopRule
from legato.core.shape import Attention
from legato.core.state import SchedulerState
from legato.core.trace import TracedStep
from legato.core.tracker import CostTracker
from legato.core.view import RowSource
from legato.engine.loop import Engine
from legato.engine.wire import StepDone, StepStats, decode_from_engine, frame
from legato.explain.record import FORMAT, Header, Options, encode_line, stepped
from legato.explain.ring import TraceWriter

STREAMS, STEPS = (1, 16, 64), 2000


class Instant:
    """An executor that takes no time: what is left is everything else."""

    def bind(self, source: RowSource) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, plan.request_ids, (1,) * len(plan.request_ids))


def engine_seconds(streams: int) -> tuple[float, TracedStep]:
    """What tracing adds to a step of so many decodes, sent off included; and the last one."""
    cost = StepCost(Attention(), rows=Curve((1,), (0.004,), 1e-5))
    state = SchedulerState(streams * 200, 32, 100_000)
    pacer = Pacer(CostTracker(cost), itl_s=0.1)
    engine = Engine(state, Instant(), StepBudget(512, 64), time.perf_counter, pacer=pacer)
    for request_id in range(streams):
        engine.submit(Request(request_id, (request_id,) * 4, stop=StopRule(5000)))
    engine.step()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    last: TracedStep | None = None
    for step in range(2 * STEPS):
        engine.traces = bool(step // 8 % 2)  # in turn, since machines change; eighth steps have other work to do
        begin_s = time.perf_counter()
        events = engine.step()
        frame(StepDone(list(events.request_ids), list(events.token_ids), [], [], StepStats(), traced=events.traced))
        seconds[engine.traces].append(time.perf_counter() - begin_s)
        last = events.traced or last
    assert last is not None
    return statistics.median(seconds[True]) - statistics.median(seconds[False]), last


def median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEPS):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


def server_seconds(traced: TracedStep, folder: Path) -> float:
    """Median of what the server does more for a traced step: decode it, write it."""
    header = Header(FORMAT, "0", "none", 0.0, 0.0, 0.1, Options(1, 32, 1, 512, 64))
    writer = TraceWriter(folder / "steps.jsonl", header, 64 << 20)
    plain = frame(StepDone([], [], [], [], StepStats()))[4:]
    with_trace = frame(StepDone([], [], [], [], StepStats(), traced=traced))[4:]
    decoding_s = median_seconds(lambda: decode_from_engine(with_trace))
    decoding_s -= median_seconds(lambda: decode_from_engine(plain))
    return decoding_s + median_seconds(lambda: writer.write(stepped(traced, 1.0)))


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for streams in STREAMS:
            engine_s, traced = engine_seconds(streams)
            rows.append(
                {
                    "streams": streams,
                    "engine_us": round(1e6 * engine_s, 1),
                    "server_us": round(1e6 * server_seconds(traced, Path(folder)), 1),
                    "bytes": len(encode_line(stepped(traced, 1.0))),
                }
            )
    print(json.dumps({"benchmark": "trace", "steps": rows}))


if __name__ == "__main__":
    main()
