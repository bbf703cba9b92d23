"""`StepCost`: seconds a step takes, predicted from its shape with coefficients learned on the machine it runs on."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from legato.core.shape import Attention, StepShape


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that was carried out, and how long it took."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function: `values[i]` at `knots[i]`, `slope` beyond the last knot, 0 below the first.

    Knots ascend from 1, values do not fall, nothing is negative.
    """

    knots: tuple[int, ...] = (1,)
    values: tuple[float, ...] = (0.0,)
    slope: float = 0.0

    def at(self, x: int) -> float:
        """Cost: O(log knots)."""
        knots, values = self.knots, self.values
        i = bisect_right(knots, x)
        if i == len(knots):
            return values[-1] + self.slope * (x - knots[-1])
        if i == 0:
            return 0.0
        low, at_low = knots[i - 1], values[i - 1]
        return at_low + (values[i] - at_low) * (x - low) / (knots[i] - low)


@dataclass(frozen=True, slots=True)
class StepCost:
    """A sum of terms, none negative, each with a cause of its own. Seconds; `fit` finds them.

    `rows`: the layers' matrices against the step's rows. At one row, reading all weights once (their bytes over the
    bandwidth of memory) and what any step costs; further rows are cheap while reading hides them, then each adds its
    operations over the peak. Kernels switch with the number of rows: hence a curve, not a line.
    `tile_s`: for each block of `tile` rows begun: a micro-kernel reads the weights once more, however full its block.
    `pair_s`: a query against a key and its value in one layer: operations over the peak.
    `kv_token_s`: fetching a position's keys and values of one layer: bytes over bandwidth, and widening them.
    `sequence_s`: what a request costs by being there: its block table, its items of work, its token on its way.
    `logits`: the head, by rows that need logits: one reading of its weights, then operations, and for each row the
    search for the largest logit. `drawn_row_s`, `nucleus_row_s`, `logprob_row_s`: passes over the vocabulary beside it.
    `copy_s`: a block of KV to or from host memory.
    `scale`: the machine now, over the machine when it was measured: shared cores, heat. `memory_scale`: the same of
    `memory_seconds`, beside it: others on the machine slow memory and cores down each by itself.
    """

    attention: Attention
    rows: Curve = Curve()
    tile: int = 1
    tile_s: float = 0.0
    pair_s: float = 0.0
    kv_token_s: float = 0.0
    sequence_s: float = 0.0
    logits: Curve = Curve()
    drawn_row_s: float = 0.0
    nucleus_row_s: float = 0.0
    logprob_row_s: float = 0.0
    copy_s: float = 0.0
    scale: float = 1.0
    memory_scale: float = 1.0

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes. 0 for an empty one. Cost: 0.8 µs."""
        rows = shape.rows
        return self.scale * (
            self.rows.at(rows)
            + self.tile_s * -(-rows // self.tile)
            + self.pair_s * shape.pairs
            + self.kv_token_s * shape.kv_tokens
            + self.sequence_s * shape.sequences
            + self.logits.at(shape.logit_rows)
            + self.drawn_row_s * shape.drawn_rows
            + self.nucleus_row_s * shape.nucleus_rows
            + self.logprob_row_s * shape.logprob_rows
            + self.copy_s * shape.copied_blocks
            + (self.memory_scale - 1.0) * self.memory_seconds(shape)
        )

    def memory_seconds(self, shape: StepShape) -> float:
        """Of these, what waits for memory, as measured at first: weights read once, positions looked back at."""
        seconds = self.kv_token_s * shape.kv_tokens
        if shape.rows:
            seconds += self.rows.values[0] + self.tile_s
        return seconds + self.logits.values[0] if shape.logit_rows else seconds

    def rows_within(self, shape: StepShape, start: int, most: int, seconds: float, logit_rows: int = 0) -> int:
        """The most rows, up to `most`, of one more request from position `start` on, so that the step takes `seconds`.

        Up to an eighth fewer, full blocks of `tile` rows, where those of a block just begun would each take longer than
        the others: they come cheaper in the next step. 0 if not even one fits. `logit_rows`: that come with row number
        `most`, the last of its prompt. Cost: O(log most), 26 µs.
        """
        if most <= 0:
            return 0
        if self.predict(shape.with_chunk(self.attention, start, most, logit_rows)) <= seconds:
            return most
        fits, exceeds = 0, most
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self.predict(shape.with_chunk(self.attention, start, middle)) <= seconds:
                fits = middle
            else:
                exceeds = middle
        return self._full_tiles(shape, start, fits)

    def _full_tiles(self, shape: StepShape, start: int, rows: int) -> int:
        """`rows`, or what is left of them without those in a block of rows that is too empty to be worth its time."""
        full = rows - (shape.rows + rows) % self.tile
        if full == rows or 8 * full < 7 * rows:
            return rows
        none_s, full_s, all_s = (self.predict(shape.with_chunk(self.attention, start, n)) for n in (0, full, rows))
        return full if (all_s - full_s) * full > (full_s - none_s) * (rows - full) else rows

    def scaled(self, scale: float, memory_scale: float | None = None) -> StepCost:
        """The same machine, so many times as slow; its memory beside that as it was, or as is said."""
        return StepCost(  # `dataclasses.replace` takes three times as long, twice a step
            self.attention,
            self.rows,
            self.tile,
            self.tile_s,
            self.pair_s,
            self.kv_token_s,
            self.sequence_s,
            self.logits,
            self.drawn_row_s,
            self.nucleus_row_s,
            self.logprob_row_s,
            self.copy_s,
            scale,
            self.memory_scale if memory_scale is None else memory_scale,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` gives an equal one back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepCost:
        """Raises KeyError, TypeError or ValueError for what `to_dict` cannot have given."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"unknown terms of a step's cost: {', '.join(sorted(unknown))}")
        attention = data["attention"]
        layers = tuple((int(n), None if window is None else int(window)) for n, window in attention["layers"])
        return cls(
            attention=Attention(layers, int(attention["block_rows"])),
            rows=_curve(data["rows"]),
            logits=_curve(data["logits"]),
            tile=int(data["tile"]),
            **{name: float(data[name]) for name in known if name.endswith(("_s", "scale"))},
        )


def _curve(data: dict[str, Any]) -> Curve:
    return Curve(
        tuple(int(knot) for knot in data["knots"]), tuple(float(v) for v in data["values"]), float(data["slope"])
    )
