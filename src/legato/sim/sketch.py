"""`Sketch`: quantiles of numbers that are too many to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_STEP = math.log(1.005)


class Sketch:
    """Counts in bins each half a percent wider than the one before, so that quantiles are right to a quarter of one.

    As DDSketch has them (Masson et al., VLDB 2019). Memory: some thousand bins, whatever is added. What is not above 0
    counts as 0.
    """

    __slots__ = ("_bins", "_zeros", "count", "least", "most", "total")

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._zeros = 0
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Adds a number. Cost: half a microsecond."""
        self.count += times
        self.total += value * times
        if value > self.most:
            self.most = value
        if value < self.least:
            self.least = value
        if value <= 0.0:
            self._zeros += times
            return
        key = math.ceil(math.log(value) / _STEP)
        self._bins[key] = self._bins.get(key, 0) + times

    def add_all(self, values: Sequence[float], times: int = 1) -> None:
        """Adds several, each so many times. Cost: little, if the smallest and the largest are of one bin."""
        if not values:
            return
        least, most = min(values), max(values)
        if least <= 0.0 or math.ceil(math.log(least) / _STEP) != (key := math.ceil(math.log(most) / _STEP)):
            for value in values:
                self.add(value, times)
            return
        self._bins[key] = self._bins.get(key, 0) + times * len(values)
        self.count += times * len(values)
        self.total += times * sum(values)
        self.least, self.most = min(self.least, least), max(self.most, most)

    @property
    def mean(self) -> float:
        """0 of none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """That so large a share does not exceed. 0 of none."""
        return next(iter(self.quantiles((share,))))

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """The same of several, ascending. Cost: a sort of the bins."""
        found, keys, seen, at = [], sorted(self._bins), self._zeros, 0
        for share in shares:
            wanted = int(share * (self.count - 1) + 0.5) + 1
            while seen < wanted and at < len(keys):
                seen += self._bins[keys[at]]
                at += 1
            middle = math.exp((keys[at - 1] - 0.5) * _STEP) if at else 0.0
            within = self.most if share >= 1.0 else min(max(middle, self.least), self.most)
            found.append(within if self.count else 0.0)
        return found

    def above(self, value: float) -> int:
        """How many numbers are above it, as far as bins tell."""
        if value <= 0.0:
            return self.count - self._zeros
        limit = math.ceil(math.log(value) / _STEP)
        return sum(count for key, count in self._bins.items() if key > limit)
