"""The engine process seen from asyncio, with an engine whose answers one can compute by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from legato.core.request import Sampling, StopRule
from legato.engine.service import EngineService
from legato.engine.stream import TokenStream
from legato.engine.wire import StepStats
from legato.errors import EngineError, ModelCorrupt, RequestError
from server.fake_engine import factory

Start = Callable[..., object]


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., object]]:
    services: list[EngineService] = []

    async def begin(on_step: Callable[[StepStats], None] | None = None, **options: object) -> EngineService:
        service = EngineService(factory(**options), on_step=on_step)
        services.append(service)
        await service.start()
        return service

    yield begin
    for service in services:
        await service.stop()


async def collect(stream: TokenStream) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        for event in await stream.take():
            if event.token_id >= 0:
                tokens.append(event.token_id)
            if event.finish is not None:
                return tokens, event.finish


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.005)


async def test_each_stream_gets_its_own_tokens_in_order(start) -> None:
    service = await start(max_seqs=8)
    streams = []
    for text in (b"abc", b"hello world", b"z"):
        stream = service.open_stream()
        service.submit(stream, tuple(text), Sampling(), StopRule(max_tokens=20))
        streams.append((text, stream))
    for text, stream in streams:
        tokens, reason = await collect(stream)
        assert bytes(tokens) == (text * 20)[:20]
        assert reason == "length"


async def test_loading_reports_progress_and_what_the_engine_is() -> None:
    seen: list[tuple[str, int, int]] = []
    service = EngineService(factory(), on_progress=lambda *report: seen.append(report))
    info = await service.start()
    await service.stop()
    assert seen[-1] == ("reading weights", 2, 2)
    assert (info.kv_tokens, info.max_num_batched_tokens) == (1024, 64)
    assert info.load_s > 0.0


@pytest.mark.parametrize(
    ("fail", "kind", "words"),
    [
        ("model", ModelCorrupt, "ends after 12 of 100 bytes"),
        ("bug", EngineError, "ZeroDivisionError"),
        ("exit", EngineError, "status 7"),
    ],
)
async def test_a_failing_start_raises_what_the_process_raised(fail: str, kind: type[Exception], words: str) -> None:
    service = EngineService(factory(fail=fail))
    with pytest.raises(kind, match=words):
        await service.start()
    assert not service.alive


async def test_an_idle_engine_uses_no_processor_time(start) -> None:
    service = await start()
    ticks = os.sysconf("SC_CLK_TCK")

    def cpu_s() -> float:
        fields = Path(f"/proc/{service.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    stream = service.open_stream()
    service.submit(stream, (1, 2), Sampling(), StopRule(max_tokens=3))
    await collect(stream)
    before = cpu_s()
    await asyncio.sleep(0.3)
    assert cpu_s() - before <= 0.02


async def test_an_abort_reaches_the_engine_before_its_next_step(start) -> None:
    """One slot, two requests: the second runs in the step after the first is aborted, and nothing else frees it."""
    steps: list[StepStats] = []
    service = await start(on_step=steps.append, max_seqs=1, step_s=0.05)
    first, second = service.open_stream(), service.open_stream()
    service.submit(first, (1, 2, 3), Sampling(), StopRule(max_tokens=400))
    service.submit(second, (7, 8), Sampling(), StopRule(max_tokens=2))
    await first.take()
    at_abort = steps[-1].step
    first.close()
    assert (await collect(second))[0] == [7, 8]
    # The step under way when the abort was sent still counts; the one after it already works for the second request.
    assert steps[-1].step <= at_abort + 3
    await until(lambda: steps[-1].running == 0 and steps[-1].free_blocks == 64)
    assert service.metrics.finished["abort"] == 1


async def test_when_the_process_dies_everyone_waiting_is_told(start) -> None:
    service = await start(step_s=0.01)
    streams = [service.open_stream() for _ in range(3)]
    for stream in streams:
        service.submit(stream, (1, 2, 3), Sampling(), StopRule(max_tokens=500))
        await stream.take()
    os.kill(service.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineError, match="SIGKILL"):
            await collect(stream)
    assert not service.alive
    with pytest.raises(EngineError, match="SIGKILL"):
        service.submit(service.open_stream(), (1,), Sampling(), StopRule())


async def test_a_failing_step_ends_its_requests_with_the_reason_and_no_others(start) -> None:
    service = await start()
    bad, good = service.open_stream(), service.open_stream()
    service.submit(bad, tuple(b"!bug"), Sampling(), StopRule())
    with pytest.raises(EngineError, match="ZeroDivisionError: a bug of the executor"):
        await bad.take()
    service.submit(good, (1, 2), Sampling(), StopRule(max_tokens=4))
    assert (await collect(good))[0] == [1, 2, 1, 2]
    assert service.metrics.finished["error"] == 1


async def test_a_refused_request_disturbs_nobody(start) -> None:
    service = await start(step_s=0.005)
    good, bad = service.open_stream(), service.open_stream()
    service.submit(good, (1, 2), Sampling(), StopRule(max_tokens=30))
    service.submit(bad, (1,) * 600, Sampling(), StopRule())
    with pytest.raises(RequestError, match=r"600 tokens.*512"):
        await bad.take()
    assert (await collect(good))[0] == [1, 2] * 15


async def test_sequences_of_one_client_arrive_in_one_batch_a_step(start) -> None:
    service = await start(step_s=0.02)
    stream = service.open_stream()
    ids = {service.submit(stream, (1, 2), Sampling(), StopRule(max_tokens=5)) for _ in range(3)}
    batches = [await stream.take()]
    while sum(event.finish is not None for batch in batches for event in batch) < 3:
        batches.append(await stream.take())
    assert any({event.request_id for event in batch} == ids for batch in batches)


async def test_a_cancelled_start_leaves_no_process() -> None:
    service = EngineService(factory(fail="hang"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(service.start(), 0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(service.pid, 0)


async def test_when_the_server_is_killed_the_engine_ends_too() -> None:
    """SIGKILL leaves the server no chance to say so: the engine finds its socket closed."""
    script = """
import asyncio
from legato.engine.service import EngineService
from server.fake_engine import factory

async def main():
    service = EngineService(factory())
    await service.start()
    print(service.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE, env=env)
    assert server.stdout is not None
    engine_pid = int(await server.stdout.readline())
    server.kill()
    await server.wait()
    await until(lambda: not Path(f"/proc/{engine_pid}/exe").exists() or _is_zombie(engine_pid))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_an_engine_that_has_lost_a_block_says_so_when_it_falls_idle(start: Start) -> None:
    service = await start()
    stream = service.open_stream()
    service.submit(stream, tuple(b"!lose"), Sampling(), StopRule(2))
    failure = await asyncio.wait_for(service.failed(), 20)
    assert "held by nobody we know" in str(failure)
