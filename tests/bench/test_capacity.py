"""The search against a known knee, and probes against a queue computed by hand, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from bench.virtual import run_virtual
from legato.bench.capacity import (
    Limits,
    Plan,
    Probe,
    best_of,
    find_capacity,
    judge,
    run_probe,
    search,
)
from legato.bench.client import Reply
from legato.bench.dialect import Prompt
from legato.bench.load import Prompts
from legato.bench.record import percentile
from legato.errors import NoCapacity, ServerUnreachable
from legato.workload.arrivals import Arrival, poisson_trace
from legato.workload.lengths import Lengths

LIMITS = Limits(ttft_ms=300, itl_ms=50)
PLAN = Plan(LIMITS, Lengths(100), Lengths(5), duration_s=200.0)


class Queue:
    """Reads prompts one after the other, `read_s` each, and then decodes every answer at once, `gap_s` a token."""

    def __init__(self, clock: Callable[[], float], *, read_s: float = 0.1, gap_s: float = 0.01) -> None:
        self._clock, self._read_s, self._gap_s = clock, read_s, gap_s
        self._reading = asyncio.Lock()

    async def complete(self, prompt: Prompt, max_tokens: int, reply: Reply) -> None:
        if reply.sent_s is None:
            reply.sent_s = self._clock()
        async with self._reading:
            await asyncio.sleep(self._read_s if isinstance(prompt, list) else 0.001)
        for number in range(max_tokens):
            if number:
                await asyncio.sleep(self._gap_s)
            reply.arrivals_s.append(self._clock())
            reply.first_s = reply.arrivals_s[0]
        reply.done_s = self._clock()
        reply.completion_tokens = max_tokens


def probed(plan: Plan = PLAN, **queue: float) -> list[Probe]:
    async def main(clock: Callable[[], float]) -> list[Probe]:
        prompts = Prompts(Random(1), range(300, 400))
        return [probe async for probe in find_capacity(Queue(clock, **queue), prompts, plan, clock)]

    return run_virtual(main)


def waits_s(rate: float, plan: Plan, read_s: float) -> list[float]:
    """Times to first token of the same trace in that queue (Lindley's recursion), as far as they can be known."""
    free_s, waits = 0.0, []
    for arrival in poisson_trace(rate, plan.duration_s, plan.prompt, plan.output, plan.seed):
        free_s = max(free_s, arrival.at_s) + read_s
        wait_s = free_s - arrival.at_s
        if free_s < plan.duration_s:
            waits.append(wait_s)
        elif plan.duration_s - arrival.at_s > plan.limits.ttft_ms / 1e3:
            waits.append(plan.duration_s - arrival.at_s)
    return waits


def test_every_probe_is_the_queue_and_the_knee_is_found() -> None:
    probes = probed()
    for probe in probes:
        expected_ms = 1e3 * percentile(waits_s(probe.rate, PLAN, 0.1), 0.99)
        assert probe.ttft is not None and probe.ttft.p99_ms == pytest.approx(expected_ms)
        assert probe.meets == (expected_ms <= LIMITS.ttft_ms)
    best = best_of(probes)
    assert 1 < best.rate < 10
    missed = min(probe.rate for probe in probes if not probe.meets)
    assert best.rate < missed <= 1.08 * best.rate
    assert len(probes) <= 9
    # A few requests, less than 1 in 100 of those judged, may be late.
    assert 0.98 * best.sent / 200 < best.good_requests_per_s <= best.sent / 200
    assert best.good_tokens_per_s == pytest.approx(5 * best.good_requests_per_s, rel=0.03)


def test_gaps_that_are_too_long_leave_no_capacity_and_the_message_says_which_limit() -> None:
    with pytest.raises(NoCapacity, match=r"p99 ITL is 60 ms of 50"):
        best_of(probed(gap_s=0.06))


def test_a_server_faster_than_the_highest_rate_is_not_probed_beyond_it() -> None:
    probes = probed(Plan(LIMITS, Lengths(100), Lengths(5), duration_s=20.0, max_rate=6.0), read_s=0.0001)
    assert [probe.rate for probe in probes] == [1.0, 2.0, 4.0, 6.0]
    assert best_of(probes).rate == 6.0


@pytest.mark.parametrize("knee", [0.3, 0.99, 1.0, 1.7, 5.0, 31.0])
def test_the_search_ends_within_eight_per_cent_of_any_knee(knee: float) -> None:
    async def probe(rate: float) -> Probe:
        return Probe(rate, 9, 9, 0, None, None, rate, rate, None, () if rate <= knee else ("over",))

    async def main() -> list[Probe]:
        return [done async for done in search(probe, max_rate=64, min_rate=0.1)]

    found = best_of(asyncio.run(main())).rate
    assert knee / 1.08 <= found <= knee


def test_the_rate_is_halved_until_it_meets() -> None:
    async def probe(rate: float) -> Probe:
        return Probe(rate, 9, 9, 0, None, None, rate, rate, None, () if rate <= 0.3 else ("over",))

    async def main() -> list[float]:
        return [done.rate async for done in search(probe, max_rate=64, min_rate=0.1, precision=1.5)]

    assert asyncio.run(main()) == [1.0, 0.5, 0.25, pytest.approx(0.125**0.5)]


def test_a_request_that_the_client_sends_late_has_waited_since_it_was_due() -> None:
    """Else a busy client flatters the server: drawing each prompt takes half a second here, reading it 0.1.

    Both are drawn at 1.0 s, and read at 1.1 and 1.2 s: a second after they were due, each.
    """

    class Slow(Prompts):
        def long(self, tokens: int) -> str | list[int]:
            asyncio.get_running_loop().virtual.now_s += 0.5  # type: ignore[attr-defined]
            return super().long(tokens)

    async def main(clock: Callable[[], float]) -> Probe:
        trace = [Arrival(0.1, 10, 1), Arrival(0.2, 10, 1)]
        return await run_probe(Queue(clock), Slow(Random(1), range(300, 400)), trace, 1.0, 5.0, LIMITS, clock)

    ttft = run_virtual(main).ttft
    assert ttft is not None and (ttft.p50_ms, ttft.max_ms) == pytest.approx((1000, 1000))


def test_requests_are_judged_by_what_is_known_of_them() -> None:
    def reply(sent_s: float, *arrivals_s: float, done: bool = True, error: str | None = None) -> Reply:
        made = Reply()
        made.sent_s, made.arrivals_s, made.error = sent_s, list(arrivals_s), error
        made.first_s = arrivals_s[0] if arrivals_s else None
        made.done_s = arrivals_s[-1] if done and arrivals_s else None
        return made

    replies = [
        reply(0.0, 0.1, 0.12, 0.14),  # meets both
        reply(1.0, 1.4, 1.42),  # its first token is late
        reply(2.0, 2.1, 2.3),  # a gap is too long
        reply(9.9, 9.95, 9.97, done=False),  # cut while all was well: not judged
        reply(9.8, done=False),  # cut while it might still have been in time: not judged
        reply(9.0, done=False),  # cut when it was late already
    ]
    probe = judge(replies, 0.6, 0.0, 10.0, LIMITS)
    assert (probe.sent, probe.completed, probe.failed) == (6, 3, 0)
    assert probe.ttft is not None and (probe.ttft.count, probe.ttft.max_ms) == (5, pytest.approx(1000))
    assert probe.itl is not None and (probe.itl.count, probe.itl.max_ms) == (5, pytest.approx(200))
    assert probe.good_requests_per_s == pytest.approx(6 / 10 * 1 / 4)
    assert probe.good_tokens_per_s == pytest.approx((3 + 2) / 10)
    assert [miss.split(" is ")[0] for miss in probe.misses] == ["p99 TTFT", "p99 ITL"]
    failed = judge([*replies[:1], reply(1.0, error="status 503: busy")], 0.6, 0.0, 10.0, LIMITS)
    assert failed.misses == ("1 requests failed (status 503: busy)",)


def test_a_server_that_goes_on_for_clients_that_left_is_waited_for_and_then_given_up() -> None:
    class Stubborn(Queue):
        """Reads on whatever became of the client."""

        async def complete(self, prompt: Prompt, max_tokens: int, reply: Reply) -> None:
            if isinstance(prompt, list):
                self.stuck = True
                await asyncio.sleep(0.2)
            elif getattr(self, "stuck", False):
                reply.sent_s = self._clock()
                await asyncio.sleep(5)
            await super().complete(prompt, max_tokens, reply)

    async def main(clock: Callable[[], float]) -> list[Probe]:
        prompts = Prompts(Random(1), range(300, 400))
        return [probe async for probe in find_capacity(Stubborn(clock), prompts, PLAN, clock)]

    with pytest.raises(ServerUnreachable, match="does the server go on for clients that left"):
        run_virtual(main)
