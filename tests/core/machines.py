"""Machines whose every cost is known, and steps on them."""

from __future__ import annotations

import dataclasses
import random

from legato.core.cost import Curve, Sample, StepCost
from legato.core.shape import Attention, StepShape

FULL = Attention(((30, None),), block_rows=16)
WINDOWED = Attention(((15, 512), (3, None)), block_rows=16)

# About a 135 M model on two cores: 1.8 ms to read the weights once, 0.13 ms a row when that is hidden no more.
MACHINE = StepCost(
    attention=FULL,
    rows=Curve((1, 8, 13, 64, 512), (1.8e-3, 2.2e-3, 3e-3, 9e-3, 68e-3), 1.4e-4),
    tile=12,
    tile_s=1e-4,
    pair_s=3e-9,
    kv_token_s=1e-8,
    sequence_s=2e-5,
    logits=Curve((1, 8, 32), (0.5e-3, 0.7e-3, 2e-3), 6e-5),
    drawn_row_s=1e-4,
    nucleus_row_s=2e-4,
    logprob_row_s=1e-4,
)


def random_shape(draw: random.Random, attention: Attention = FULL) -> StepShape:
    """A step of up to 32 decodes, a chunk of up to 1,024 rows, or both; some of it not greedy."""
    shape = StepShape()
    for _ in range(draw.choice([0, 0, 1, 4, draw.randint(1, 32)])):
        shape = shape.with_chunk(attention, int(2 ** draw.uniform(4, 12)), 1, 1)
    if not shape.rows or draw.random() < 0.6:
        shape = shape.with_chunk(attention, draw.randint(0, 7168), int(2 ** draw.uniform(0, 10)), draw.getrandbits(1))
    kind = draw.random()
    if kind < 0.3:
        return dataclasses.replace(shape, drawn_rows=shape.logit_rows, nucleus_rows=draw.randint(0, shape.logit_rows))
    return dataclasses.replace(shape, logprob_rows=shape.logit_rows) if kind < 0.4 else shape


def timed(
    machine: StepCost, shape: StepShape, draw: random.Random, *, spread: float = 0.03, interrupted: float = 0.05
) -> Sample:
    """A step on a machine that others use as well: some steps take up to four times as long, none is much shorter."""
    seconds = machine.predict(shape) * draw.lognormvariate(0.0, spread)
    return Sample(shape, seconds * (draw.uniform(1.3, 4.0) if draw.random() < interrupted else 1.0))
