"""How much of a machine's speed chunks of a prompt get: the least that is worth it, and where a row costs a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legato.core.cost import StepCost
from legato.core.shape import StepShape

SHARES = (0.8, 0.9)
# Sizes of chunks: four to the octave, from 16 on; and around these multiples, some rows more or less.
_OCTAVE = 4
_AROUND, _NEAR = (64, 128, 256), 4


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Seconds of a step with one chunk of so many rows and nothing else, by rows."""

    seconds: Mapping[int, float]

    def rate(self, rows: int) -> float:
        """Tokens a second."""
        return rows / self.seconds[rows]

    @property
    def best(self) -> float:
        """Tokens a second, of the best size."""
        return max(map(self.rate, self.seconds))

    def share(self, rows: int) -> float:
        """Of the best rate."""
        return self.rate(rows) / self.best

    def least(self, share: float) -> int | None:
        """The smallest chunk that keeps that share of the best rate, as the next size does; None if none does.

        Of sizes eight to a factor of four; those around multiples are not asked.
        """
        ladder = [rows for rows in _ladder() if rows in self.seconds]
        for rows, following in pairwise([*ladder, *ladder[-1:]]):
            if min(self.share(rows), self.share(following)) >= share:
                return rows
        return None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "tokens_per_s": {str(rows): round(self.rate(rows), 2) for rows in sorted(self.seconds)},
            "best_tokens_per_s": round(self.best, 2),
            "least_rows": {f"{share:g}": self.least(share) for share in SHARES},
            "ladder": [rows for rows in _ladder() if rows in self.seconds],
            "around": [n for n in _AROUND if n in self.seconds],
            "near": _NEAR,
        }


def sizes(most: int) -> tuple[int, ...]:
    """Chunks to time, up to `most` rows."""
    return tuple(sorted(n for n in {*_ladder(), *steps(most)} if n <= most))


def steps(most: int) -> tuple[int, ...]:
    """Those around multiples of blocks: 255, 256, 257 and so on."""
    return tuple(n for middle in _AROUND for n in range(middle - _NEAR, middle + _NEAR + 1) if n <= most)


def predicted(cost: StepCost, rows: Sequence[int]) -> Efficiency:
    """By what steps are predicted to take. All chunks have the same middle: rows look back equally far in each."""
    most = max(rows)
    shapes = {n: StepShape().with_chunk(cost.attention, (most - n) // 2, n) for n in rows}
    return Efficiency({n: cost.predict(shape) for n, shape in shapes.items()})


def _ladder() -> list[int]:
    """16, 19, 23, 27, 32 and so on."""
    return [round(2 ** (k / _OCTAVE)) for k in range(4 * _OCTAVE, 17 * _OCTAVE)]
