"""A small OpenAI server over a real socket: tokens every `gap_s`, a long prompt for `s_per_token` a token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """What it takes and how it answers. `raw`: sent as it is, instead of an answer. `piece`: bytes a write."""

    gap_s: float = 0.005
    s_per_token: float = 0.0
    refuses: tuple[str, ...] = ()
    takes_ids: bool = True
    counts_ids: bool = True
    tokens_per_word: float = 1.0
    raw: bytes | None = None
    piece: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    open: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._answer(reader, writer)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
        finally:
            self.open.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        body = json.loads(await reader.readexactly(int(lengths[0].split(":")[1]))) if lengths else {}
        self.asked.append({"path": path, "head": head, **body})
        if self.raw is not None:
            size = self.piece or len(self.raw)
            for at in range(0, len(self.raw), size):
                writer.write(self.raw[at : at + size])
                await writer.drain()
                await asyncio.sleep(0.0002)
            return
        if path == "/v1/models":
            writer.write(document({"data": [{"id": "fake"}]}))
            return
        refused = next((name for name in self.refuses if name in (path.rsplit("/", 1)[-1], *body)), None)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if refused is not None or (isinstance(prompt, list) and not self.takes_ids):
            writer.write(document({"error": {"message": f"no {refused} here"}}, "400 Bad Request"))
            return
        count = len(prompt) if isinstance(prompt, list) else 2 + round(self.tokens_per_word * len(prompt.split()))
        if isinstance(prompt, list) and not self.counts_ids:
            count = 1
        usage = {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}
        await asyncio.sleep(self.s_per_token * count)
        if not body["stream"]:
            writer.write(document({"choices": [{"text": "a"}], "usage": usage}))
            return
        writer.write(STREAM_HEAD)
        for number in range(body["max_tokens"]):
            if number:
                await asyncio.sleep(self.gap_s)
            text = {"delta": {"content": "a"}} if "messages" in body else {"text": "a"}
            writer.write(chunked(event({"choices": [text]})))
            await writer.drain()
        if "stream_options" in body:
            writer.write(chunked(event({"choices": [], "usage": usage})))
        writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def document(payload: dict[str, Any], status: str = "200 OK") -> bytes:
    content = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@contextlib.asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    """Listening in this loop."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await asyncio.sleep(0.01)  # those that were accepted are served
        for task in tuple(server.open):
            task.cancel()
        await asyncio.gather(*server.open, return_exceptions=True)
        await listener.wait_closed()


@contextlib.contextmanager
def serving_apart(server: FakeServer) -> Iterator[FakeServer]:
    """Listening in a thread of its own."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(server):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
