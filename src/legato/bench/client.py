"""An HTTP/1.1 client for one thing: a streamed answer, stamped as it comes off the socket.

A stamp is taken once a read, before anything is parsed. 64 streams of 50 tokens a second take 8 % of a core, and 27 %
with httpx (23 and 86 µs a chunk, measured on the same two cores): a local server computes on those.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from legato.errors import ConfigError, ServerUnreachable

Clock = Callable[[], float]
"""Seconds since any fixed moment."""


NO_TOKEN = "the answer ended without a token"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. `root`: the path above `/models` and `/completions`, usually `/v1`."""

    host: str
    port: int
    secure: bool
    root: str

    @classmethod
    def of(cls, url: str) -> Address:
        """The address in `http://host:port` or `https://host/some/v1`. Raises ConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise ConfigError(f"--url is '{url}'; it should look like http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/")
        root = path if path.endswith("/v1") else path + "/v1"
        return cls(parts.hostname, port or (443 if secure else 80), secure, root)

    @property
    def is_local(self) -> bool:
        """Whether the server shares this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


class Reply:
    """One streamed answer as the client saw it. Filled while it comes, so that one that is cut can be read too.

    `arrivals_s`: one a chunk with text. `first_s`: the first chunk that carries a token; of an answer of one token that
    has no text, the one with its finish reason. Counts are None unless the server tells them. Times: client's clock.
    `sent_s` may be set before: a request that had to wait at the client counts from when it was due.
    """

    __slots__ = (
        "arrivals_s",
        "cached_tokens",
        "completion_tokens",
        "done_s",
        "error",
        "first_s",
        "prompt_tokens",
        "sent_s",
    )

    def __init__(self) -> None:
        self.sent_s: float | None = None
        self.first_s: float | None = None
        self.done_s: float | None = None
        self.arrivals_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return None if self.first_s is None or self.sent_s is None else self.first_s - self.sent_s

    def absorb(self, event: bytes, now_s: float) -> None:
        """Takes in the payload of one server-sent event."""
        if event == b"[DONE]":
            return
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as error:
            self.error = f"an event of the stream is not understood ({error}): {event[:120].decode('utf-8', 'replace')}"
            return
        if chunk.error is not None:
            self.error = f"the stream ended with an error: {_said(event)}"
        for choice in chunk.choices:
            text = choice.text or (choice.delta and choice.delta.any_text)
            if text:
                self.arrivals_s.append(now_s)
            if self.first_s is None and (text or choice.finish_reason):
                self.first_s = now_s
        usage = chunk.usage
        if usage is not None:
            self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            details = usage.prompt_tokens_details
            self.cached_tokens = None if details is None else details.cached_tokens


class Client:
    """Sends requests to one server, each on a connection of its own: a server's limit on connections is not ours."""

    def __init__(self, address: Address, clock: Clock, *, api_key: str = "") -> None:
        self.address = address
        self._clock = clock
        self._api_key = api_key
        self._place = (address.host, address.port)
        self._ssl = ssl.create_default_context() if address.secure else None

    async def connect(self) -> None:
        """Finds out which of the host's addresses answers; later connections ask no resolver. ServerUnreachable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(10):
                transport, _ = await loop.create_connection(asyncio.Protocol, self.address.host, self.address.port)
        except OSError as error:
            raise ServerUnreachable(
                f"nothing answers at {self.address} ({_reason(error)}); start a server there with `legato serve`,"
                f" or say with --url where it is"
            ) from error
        self._place = transport.get_extra_info("peername")[:2]
        transport.close()

    async def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and content of `path` under the root: of a POST if there is a body, else of a GET. Raises OSError."""
        exchange = await self._exchange(path, body, lambda event, now_s: None)
        return exchange.status, b"".join(exchange.content)

    async def stream(self, path: str, body: Mapping[str, Any], reply: Reply) -> None:
        """Fills `reply` until the answer is over. What goes wrong is in `reply.error`. Cancelling cuts it."""
        if reply.sent_s is None:
            reply.sent_s = self._clock()
        try:
            exchange = await self._exchange(path, body, reply.absorb)
        except (OSError, httptools.HttpParserError) as error:
            reply.error = _reason(error)
            return
        reply.done_s = self._clock()
        content = b"".join(exchange.content)
        if exchange.status != 200:
            reply.error = f"status {exchange.status}: {_said(content)}"
        elif content:
            reply.error = "the answer is not streamed, though it was asked to be"
        elif reply.first_s is None and reply.error is None:
            reply.error = NO_TOKEN

    async def _exchange(
        self, path: str, body: Mapping[str, Any] | None, on_event: Callable[[bytes, float], None]
    ) -> _Exchange:
        loop = asyncio.get_running_loop()
        request = self._request(path, body)
        host = self.address.host if self.address.secure else None
        transport, exchange = await loop.create_connection(
            lambda: _Exchange(request, on_event, self._clock, loop.create_future()),
            *self._place,
            ssl=self._ssl,
            server_hostname=host,
        )
        try:
            await exchange.done
        finally:
            transport.abort()
        return exchange

    def _request(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        address = self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            f"{'GET' if body is None else 'POST'} {address.root}{path} HTTP/1.1",
            f"Host: {host}:{address.port}",
            "User-Agent: legato-bench",
            "Connection: close",
        ]
        if self._api_key:
            lines.append(f"Authorization: Bearer {self._api_key}")
        content = b"" if body is None else msgspec.json.encode(body)
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        return "\r\n".join([*lines, "", ""]).encode() + content


class _Exchange(asyncio.Protocol):
    """One request and its answer. Events of a stream go to `on_event` with their stamp; any other body to `content`."""

    def __init__(
        self, request: bytes, on_event: Callable[[bytes, float], None], clock: Clock, done: asyncio.Future[None]
    ) -> None:
        self.status = 0
        self.content: list[bytes] = []
        self.done = done
        self._request = request
        self._on_event = on_event
        self._clock = clock
        self._now_s = 0.0
        self._rest = b""
        self._is_stream = False
        self._has_length = False
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        # A body of unstated length ends with the connection.
        if exc is None and self.status and not self._has_length:
            self._end(None)
        else:
            self._end(exc or ConnectionError("the server closed the connection before the answer was complete"))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._is_stream or self.status != 200:
            self.content.append(body)
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), self._now_s)

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def any_text(self) -> str | None:
        """Text of the answer, or of the thoughts before it: both are tokens."""
        return self.content or self.reasoning_content or self.reasoning


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def _said(content: bytes) -> str:
    """The message in an error's JSON, in any of the usual places; else its beginning."""
    try:
        document = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        document = None
    inner = document.get("error", document) if isinstance(document, dict) else None
    for found in (inner.get("message"), inner.get("detail")) if isinstance(inner, dict) else (inner,):
        if isinstance(found, str):
            return found
    return content[:200].decode("utf-8", "replace").strip() or "no reason given"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in 10 s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
