"""A step by the numbers of data sheets: `Ideal`. And `Parts`: where the time of a step goes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from legato.core.cost import Curve, StepCost
from legato.core.shape import StepShape
from legato.errors import ConfigError
from legato.sim.catalog import Device, Model

_MOST_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step by cause. Weights are read while rows are multiplied: the longer of the two counts.

    `attention_s`: the products of queries with keys and values. `kv_s`: reading these. `fixed_s`: what is left.
    """

    weights_s: float
    arithmetic_s: float
    attention_s: float
    kv_s: float
    fixed_s: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.weights_s, self.arithmetic_s) + self.attention_s + self.kv_s + self.fixed_s


@dataclass(frozen=True, slots=True)
class Ideal:
    """The slower of reading the weights and multiplying by them, plus attention: no real device is faster.

    `weight_bits`, `kv_bits`: of a weight, and of a number in the KV cache. `fixed_s`: what a step costs whatever is in
    it: launches, scheduling. `devices`: so many share the model, and read and compute evenly.
    """

    model: Model
    device: Device
    weight_bits: float = 16.0
    kv_bits: float = 16.0
    fixed_s: float = 0.0
    devices: int = 1

    def __post_init__(self) -> None:
        for name in ("weight_bits", "kv_bits", "devices"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}; it must be above 0")

    def parts(self, shape: StepShape) -> Parts:
        """Where the time of a step of this shape goes."""
        if not shape.rows:
            return Parts(0.0, 0.0, 0.0, 0.0, 0.0)
        return Parts(
            weights_s=self._read_s(shape.rows),
            arithmetic_s=self._row_s * shape.rows,
            attention_s=self._pair_s * shape.pairs,
            kv_s=self._kv_token_s * shape.kv_tokens,
            fixed_s=self.fixed_s,
        )

    @property
    def cost(self) -> StepCost:
        """The same as the scheduler plans with; between the knots of its curve, a mixture's reads are a line."""
        knots = self._knots()
        return StepCost(
            self.model.attention,
            Curve(knots, tuple(self.fixed_s + max(self._read_s(n), self._row_s * n) for n in knots), self._row_s),
            pair_s=self._pair_s,
            kv_token_s=self._kv_token_s,
        )

    @property
    def weight_nbytes(self) -> float:
        """Of all weights, on all devices together."""
        return self.model.parameters * self.weight_bits / 8

    @property
    def kv_nbytes(self) -> float:
        """Of one token in the KV cache."""
        return 2 * self.model.layers * self.model.kv_heads * self.model.head_dim * self.kv_bits / 8

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit beside the weights. 0 if these do not fit."""
        return max(0, int((self.devices * self.device.memory - self.weight_nbytes) / self.kv_nbytes))

    def _read_s(self, rows: int) -> float:
        return self.model.parameters_read(rows) * self.weight_bits / 8 / (self.device.bandwidth * self.devices)

    @property
    def _row_s(self) -> float:
        return 2 * self.model.active / (self.device.flops * self.devices)

    @property
    def _pair_s(self) -> float:
        """A product with the key and one with the value, of all heads."""
        return 4 * self.model.heads * self.model.head_dim / (self.device.flops * self.devices)

    @property
    def _kv_token_s(self) -> float:
        return self.kv_nbytes / self.model.layers / (self.device.bandwidth * self.devices)

    def _knots(self) -> tuple[int, ...]:
        """Rows where reading and computing change places, and eight to the octave."""
        ladder = {round(2 ** (i / 8)) for i in range(8 * int(math.log2(_MOST_ROWS)) + 1)}
        if self._row_s * _MOST_ROWS > self._read_s(_MOST_ROWS) and self._row_s < self._read_s(1):
            low, high = 1, _MOST_ROWS
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._row_s * middle < self._read_s(middle) else (low, middle)
            ladder |= {low, high}
        return tuple(sorted(ladder))


def parts_of(cost: StepCost, shape: StepShape) -> Parts:
    """The same of what was measured on a machine.

    What a step of one row takes is reading weights, what more rows add is not told apart from reading them again: their
    time in all is called arithmetic, and the two do not add up.
    """
    if not shape.rows:
        return Parts(0.0, 0.0, 0.0, 0.0, 0.0)
    weights_s = cost.scale * (cost.rows.at(1) + cost.tile_s)
    rows_s = cost.scale * (cost.rows.at(shape.rows) + cost.tile_s * -(-shape.rows // cost.tile))
    attention_s = cost.scale * cost.pair_s * shape.pairs
    kv_s = cost.scale * cost.memory_scale * cost.kv_token_s * shape.kv_tokens
    fixed_s = cost.predict(shape) - max(rows_s, weights_s) - attention_s - kv_s
    return Parts(weights_s, rows_s, attention_s, kv_s, max(fixed_s, 0.0))
