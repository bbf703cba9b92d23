"""`Series`: how things stood over time, in so many buckets that widen as time goes on."""

from __future__ import annotations

from collections.abc import Iterator

_BUCKETS = 400


class Series:
    """Means over buckets of equal width, weighted by time. Memory: 400 buckets, however long it lasts."""

    __slots__ = ("_columns", "width_s")

    def __init__(self) -> None:
        self.width_s = 1.0
        self._columns: list[list[float]] = []  # seconds, then each value times these

    def add(self, begin_s: float, seconds: float, *values: float) -> None:
        """For so long, from `begin_s` on, the values were these. Counted where it began."""
        at = int(begin_s / self.width_s)
        while at >= _BUCKETS:
            self._fold()
            at = int(begin_s / self.width_s)
        columns = self._columns
        while len(columns) <= at:
            columns.append([0.0] * (len(values) + 1))
        bucket = columns[at]
        bucket[0] += seconds
        for i, value in enumerate(values, 1):
            bucket[i] += seconds * value

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        """(second, mean values …) of the middle of each bucket in which there was anything."""
        for n, (seconds, *sums) in enumerate(self._columns):
            if seconds:
                yield ((n + 0.5) * self.width_s, *(total / seconds for total in sums))

    def _fold(self) -> None:
        self.width_s *= 2
        pairs = zip(self._columns[::2], [*self._columns[1::2], None], strict=False)
        self._columns = [a if b is None else [x + y for x, y in zip(a, b, strict=True)] for a, b in pairs]
