"""From the stamps of tokens to figures."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from legato.bench.client import Reply


@dataclass(frozen=True, slots=True)
class Spread:
    """Some durations in milliseconds: median, 99th percentile, longest, and how many."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    count: int

    def to_dict(self) -> dict[str, float]:
        """As JSON has it, to a tenth of a millisecond."""
        return {
            "p50": round(self.p50_ms, 1),
            "p99": round(self.p99_ms, 1),
            "max": round(self.max_ms, 1),
            "count": self.count,
        }


class Gaps:
    """Waits for the next token, in columns: when each began, and how long it was, in seconds."""

    __slots__ = ("begin_s", "length_s")

    def __init__(self) -> None:
        self.begin_s: list[float] = []
        self.length_s: list[float] = []

    def add(self, begin_s: float, length_s: float) -> None:
        """One more."""
        self.begin_s.append(begin_s)
        self.length_s.append(length_s)

    def over(self, limit_s: float) -> int:
        """How many are longer than `limit_s`."""
        return sum(length > limit_s for length in self.length_s)

    def split(self, spans: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """Lengths of the gaps that share a moment with one of the spans, and of the others."""
        merged = _merged(spans)
        ends = [end for _, end in merged]
        beside: list[float] = []
        apart: list[float] = []
        for begin_s, length_s in zip(self.begin_s, self.length_s, strict=True):
            at = bisect_left(ends, begin_s)
            touches = at < len(merged) and merged[at][0] <= begin_s + length_s
            (beside if touches else apart).append(length_s)
        return beside, apart


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed (nearest rank): one that was observed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(lengths_s: Sequence[float]) -> Spread | None:
    """Of durations in seconds; None of none."""
    if not lengths_s:
        return None
    ordered = sorted(lengths_s)
    p50, p99, longest = (1e3 * percentile(ordered, share) for share in (0.5, 0.99, 1.0))
    return Spread(p50, p99, longest, len(ordered))


def gaps_of(replies: Iterable[Reply], start_s: float, stop_s: float, cut_s: float, limit_s: float) -> Gaps:
    """The gaps within each answer that begin in `[start_s, stop_s)`.

    One that is still open when the run is cut counts if it is over the limit already: a server that stands still at the
    end must not go unseen. The wait for a first token is no gap.
    """
    gaps = Gaps()
    for reply in replies:
        arrivals = reply.arrivals_s
        for before_s, after_s in pairwise(arrivals):
            if start_s <= before_s < stop_s:
                gaps.add(before_s, after_s - before_s)
        if arrivals and reply.done_s is None and start_s <= arrivals[-1] < stop_s and cut_s - arrivals[-1] > limit_s:
            gaps.add(arrivals[-1], cut_s - arrivals[-1])
    return gaps


def chunks_between(replies: Iterable[Reply], start_s: float, stop_s: float) -> int:
    """Chunks with text that came in `[start_s, stop_s)`."""
    return sum(bisect_left(r.arrivals_s, stop_s) - bisect_left(r.arrivals_s, start_s) for r in replies)


def tokens_per_chunk(replies: Iterable[Reply]) -> float | None:
    """Tokens the server counted for each chunk with text it sent; None if no answer that told it was completed."""
    tokens = chunks = 0
    for reply in replies:
        if reply.completion_tokens is not None and reply.error is None:
            tokens += reply.completion_tokens
            chunks += len(reply.arrivals_s)
    return tokens / chunks if chunks else None


def is_decoding_at(reply: Reply, moment_s: float) -> bool:
    """Whether tokens of this answer came both before and after the moment."""
    arrivals = reply.arrivals_s
    return len(arrivals) > 1 and arrivals[0] <= moment_s < arrivals[-1]


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans in order, those that overlap as one."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
