"""The highest rate of requests at which both limits hold: p99 of the time to first token, p99 of the gaps after it.

An open loop: requests arrive as a Poisson process does, whatever the server makes of it. The rate is doubled until a
limit is missed, then the interval is halved.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from legato.bench.client import Clock, Reply
from legato.bench.dialect import Answers
from legato.bench.load import Prompts
from legato.bench.record import Spread, gaps_of, percentile, spread, tokens_per_chunk
from legato.errors import NoCapacity, ServerUnreachable
from legato.workload.arrivals import Arrival, poisson_trace
from legato.workload.lengths import Lengths

PRECISION = 1.08
FIRST_RATE = 1.0
# Of fewer requests than this a percentile says nothing.
MIN_REQUESTS = 4
IDLE_LIMIT_S = 120.0
_IDLE_FACTOR, _IDLE_FLOOR_S, _IDLE_PAUSE_S = 2.0, 0.05, 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """What p99 must not exceed."""

    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent, and what is asked of it."""

    limits: Limits
    prompt: Lengths
    output: Lengths
    duration_s: float = 30.0
    max_rate: float = 64.0
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "ttft_ms": self.limits.ttft_ms,
            "itl_ms": self.limits.itl_ms,
            "prompt_tokens": str(self.prompt),
            "output_tokens": str(self.output),
            "duration_s": self.duration_s,
            "max_rate": self.max_rate,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rate came to. `misses`: what was not met, in words; empty if all was.

    `good_requests_per_s`: arrivals a second, times the share of those judged that met both limits, each its own p99 of
    gaps. `good_tokens_per_s`: tokens of requests that met them, as far as they came.
    """

    rate: float
    sent: int
    completed: int
    failed: int
    ttft: Spread | None
    itl: Spread | None
    good_requests_per_s: float
    good_tokens_per_s: float
    tokens_per_chunk: float | None
    misses: tuple[str, ...]

    @property
    def meets(self) -> bool:
        """Whether both limits hold and nothing failed."""
        return not self.misses

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; durations in milliseconds."""
        return {
            "rate": round(self.rate, 4),
            "meets": self.meets,
            "misses": list(self.misses),
            "sent": self.sent,
            "completed": self.completed,
            "failed": self.failed,
            "ttft_ms": None if self.ttft is None else self.ttft.to_dict(),
            "itl_ms": None if self.itl is None else self.itl.to_dict(),
            "good_requests_per_s": round(self.good_requests_per_s, 3),
            "good_tokens_per_s": round(self.good_tokens_per_s, 1),
            "tokens_per_chunk": None if self.tokens_per_chunk is None else round(self.tokens_per_chunk, 4),
        }


async def find_capacity(server: Answers, prompts: Prompts, plan: Plan, clock: Clock) -> AsyncIterator[Probe]:
    """The probes, each of an idle server. Raises ServerUnreachable if it does not become idle in between."""
    idle_s = min([await tiny_answer_s(server, prompts) for _ in range(3)])

    async def probe(rate: float) -> Probe:
        await until_idle(server, prompts, idle_s, clock)
        trace = poisson_trace(rate, plan.duration_s, plan.prompt, plan.output, plan.seed)
        return await run_probe(server, prompts, trace, rate, plan.duration_s, plan.limits, clock)

    async for done in search(probe, max_rate=plan.max_rate, min_rate=MIN_REQUESTS / plan.duration_s):
        yield done


async def search(
    probe: Callable[[float], Awaitable[Probe]], *, max_rate: float, min_rate: float, precision: float = PRECISION
) -> AsyncIterator[Probe]:
    """Probes, one after the other, until the highest rate that meets is known to a factor of `precision`.

    It is that of the last probe that meets with the highest rate; none does if even `min_rate` misses. Probes: about 8.
    """
    rate, low, high = min(max(FIRST_RATE, min_rate), max_rate), 0.0, math.inf
    while min_rate <= rate <= max_rate and high > precision * low:
        done = await probe(rate)
        yield done
        if done.meets:
            low = rate
        else:
            high = rate
        if low >= max_rate or high <= min_rate:
            return
        if high == math.inf:
            rate = min(2 * low, max_rate)
        elif low == 0:
            rate = max(high / 2, min_rate)
        else:
            rate = math.sqrt(low * high)


async def run_probe(
    server: Answers,
    prompts: Prompts,
    trace: Sequence[Arrival],
    rate: float,
    duration_s: float,
    limits: Limits,
    clock: Clock,
) -> Probe:
    """Sends the trace, cuts what is still open after `duration_s`, and judges."""
    replies: list[Reply] = []
    tasks = []
    start_s = clock()
    try:
        for arrival in trace:
            prompt = prompts.long(arrival.prompt_tokens)
            await asyncio.sleep(start_s + arrival.at_s - clock())
            reply = Reply()
            reply.sent_s = start_s + arrival.at_s
            replies.append(reply)
            tasks.append(asyncio.create_task(server.complete(prompt, arrival.output_tokens, reply)))
        await asyncio.sleep(start_s + duration_s - clock())
        cut_s = clock()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return judge(replies, rate, start_s, cut_s, limits)


