"""The engine process: takes requests from its socket before each step, steps, sends one message. No asyncio, no text.

Started by `service.EngineService` as a fresh interpreter, so no thread, event loop or GIL is shared.
"""

from __future__ import annotations

import gc
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

from legato.core.state import SchedulerState
from legato.core.trace import StepRecord
from legato.engine.lane import Background
from legato.engine.loop import Engine
from legato.engine.wire import (
    Abort,
    CacheStats,
    EngineInfo,
    EngineSocket,
    Failed,
    PaceStats,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    StepDone,
    StepStats,
    Submit,
    Trace,
    Tracing,
    pack_logprobs,
    request_of,
)
from legato.errors import LegatoError, RequestError

PROGRESS_INTERVAL_S = 0.05
IDLE_S = 0.1

ReportProgress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all) while an engine is being built."""


EngineFactory = Callable[[ReportProgress], tuple[Engine, EngineInfo]]
"""Builds the engine, in its own process. Must be picklable: a module-level function or a `functools.partial` of one."""


def serve_engine(port: EngineSocket, engine: Engine) -> None:
    """Runs until told to shut down or the other end is gone (EOFError, BrokenPipeError). Sleeps when idle.

    Idle for a tenth of a second, it checks every invariant of the state, and fits the cost of steps anew where
    predictions have been poor: milliseconds that nobody waits for.
    """
    last_end_s = -1.0
    checked_step = -1
    is_over = False

    def hear(*, wait: bool) -> None:
        nonlocal is_over
        for message in port.receive(wait=wait):
            if isinstance(message, Submit):
                try:
                    engine.submit(request_of(message))
                except RequestError as error:
                    port.send(Rejected(message.request_id, type(error).__name__, str(error)))
            elif isinstance(message, Abort):
                engine.abort(message.request_id)
            elif isinstance(message, Trace):
                engine.traces = True
                port.send(_tracing(engine))
            elif isinstance(message, Shutdown):
                is_over = True

    def listen(for_s: float, done: Background) -> None:
        if port.waits_beside(done.fileno(), for_s):
            hear(wait=False)

    while True:
        if not engine.has_work and checked_step != engine.state.next_step and port.is_quiet(IDLE_S):
            engine.state.check()
            if engine.pacer is not None and engine.pacer.tracker.refit() and engine.traces:
                port.send(_tracing(engine))
            checked_step = engine.state.next_step
        hear(wait=not engine.has_work)
        if is_over:
            return
        if not engine.has_work:
            last_end_s = -1.0
            continue
        events = engine.step(listen)
        gap_s = -1.0
        if (record := events.record) is not None:
            gap_s = max(record.started_s - last_end_s, 0.0) if last_end_s >= 0.0 else -1.0
            last_end_s = record.started_s + record.step_s
        port.send(
            StepDone(
                list(events.request_ids),
                list(events.token_ids),
                [None if entry is None else pack_logprobs(entry) for entry in events.logprobs]
                if any(events.logprobs)
                else [],
                [(ended.request_id, ended.reason, ended.message) for ended in events.finished],
                _stats(engine, events.record, gap_s),
                list(events.cached),
                [(p.request_id, [pack_logprobs(entry) for entry in p.entries]) for p in events.prompt_logprobs],
                events.traced,
            )
        )


def _stats(engine: Engine, record: StepRecord | None, gap_s: float) -> StepStats:
    state = engine.state
    counts = (len(state.running), len(state.waiting), state.free_blocks)
    cache = _cache_stats(state)
    pace = pace_stats(engine)
    if record is None:
        return StepStats(
            state.next_step, 0.0, gap_s, 0, 0, *counts, cache=cache, pace=pace, pending_tokens=state.pending_tokens
        )
    plan = record.plan
    rows = (plan.rows, plan.rows - plan.decodes)
    return StepStats(
        plan.step,
        record.step_s,
        gap_s,
        *rows,
        *counts,
        preempted=len(plan.preempt),
        cache=cache,
        pace=pace,
        pending_tokens=state.pending_tokens,
    )


def _tracing(engine: Engine) -> Tracing:
    return Tracing(None if engine.pacer is None else engine.pacer.tracker.cost.to_dict())


def pace_stats(engine: Engine) -> PaceStats:
    """What tokens take and how well steps are foreseen, for metrics."""
    pace, pacer = engine.pace, engine.pacer
    if pacer is None:
        return PaceStats(pace.token_s, pace.decode_s)
    tracker = pacer.tracker
    late = {str(cause): tokens for cause, tokens in pacer.late.items()}
    scales = tracker.cost.scale, tracker.cost.memory_scale
    return PaceStats(pace.token_s, pace.decode_s, tracker.margin, *scales, *pacer.errors, late)


def _cache_stats(state: SchedulerState) -> CacheStats:
    memory = state.memory
    return CacheStats(
        queried_tokens=state.queried_tokens,
        hit_tokens=state.cached_tokens,
        cached_blocks=memory.pool.named,
        evictions=memory.pool.evictions,
        swapped_blocks=len(memory.host),
        restored_blocks=memory.restored_blocks,
        overtakes=state.overtakes,
    )


def main(fd: int) -> int:
    """Entry of the process: reads the pickled factory from socket `fd`, builds the engine, serves. Exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    sock = socket.socket(fileno=fd)
    try:
        return _build_and_serve(EngineSocket(sock), *_receive_start(sock))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the server is gone, and with it everybody we computed for
    finally:
        sock.close()


def _build_and_serve(port: EngineSocket, path: list[str], factory_pickle: bytes) -> int:
    sys.path[:] = path
    last_report_s = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last_report_s
        now_s = time.monotonic()
        if done >= total or now_s - last_report_s >= PROGRESS_INTERVAL_S:
            last_report_s = now_s
            port.send(Progress(stage, done, total))

    try:
        factory: EngineFactory = pickle.loads(factory_pickle)
        start_s = time.monotonic()
        engine, info = factory(report)
        gc.collect()
        gc.freeze()  # what lives for ever is not walked again: no long collection in the middle of a step
        if not info.load_s:
            info = _with_load_time(info, time.monotonic() - start_s)
        port.send(Ready(info))
        try:
            serve_engine(port, engine)
        finally:
            engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except LegatoError as error:
        port.send(Failed(type(error).__name__, str(error)))
        return 1
    except MemoryError as error:
        port.send(Failed("OutOfMemory", f"not enough memory: {error}"))
        return 1
    except Exception as error:
        port.send(Failed("bug", f"{type(error).__name__}: {error}", traceback.format_exc()))
        return 1
    return 0


def _with_load_time(info: EngineInfo, load_s: float) -> EngineInfo:
    import msgspec

    return msgspec.structs.replace(info, load_s=load_s)


def _receive_start(sock: socket.socket) -> tuple[list[str], bytes]:
    """The first frame: the parent's import path and the pickled factory."""
    path, factory = pickle.loads(_receive_exactly(sock, struct.unpack("<I", _receive_exactly(sock, 4))[0]))
    return path, factory


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        data = sock.recv(size - len(parts))
        if not data:
            raise EOFError
        parts += data
    return bytes(parts)
