"""Float matrices to groups of 32: symmetric int8, or int4 with a minimum."""

from __future__ import annotations

from typing import Literal

import numpy as np

from legato.errors import ModelCorrupt
from legato.exec.weights.tensor import F32, U8, DenseTensor, GroupedTensor, HostTensor, to_float32

Quantize = Literal["int8", "int4"]

_GROUP: Literal[32] = 32
_CHUNK_ELEMENTS = 1 << 20  # bounds the fp32 temporaries to a few tens of MiB


def quantise(dense: DenseTensor, kind: Quantize, what: str) -> HostTensor:
    """`dense` in groups along its inputs; unchanged if these are not a multiple of 32.

    int8: scale = max|w| / 127, zero 128. int4: 16 levels from the minimum up, then scale and minimum refitted by least
    squares to the levels chosen where that lowers the squared error. Scales and minima are rounded to fp16 before the
    levels are chosen, so the kernels can keep them in fp16 without loss. `what`: for messages.
    """
    out, inputs = dense.shape
    if inputs % _GROUP:
        return dense
    groups = inputs // _GROUP
    q = np.empty((out, inputs), np.uint8)
    scale = np.empty((out, groups), np.float32)
    minimum = np.empty((out, groups), np.float32) if kind == "int4" else None
    step = max(1, _CHUNK_ELEMENTS // inputs)
    for start in range(0, out, step):
        rows = slice(start, min(start + step, out))
        values = to_float32(dense.values[rows], dense.dtype).reshape(-1, groups, _GROUP)
        if not np.isfinite(values).all():
            raise ModelCorrupt(f"{what} holds values that are not finite")
        if minimum is None:
            levels, scale[rows] = _symmetric(values)
        else:
            levels, scale[rows], minimum[rows] = _asymmetric(values)
        q[rows] = levels.reshape(-1, inputs)
    if minimum is None:
        return GroupedTensor(q, scale, None, zero=128, bits=8, group=_GROUP)
    return GroupedTensor(q, scale, minimum, zero=0, bits=4, group=_GROUP)


def _symmetric(values: F32) -> tuple[U8, F32]:
    scale = _as_half(np.abs(values).max(axis=2) / np.float32(127))
    levels = np.rint(values * _reciprocal(scale)[:, :, None])
    return (np.clip(levels, -127, 127) + 128).astype(np.uint8), scale


def _asymmetric(values: F32) -> tuple[U8, F32, F32]:
    low = values.min(axis=2)
    first = _with_levels(values, (values.max(axis=2) - low) / np.float32(15), low)
    q = first[0].astype(np.float32)
    mean_q, mean_v = q.mean(axis=2), values.mean(axis=2)
    q -= mean_q[:, :, None]
    spread = np.square(q).sum(axis=2)
    slope = (q * values).sum(axis=2) / np.where(spread > 0, spread, 1)
    usable = (slope > 0) & (spread > 0)
    slope = np.where(usable, slope, first[1]).astype(np.float32)
    refit = _with_levels(values, slope, np.where(usable, mean_v - slope * mean_q, first[2]).astype(np.float32))
    better = refit[3] < first[3]
    levels = np.where(better[:, :, None], refit[0], first[0])
    return levels, np.where(better, refit[1], first[1]), np.where(better, refit[2], first[2])


def _with_levels(values: F32, scale: F32, minimum: F32) -> tuple[U8, F32, F32, F32]:
    """Nearest levels for a scale and minimum (rounded to fp16), and the squared error of each group."""
    scale, minimum = _as_half(scale), _as_half(minimum)
    levels = np.clip(np.rint((values - minimum[:, :, None]) * _reciprocal(scale)[:, :, None]), 0, 15)
    with np.errstate(over="ignore"):  # of values beyond 1e19: an infinite error only means that no refit is taken
        error = np.square(levels * scale[:, :, None] + minimum[:, :, None] - values).sum(axis=2)
    return levels.astype(np.uint8), scale, minimum, error


def _as_half(values: F32) -> F32:
    """Rounded to fp16 where that is finite."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16).astype(np.float32)
    return np.where(np.isfinite(half), half, values)


def _reciprocal(scale: F32) -> F32:
    """1/scale, 0 where the scale is."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
