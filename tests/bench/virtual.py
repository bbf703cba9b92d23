"""An event loop whose clock jumps to the next timer, and a server in that time whose steps one can count by hand."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from legato.bench.client import Reply
from legato.bench.dialect import Prompt

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the time that would pass has passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for somebody else"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now_s


def run_virtual(main: Callable[[Callable[[], float]], Coroutine[Any, Any, _T]]) -> _T:
    """What `main(clock)` returns, at once, however long it sleeps."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        return runner.run(main(loop.time))


class SteppingServer:
    """Decodes every open stream once a step of `decode_s`. A step with a piece of a long prompt takes `chunk_s`.

    Prompts of token ids are long and read in pieces of `chunk`, in one each if it is None (a step then takes `chunk_s`
    for every 500 tokens). `exclusive`: long prompts wait until no stream is open, and streams until none waits.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        decode_s: float = 0.05,
        chunk_s: float = 0.08,
        chunk: int | None = 500,
        exclusive: bool = False,
        max_open: int | None = None,
        fails_after_s: float | None = None,
        tokens_per_chunk: int = 1,
        cached: int = 0,
    ) -> None:
        self._clock = clock
        self._decode_s, self._chunk_s, self._chunk = decode_s, chunk_s, chunk
        self._exclusive = exclusive
        self._max_open = max_open
        self._fails_after_s = fails_after_s
        self._tokens_per_chunk = tokens_per_chunk
        self._cached = cached
        self._open: list[tuple[Reply, int, asyncio.Future[None]]] = []
        self._waiting: list[tuple[Reply, int, asyncio.Future[None]]] = []
        self._long: list[tuple[Reply, int, asyncio.Future[None]]] = []

    async def complete(self, prompt: Prompt, max_tokens: int, reply: Reply) -> None:
        if reply.sent_s is None:
            reply.sent_s = self._clock()
        if self._fails_after_s is not None and self._clock() > self._fails_after_s:
            reply.error = "status 500: out of luck"
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        is_long = isinstance(prompt, list)
        queue = self._long if is_long else self._waiting
        entry = (reply, len(prompt) if is_long else max_tokens, done)
        queue.append(entry)
        try:
            await done
        finally:
            for place in (self._open, self._waiting, self._long):
                if entry in place:
                    place.remove(entry)
        reply.done_s = self._clock()
        reply.prompt_tokens = len(prompt) if is_long else 12
        reply.cached_tokens = self._cached
        reply.completion_tokens = len(reply.arrivals_s) * self._tokens_per_chunk

    async def run(self) -> None:
        """Steps for ever."""
        read = 0
        while True:
            if not (self._exclusive and self._long):
                self._open, self._waiting = self._open + self._waiting, []
            decoding = self._open[: self._max_open]
            long = self._long[0] if self._long and not (self._exclusive and self._open) else None
            step_s = self._decode_s
            if long is not None:
                piece = min(self._chunk or long[1], long[1] - read)
                step_s = self._chunk_s * (1.0 if self._chunk else piece / 500)
                read += piece
            await asyncio.sleep(step_s)
            for reply, max_tokens, done in decoding:
                _emit(reply, self._clock())
                if len(reply.arrivals_s) * self._tokens_per_chunk >= max_tokens and not done.done():
                    done.set_result(None)
            if long is not None and read >= long[1]:
                _emit(long[0], self._clock())
                if not long[2].done():
                    long[2].set_result(None)
                read = 0
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def _emit(reply: Reply, now_s: float) -> None:
    reply.arrivals_s.append(now_s)
    reply.first_s = now_s if reply.first_s is None else reply.first_s
