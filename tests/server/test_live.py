"""A listening server: clients that leave, engines that die, signals. The engine's answers are made up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from legato.engine.service import EngineService
from legato.errors import ConfigError
from legato.server.app import build_app
from legato.server.recorder import TraceRecorder
from legato.server.run import HttpServer, listen
from server.fake_engine import factory
from server.fake_model import fake_model

TEXT = "/v1/completions"


class Live:
    """A server on a port of its own, and a client of it."""

    def __init__(self, service: EngineService, server: HttpServer, client: httpx.AsyncClient, port: int) -> None:
        self.service, self.server, self.client, self.port = service, server, client, port
        self.writers: list[asyncio.StreamWriter] = []

    async def value(self, name: str) -> float:
        page = (await self.client.get("/metrics")).text
        return next(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))

    async def open_stream(self, path: str = TEXT, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        content = json.dumps({"stream": True, **body}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        )
        writer.write(head.encode() + b"\r\n" + content)
        await writer.drain()
        return reader, writer


@contextlib.asynccontextmanager
async def running(*, trace: Path | None = None, **options: Any) -> AsyncIterator[Live]:
    service = EngineService(factory(**options))
    await service.start()
    recorder = None
    if trace is not None:
        recorder = TraceRecorder(trace, 1 << 20, "fake", service.info, service.now_s, print)
        service.record_to(recorder)
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = HttpServer(build_app(service, fake_model()), sock, lambda: service.end_streams("cut"))
    task = asyncio.create_task(server.serve())
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            live = Live(service, server, client, port)
            yield live
            for writer in live.writers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
    finally:
        server.stop()
        server.stop()
        await task
        await service.stop()
        if recorder is not None:
            recorder.close()


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> float:
    start = time.monotonic()
    while not await condition():
        assert time.monotonic() - start < timeout_s, "the condition was not met in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


async def test_a_client_that_leaves_while_reading_frees_its_slot_within_one_step() -> None:
    async with running(max_seqs=1, step_s=0.1) as live:
        reader, writer = await live.open_stream(prompt="abc", max_tokens=400)
        await reader.readuntil(b"data: ")
        assert await live.value("vllm:num_requests_running") == 1
        writer.close()

        async def free() -> bool:
            return await live.value("vllm:num_requests_running") == 0

        # The step under way ends, the next one reports: two steps of 0.1 s, plus the polling.
        assert await until(free) < 0.35
        assert await live.value("legato_kv_free_blocks") == await live.value("legato_kv_blocks")
        assert live.service.metrics.finished["abort"] == 1


async def test_a_client_that_leaves_while_waiting_is_taken_out_of_the_queue() -> None:
    async with running(max_seqs=1, step_s=0.02) as live:
        reader, writer = await live.open_stream(prompt="abc", max_tokens=400)
        await reader.readuntil(b"data: ")
        waiting = [await live.open_stream(prompt="x", stream=stream) for stream in (True, False)]

        async def queued(count: int) -> bool:
            return await live.value("vllm:num_requests_waiting") == count

        await until(lambda: queued(2))
        for _, other in waiting:
            other.close()
        await until(lambda: queued(0))
        assert await live.value("vllm:num_requests_running") == 1
        writer.close()


async def test_a_client_that_leaves_in_the_middle_of_its_body_disturbs_nobody() -> None:
    async with running() as live:
        _, writer = await asyncio.open_connection("127.0.0.1", live.port)
        live.writers.append(writer)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        await writer.drain()
        writer.close()
        answer = await live.client.post(TEXT, json={"prompt": "ab", "max_tokens": 2})
        assert answer.json()["choices"][0]["text"] == "ab"


async def test_when_the_engine_dies_every_client_hears_of_it_and_health_is_503() -> None:
    async with running(step_s=0.02) as live:
        reader, _ = await live.open_stream(prompt="abc", max_tokens=400)
        await reader.readuntil(b"data: ")
        whole = asyncio.create_task(live.client.post(TEXT, json={"prompt": "abc", "max_tokens": 400}))
        await asyncio.sleep(0.1)
        assert (await live.client.get("/health")).status_code == 200
        os.kill(live.service.pid or 0, signal.SIGKILL)
        rest = (await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)).decode()
        assert '"error"' in rest
        assert "SIGKILL" in rest
        assert (await whole).status_code == 503
        health = await live.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "engine gone")
        refused = await live.client.post(TEXT, json={"prompt": "abc"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert await live.value("legato_engine_up") == 0


async def test_stopping_lets_answers_finish_and_stopping_again_cuts_them_with_a_reason() -> None:
    async with running(step_s=0.02) as live:
        short, _ = await live.open_stream(prompt="abc", max_tokens=20)
        long, _ = await live.open_stream(prompt="abc", max_tokens=400)
        for reader in (short, long):
            await reader.readuntil(b"data: ")
        live.server.stop()
        finished = (await asyncio.wait_for(short.readuntil(b"[DONE]"), 5)).decode()
        assert '"finish_reason":"length"' in finished
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", live.port)
        live.server.stop()
        rest = (await asyncio.wait_for(long.readuntil(b"[DONE]"), 5)).decode()
        assert '"error":{"message":"cut"' in rest


async def test_a_long_text_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow tokenizer (here: one that sleeps) does not stall another client's answer."""
    import server.fake_model as fakes

    def slow(text: str) -> list[int]:
        time.sleep(0.5 if len(text) > 4000 else 0.0)
        return list(text.encode())[:100]

    monkeypatch.setattr(fakes, "encode", slow)
    async with running() as live:
        long = asyncio.create_task(live.client.post(TEXT, json={"prompt": "x" * 5000, "max_tokens": 1}))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        assert (await live.client.get("/health")).status_code == 200
        await live.client.post(TEXT, json={"prompt": "ab", "max_tokens": 2})
        assert time.monotonic() - start < 0.3
        assert (await long).status_code == 200


async def test_thirty_two_streams_at_once_are_complete() -> None:
    async with running(max_seqs=32, blocks=256) as live:

        async def one(i: int) -> str:
            body = {"prompt": f"<{i}>", "max_tokens": 64, "stream": True}
            response = await live.client.post(TEXT, json=body)
            events = [json.loads(e[6:]) for e in response.text.split("\n\n") if e.startswith("data: {")]
            return "".join(event["choices"][0]["text"] for event in events)

        texts = await asyncio.gather(*(one(i) for i in range(32)))
        assert texts == [(f"<{i}>" * 64)[:64] for i in range(32)]
        assert await live.value("vllm:num_requests_running") == 0


def test_a_taken_port_is_told_at_once_with_its_number() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is taken.*--port"):
            listen("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_told() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 8123)
    with pytest.raises(ConfigError, match="not an address"):
        listen("no.such.host.invalid", 8123)
