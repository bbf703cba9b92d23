"""`Ladder`: the few widths that steps may have where each new shape of a step costs a compilation or a capture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from legato.errors import ConfigError

_STEPS, _LEAST_STEP = 3, 16


@dataclass(frozen=True, slots=True)
class Ladder:
    """Widths in rows, ascending. `mixed`: of steps with prompts; `decodes`: of steps of decodes alone.

    A step is padded to the next width of its kind, one row never. `dropped`: widths that a cap left no place for.
    """

    mixed: tuple[int, ...]
    decodes: tuple[int, ...]
    dropped: tuple[int, ...] = ()

    @classmethod
    def of(cls, max_tokens: int, max_seqs: int, capacity: int | None = None, cap: int | None = None) -> Ladder:
        """A function of the limits of a step alone, so that all of it can be made before the first request.

        `max_tokens`: rows of a step with prompts: three evenly spaced widths, at least 16 apart, the last one exactly
        that. `max_seqs`: decodes: powers of two up to exactly that. `capacity`: rows that the KV cache has room for:
        no width is larger. `cap`: widths in all; those go whose absence pads least, the last of each kind never.
        Raises ConfigError for limits below 1, or a cap that not even the largest widths fit.
        """
        for name, value in (("max_tokens", max_tokens), ("max_seqs", max_seqs), ("capacity", capacity), ("cap", cap)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; 1 is the least")
        most = max_tokens if capacity is None else min(max_tokens, capacity)
        ladder = cls(_clamped(_spaced(max_tokens), most), _clamped(_doubled(max_seqs), most))
        return ladder if cap is None else ladder._within(cap)

    @property
    def widths(self) -> tuple[int, ...]:
        """All, each once, ascending: shapes to make. One row, which is never padded, is among them."""
        return tuple(sorted({1, *self.mixed, *self.decodes}))

    def width(self, rows: int, *, decodes: bool) -> int:
        """Of a step of so many rows, none above the largest. Cost: O(log widths)."""
        widths = self.decodes if decodes else self.mixed
        return rows if rows <= 1 else widths[bisect_left(widths, rows)]

    def waste(self, *, decodes: bool) -> float:
        """Rows of padding over rows that count, of steps that have each number of rows equally often."""
        return _waste(self.decodes if decodes else self.mixed)

    def _within(self, cap: int) -> Ladder:
        mixed, decodes, dropped = list(self.mixed), list(self.decodes), list[int]()
        while len(left := {1, *mixed, *decodes}) > cap:
            # Each width that may go, by the padding that it saves.
            spare = [
                (_waste([w for w in kind if w != width]) - _waste(kind), width, kind)
                for kind in (mixed, decodes)
                for width in kind[:-1]
                if width > 1
            ]
            if not spare:
                least = f"one row, {decodes[-1]} decodes, {mixed[-1]} rows"
                raise ConfigError(f"a cap of {cap} shapes has no place for {least}; raise the cap to {len(left)}")
            _, width, kind = min(spare, key=lambda entry: entry[:2])
            kind.remove(width)
            dropped.append(width)
        return Ladder(tuple(mixed), tuple(decodes), tuple(sorted(dropped)))


def _spaced(most: int) -> list[int]:
    """512 gives 171, 342, 512."""
    if most <= _LEAST_STEP:
        return [most]
    step = max(-(-most // _STEPS), _LEAST_STEP)
    return [*range(step, most, step), most]


def _doubled(most: int) -> list[int]:
    """12 gives 1, 2, 4, 8, 12."""
    return [*(1 << k for k in range(most.bit_length()) if 1 << k < most), most]


def _clamped(widths: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(width, most) for width in widths))


def _waste(widths: Sequence[int]) -> float:
    """Over all numbers of rows up to the largest width; one row is not padded."""
    most = widths[-1]
    padded = sum(widths[bisect_left(widths, rows)] for rows in range(2, most + 1)) + 1
    return padded / (most * (most + 1) / 2) - 1.0
