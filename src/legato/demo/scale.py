"""`Scale`: one scale of gaps for all three pictures, in a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from legato.demo.figures import gaps_of
from legato.demo.run import Run


@dataclass(frozen=True, slots=True)
class Scale:
    """Logarithmic, from `low_ms` to `high_ms`: a linear one as high as a stall would hide the rest."""

    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, gaps_ms: Iterable[float], itl_ms: float) -> Scale:
        """Holds the gaps and the one asked for, with room for both to be seen."""
        ordered = sorted(gaps_ms) or [itl_ms]
        low = min(ordered[len(ordered) // 20], itl_ms / 2)
        return cls(max(low / 2, 0.1), 1.25 * max(ordered[-1], itl_ms))

    def share(self, ms: float) -> float:
        """Height, from 0 to 1; what lies outside is at the edge."""
        low, high = math.log(self.low_ms), math.log(self.high_ms)
        return min(max((math.log(max(ms, self.low_ms)) - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Powers of ten, in milliseconds."""
        decades = range(math.ceil(math.log10(self.low_ms)), math.floor(math.log10(self.high_ms)) + 1)
        return [10.0**decade for decade in decades]


def scale_of(runs: Iterable[Run], itl_ms: float) -> Scale:
    """That holds all gaps of these."""
    return Scale.of([1e3 * (end - begin) for run in runs for begin, end in gaps_of(run)], itl_ms)


def tick_name(ms: float) -> str:
    """ "10 ms", "1 s"."""
    return f"{ms / 1e3:g} s" if ms >= 1000 else f"{ms:g} ms"


def seconds_between_ticks(span_s: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many fit."""
    rough = max(span_s, 1e-3) / max(most, 1)
    decade: float = 10.0 ** math.floor(math.log10(rough))
    return next(decade * m for m in (1, 2, 5, 10) if decade * m >= rough * 0.999)