def judge(replies: Sequence[Reply], rate: float, start_s: float, cut_s: float, limits: Limits) -> Probe:
    """Figures of one probe. A wait that was cut counts if it was over the limit already, else it tells nothing."""
    ttfts = [wait for reply in replies if (wait := _waited_s(reply, cut_s, limits.ttft_ms)) is not None]
    gaps = gaps_of(replies, start_s, cut_s, cut_s, limits.itl_ms / 1e3)
    ttft, itl = spread(ttfts), spread(gaps.length_s)
    failed = [reply for reply in replies if reply.error is not None]
    verdicts = [_verdict(reply, cut_s, limits) for reply in replies]
    judged = len(verdicts) - verdicts.count(None)
    per_chunk = tokens_per_chunk(replies)
    good = sum(len(r.arrivals_s) for r, verdict in zip(replies, verdicts, strict=True) if verdict is not False)
    elapsed_s = cut_s - start_s
    return Probe(
        rate=rate,
        sent=len(replies),
        completed=sum(reply.done_s is not None and reply.error is None for reply in replies),
        failed=len(failed),
        ttft=ttft,
        itl=itl,
        good_requests_per_s=len(replies) / elapsed_s * verdicts.count(True) / max(1, judged),
        good_tokens_per_s=good * (per_chunk or 1.0) / elapsed_s,
        tokens_per_chunk=per_chunk,
        misses=tuple(_misses(failed, ttft, itl, limits)),
    )


async def tiny_answer_s(server: Answers, prompts: Prompts) -> float:
    """How long a request of one token takes. Raises ServerUnreachable if it fails."""
    reply = Reply()
    try:
        async with asyncio.timeout(IDLE_LIMIT_S):
            await server.complete(prompts.short(), 1, reply)
    except TimeoutError:
        reply.error = f"no answer in {IDLE_LIMIT_S:.0f} s"
    if reply.error is not None or reply.ttft_s is None:
        raise ServerUnreachable(f"a request of one token failed: {reply.error}; see the server's log")
    return reply.ttft_s


async def until_idle(server: Answers, prompts: Prompts, idle_s: float, clock: Clock) -> None:
    """Returns when tiny requests are answered about as quickly as by the idle server (`idle_s`), twice in a row."""
    limit_s, quick = clock() + IDLE_LIMIT_S, 0
    while quick < 2:
        took_s = await tiny_answer_s(server, prompts)
        quick = quick + 1 if took_s <= _IDLE_FACTOR * idle_s + _IDLE_FLOOR_S else 0
        if clock() > limit_s:
            raise ServerUnreachable(
                f"{IDLE_LIMIT_S:.0f} s after all connections were closed a request of one token still takes"
                f" {1e3 * took_s:.0f} ms, and {1e3 * idle_s:.0f} before; does the server go on for clients that left?"
            )
        await asyncio.sleep(_IDLE_PAUSE_S)


def best_of(probes: Sequence[Probe]) -> Probe:
    """The probe of the highest rate that meets. Raises NoCapacity if none does."""
    good = [probe for probe in probes if probe.meets]
    if good:
        return max(good, key=lambda probe: probe.rate)
    lowest = min(probes, key=lambda probe: probe.rate)
    raise NoCapacity(
        f"even {lowest.rate:.3g} requests/s miss: {'; '.join(lowest.misses)};"
        f" loosen the limit, shorten the requests, or raise --duration to try lower rates"
    )


def _waited_s(reply: Reply, cut_s: float, limit_ms: float) -> float | None:
    if reply.ttft_s is not None or reply.error is not None:
        return reply.ttft_s
    assert reply.sent_s is not None
    return cut_s - reply.sent_s if cut_s - reply.sent_s > limit_ms / 1e3 else None


def _verdict(reply: Reply, cut_s: float, limits: Limits) -> bool | None:
    """Whether this request met both limits; None if it was cut before that was decided."""
    wait_s = _waited_s(reply, cut_s, limits.ttft_ms)
    if reply.error is not None or (wait_s is not None and wait_s > limits.ttft_ms / 1e3):
        return False
    gaps = gaps_of([reply], -math.inf, math.inf, cut_s, limits.itl_ms / 1e3).length_s
    if gaps and percentile(gaps, 0.99) > limits.itl_ms / 1e3:
        return False
    return None if reply.done_s is None else True


def _misses(failed: Sequence[Reply], ttft: Spread | None, itl: Spread | None, limits: Limits) -> list[str]:
    found = []
    if failed:
        found.append(f"{len(failed)} requests failed ({failed[0].error})")
    if ttft is None and not failed:
        found.append("no request was answered in time to be judged")
    if ttft is not None and ttft.p99_ms > limits.ttft_ms:
        found.append(f"p99 TTFT is {ttft.p99_ms:,.0f} ms of {limits.ttft_ms:g}")
    if itl is not None and itl.p99_ms > limits.itl_ms:
        found.append(f"p99 ITL is {itl.p99_ms:,.0f} ms of {limits.itl_ms:g}")
    return found
