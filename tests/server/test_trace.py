"""`--trace`: what a server writes while it serves, and that it explains what its clients have seen."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from legato.core.cost import StepCost
from legato.engine.wire import EngineInfo
from legato.explain.attribute import explain
from legato.explain.read import Trace, read_trace
from legato.explain.ring import TraceWriter
from legato.explain.sentence import Teller
from legato.server.recorder import TraceRecorder
from server.test_live import TEXT, Live, running, until


async def over(live: Live) -> None:
    async def is_over() -> bool:
        return not live.service.open_sequences

    await until(is_over)


async def times_of(live: Live, **body: Any) -> list[float]:
    """When the client sent its request, and when each token came."""
    times = [time.monotonic()]
    reader, writer = await live.open_stream(**body)
    while True:
        line = await reader.readline()
        if b'"text":' in line:
            times.append(time.monotonic())
        if b"[DONE]" in line:
            writer.close()
            return times


def test_the_clocks_of_engine_and_server_are_one() -> None:
    """The engine reads `perf_counter`, the server `monotonic`, and a gap is measured on both."""
    clocks = [time.get_clock_info(name).implementation for name in ("perf_counter", "monotonic")]
    assert clocks[0] == clocks[1]
    assert abs(time.perf_counter() - time.monotonic()) < 0.01


async def test_what_clients_see_is_explained_within_2_percent(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    async with running(trace=path, step_s=0.02, foreseen=True, itl_s=0.05) as live:
        seen = await asyncio.gather(
            times_of(live, prompt="abc", max_tokens=25), times_of(live, prompt="y" * 200, max_tokens=15)
        )
        await over(live)
    trace = read_trace(path)
    assert (trace.header.model, trace.header.itl_s, len(trace.requests)) == ("fake", 0.05, 2)
    assert isinstance(trace.cost(0), StepCost)
    found = explain(trace)
    assert found.deviation < 1e-6
    for times in seen:
        request_id = next(i for i, indices in found.tokens.items() if len(indices) == len(times) - 1)
        gaps = found.of(request_id)
        explained_s = sum(gap.parts.total for gap in gaps)
        assert explained_s == pytest.approx(times[-1] - times[0], rel=0.02, abs=0.008)
        kinds = {kind: sum(gap.parts[kind] for gap in gaps) for gap in gaps for kind in gap.parts.seconds}
        assert kinds["noise"] < 0.2 * explained_s
    assert {end.reason for end in trace.ends.values()} == {"length"}
    assert sorted(end.generated for end in trace.ends.values()) == [15, 25]


async def test_a_server_that_is_blocked_while_a_token_waits_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    async with running(trace=path, step_s=0.02, foreseen=True, itl_s=0.06) as live:
        reading = asyncio.create_task(times_of(live, prompt="abc", max_tokens=30))
        await asyncio.sleep(0.2)
        time.sleep(0.15)  # noqa: ASYNC251  (this is what is looked for)
        times = await reading
        await over(live)
    found = explain(read_trace(path))
    worst = max(found.late, key=lambda gap: gap.seconds)
    assert worst.cause == "delivery"
    # The client is in the same loop: the token before may have been handed on, and read only afterwards.
    assert max(b - a for a, b in pairwise(times)) == pytest.approx(worst.seconds, abs=0.03)
    assert worst.parts["delivery"] > 0.1
    assert "the server was busy" in Teller(found).sentence(worst)


async def test_a_text_that_is_tokenized_on_the_way_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: object, prompt: str, context: int) -> Any:
        async def tokens() -> tuple[int, ...]:
            if "z" in prompt:
                time.sleep(0.12)  # noqa: ASYNC251
            return tuple(prompt.encode())

        return tokens()

    monkeypatch.setattr("legato.server.served.ServedModel.prompt_tokens", slow)
    path = tmp_path / "steps.jsonl"
    async with running(trace=path, step_s=0.02, foreseen=True, itl_s=0.06) as live:
        reading = asyncio.create_task(times_of(live, prompt="abc", max_tokens=25))
        await asyncio.sleep(0.15)
        await live.client.post(TEXT, json={"prompt": "zz", "max_tokens": 2})
        await reading
        await over(live)
    found = explain(read_trace(path))
    worst = max(found.late, key=lambda gap: gap.seconds)
    assert worst.cause == "tokenizer"
    assert "the server turning the text of request 2 into tokens" in Teller(found).sentence(worst)
    assert found.firsts[2].parts["tokenizer"] == pytest.approx(0.12, abs=0.03)


async def test_a_client_that_leaves_ends_its_request_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    async with running(trace=path, step_s=0.02) as live:
        reader, writer = await live.open_stream(prompt="abc", max_tokens=400, itl_ms=None, priority=3)
        for _ in range(3):
            await reader.readuntil(b"data: ")
        writer.close()
        await over(live)
    trace = read_trace(path)
    assert trace.header.cost is None, "no step was foreseen"
    assert trace.ends[1].reason == "abort"
    assert trace.requests[1].priority == 3
    assert trace.ends[1].generated == len(explain(trace).tokens[1]) >= 2


async def test_without_a_trace_the_engine_tells_no_more_than_before() -> None:
    heard = []
    async with running(step_s=0.001) as live:
        dispatch = live.service._dispatch
        live.service._dispatch = lambda message: (heard.append(message.traced), dispatch(message))[1]  # type: ignore
        await live.client.post(TEXT, json={"prompt": "abc", "max_tokens": 5})
    assert heard and not any(heard)


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = tmp_path / "steps.jsonl"
    recorder = TraceRecorder(path, 1 << 20, "fake", EngineInfo(10, 10, 10, 16, 10, 10), time.monotonic, said.append)
    recorder.ended(7, "abort", 1.0)  # before the engine has said how it foresees steps
    recorder.begins(None)

    def full(self: object, line: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TraceWriter, "write", full)
    for _ in range(3):
        recorder.ended(1, "stop", 1.0)
    assert said == [f"the trace ends here: {path} cannot be written: No space left on device"]
    trace: Trace = read_trace(path)
    assert set(trace.ends) == {7}
