"""`TokenStream`: the tokens of one client request, from the event loop's callback to the task that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from legato.engine.wire import LogprobEntry
from legato.errors import LegatoError


class TokenEvent(NamedTuple):
    """A token of one sequence. `finish`: "stop" or "length" if it is the last one."""

    request_id: int
    token_id: int
    logprobs: LogprobEntry | None
    finish: str | None


class TokenStream:
    """Events of the sequences of one client request, in order. Made by `EngineService.open_stream`."""

    __slots__ = ("_abort", "_error", "_events", "_open", "_waiter", "cached_tokens", "prompt_logprobs")

    def __init__(self, abort: Callable[[int, str], None]) -> None:
        self._abort = abort
        self._events: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: LegatoError | None = None
        self._open: set[int] = set()
        self.cached_tokens: dict[int, int] = {}
        """Prompt tokens that were found in the prefix cache, by sequence; none is no entry."""
        self.prompt_logprobs: dict[int, list[LogprobEntry]] = {}
        """Of the tokens of the prompt but the first, by sequence, if asked for: all of them once a token has come."""

    async def take(self) -> list[TokenEvent]:
        """All events since the last call, at least one. Raises what ended the stream: EngineError, RequestError."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    def finish(self, request_id: int, reason: str = "stop") -> None:
        """Ends one sequence early (a stop string): its slot is free before the engine's next step."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort(request_id, reason)

    def close(self) -> None:
        """The client is gone, or served: whatever still runs is aborted. Safe to call twice."""
        for request_id in list(self._open):
            self.finish(request_id, "abort")

    def fail(self, error: LegatoError, request_id: int | None = None) -> None:
        """Makes `take` raise `error` once the events before it are taken. `request_id`: the sequence it ended."""
        if request_id is not None:
            self._open.discard(request_id)
        self._error = error
        self._wake()

    def opened(self, request_id: int) -> None:
        """A sequence was submitted for this stream."""
        self._open.add(request_id)

    def push(self, event: TokenEvent) -> None:
        """A token arrived; runs once a token."""
        if event.finish is not None:
            self._open.discard(event.request_id)
        self._events.append(event)
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
