"""How much of a machine's speed chunks of a prompt get: the least that is worth it, and where a row costs a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legato.core.cost import StepCost
from legato.core.shape import StepShape

SHARES = (0.8, 0.9)
# Sizes of chunks: four to the octave, from 16 on; and around these multiples, some rows more or less.
_FIRST, _OCTAVE = 16, 4
_AROUND, _NEAR = (64, 128, 256), 4


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Seconds of a step with one chunk of so many rows and nothing else, by rows, ascending."""

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

    def least(self, share: float) -> int:
        """The smallest chunk from which on all keep that share of the best rate."""
        enough = 0
        for rows in sorted(self.seconds, reverse=True):
            if self.share(rows) < share:
                break
            enough = rows
        return enough or max(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "tokens_per_s": {str(rows): round(self.rate(rows), 2) for rows in sorted(self.seconds)},
            "best_tokens_per_s": round(self.best, 2),
            "least_rows": {f"{share:g}": self.least(share) for share in SHARES},
            "around": [n for n in _AROUND if n in self.seconds],
            "near": _NEAR,
        }


def sizes(most: int) -> tuple[int, ...]:
    """Chunks to time, up to `most` rows."""
    ladder = {round(2 ** (k / _OCTAVE)) for k in range(20 * _OCTAVE)}
    return tuple(sorted(n for n in ladder | set(steps(most)) if _FIRST <= n <= most))


def steps(most: int) -> tuple[int, ...]:
    """Those around multiples of blocks: 255, 256, 257 and so on."""
    return tuple(n for middle in _AROUND for n in range(middle - _NEAR, middle + _NEAR + 1) if n <= most)


def predicted(cost: StepCost, rows: Sequence[int]) -> Efficiency:
    """By what steps are predicted to take."""
    return Efficiency({n: cost.predict(StepShape().with_chunk(cost.attention, 0, n)) for n in rows})
