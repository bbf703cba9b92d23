"""Recorded arrivals, sent once more."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from bench.virtual import run_virtual
from legato.bench.client import Clock, Reply
from legato.bench.dialect import Prompt
from legato.bench.load import Prompts
from legato.bench.replay import Replayed, figures, replay
from legato.errors import RunInvalid
from legato.workload.arrivals import Arrival

TRACE = [Arrival(0.5 * n, 20, 3) for n in range(6)]


class Slow:
    """Answers the first token after 1 s, each further one 0.1 s later. `fails`: none at all."""

    def __init__(self, clock: Clock, *, fails: bool = False) -> None:
        self._clock = clock
        self._fails = fails

    async def complete(self, prompt: Prompt, max_tokens: int, reply: Reply) -> None:
        await asyncio.sleep(1.0)
        if self._fails:
            reply.error = "status 500"
            return
        for number in range(max_tokens):
            await asyncio.sleep(0.1 if number else 0.0)
            reply.arrivals_s.append(self._clock())
            reply.first_s = reply.first_s or self._clock()
        reply.completion_tokens = max_tokens
        reply.done_s = self._clock()


def test_figures_are_of_what_clients_saw() -> None:
    async def main(clock: Clock) -> Replayed:
        return await replay(Slow(clock), Prompts(Random(1), range(300, 400)), TRACE, clock)

    found = figures(run_virtual(main))
    assert found["requests"] == {"arrived": 6, "completed": 6, "unfinished": 0, "failed": 0}
    assert found["ttft_ms"]["p50"] == pytest.approx(1000) and found["itl_ms"]["max"] == pytest.approx(100)
    assert found["e2e_ms"]["p99"] == pytest.approx(1200) and found["seconds"] == pytest.approx(3.7)
    assert found["output_tokens_per_s"] == pytest.approx(18 / 3.7, rel=0.01)


def test_ctrl_c_keeps_what_was_seen() -> None:
    async def main(clock: Clock) -> Replayed:
        prompts = Prompts(Random(1), range(300, 400))
        task = asyncio.ensure_future(replay(Slow(clock), prompts, TRACE, clock))
        await asyncio.sleep(2.1)
        task.cancel()
        return await task

    found = figures(run_virtual(main))
    assert found["requests"] == {"arrived": 5, "completed": 2, "unfinished": 3, "failed": 0}


def test_a_server_that_answers_nothing_shows_nothing() -> None:
    async def main(clock: Clock) -> Replayed:
        return await replay(Slow(clock, fails=True), Prompts(Random(1), range(300, 400)), TRACE, clock)

    with pytest.raises(RunInvalid, match="0 of 6 requests were answered, one with 'status 500'"):
        figures(run_virtual(main))
