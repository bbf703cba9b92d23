"""A trace, sent to a server as it was recorded: every request at its time, whatever became of the ones before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from legato.bench.client import Clock, Reply
from legato.bench.dialect import Answers
from legato.bench.load import Prompts
from legato.bench.record import gaps_of, percentile, tokens_per_chunk
from legato.errors import RunInvalid
from legato.workload.arrivals import Arrival

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was sent, and what came back."""

    arrivals: Sequence[Arrival]
    replies: Sequence[Reply]
    start_s: float
    cut_s: float


async def replay(
    server: Answers,
    prompts: Prompts,
    arrivals: Iterable[Arrival],
    clock: Clock,
    *,
    patience_s: float = 120.0,
    seen: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Sends every request at its time, and waits until all are answered, for `patience_s` after the last at most.

    Prompts are random, but for the texts that they share. `seen` is told how many were sent. Cancelled, it ends with
    what there is.
    """
    sent: list[Arrival] = []
    replies: list[Reply] = []
    tasks: list[asyncio.Task[None]] = []
    start_s = clock()
    try:
        for number, arrival in enumerate(arrivals, 1):
            prompt = prompts.composed(arrival.shared, arrival.prompt_tokens)
            await asyncio.sleep(start_s + arrival.at_s - clock())
            reply = Reply()
            reply.sent_s = start_s + arrival.at_s
            sent.append(arrival)
            replies.append(reply)
            tasks.append(asyncio.create_task(server.complete(prompt, arrival.output_tokens, reply)))
            seen(number)
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)
    except asyncio.CancelledError:
        pass  # Ctrl-C: what was measured counts
    cut_s = clock()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Replayed(sent, replies, start_s, cut_s)


def figures(run: Replayed) -> dict[str, Any]:
    """As `legato simulate --json` has them, of what clients saw. Raises RunInvalid if hardly anything was answered."""
    done = [reply for reply in run.replies if reply.done_s is not None and reply.error is None]
    failed = [reply.error for reply in run.replies if reply.error is not None]
    if len(done) < _FEWEST:
        reason = f", one with '{failed[0]}'" if failed else ""
        raise RunInvalid([f"{len(done)} of {len(run.replies)} requests were answered{reason}; see the server's log"])
    ttfts = [reply.ttft_s for reply in run.replies if reply.ttft_s is not None]
    gaps = gaps_of(run.replies, -math.inf, math.inf, run.cut_s, math.inf).length_s
    tpots = [
        (reply.arrivals_s[-1] - reply.arrivals_s[0]) / (len(reply.arrivals_s) - 1)
        for reply in done
        if len(reply.arrivals_s) > 1
    ]
    e2e = [reply.done_s - reply.sent_s for reply in done if reply.done_s is not None and reply.sent_s is not None]
    chunks = sum(len(reply.arrivals_s) for reply in run.replies)
    per_chunk = tokens_per_chunk(run.replies)
    last_s = max(reply.done_s or 0.0 for reply in done)
    seconds = last_s - run.start_s - run.arrivals[0].at_s
    return {
        "requests": {
            "arrived": len(run.replies),
            "completed": len(done),
            "unfinished": len(run.replies) - len(done) - len(failed),
            "failed": len(failed),
        },
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 4),
        "ttft_ms": spread(ttfts),
        "itl_ms": spread(gaps),
        "tpot_ms": spread(tpots),
        "e2e_ms": spread(e2e),
        "output_tokens_per_s": round(chunks * (per_chunk or 1.0) / seconds, 2),
        "tokens_per_chunk": None if per_chunk is None else round(per_chunk, 4),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, quantiles and largest, in milliseconds; None of none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {name: round(1000 * percentile(ordered, share), 3) for name, share in QUANTILES}
    return {"mean": round(1000 * sum(ordered) / len(ordered), 3), **found}
