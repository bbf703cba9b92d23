"""Rotary tables: cos and sin for every absolute position a request may reach, made once at load.

A table depends on the whole range of positions, never on a chunk or a request's present length: a rotation that changes
with the length seen so far would make chunked prompts differ from whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.exec.ops import FloatArray
from legato.exec.spec import RopeSpec

_ROWS_AT_ONCE = 1024  # bounds the float64 intermediate


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`cos`, `sin`: float32 `[positions, dim / 2]`, of angles in float64 (float32 is off by 1e-4 at position 2,000)."""

    cos: FloatArray
    sin: FloatArray
    interleaved: bool

    @property
    def nbytes(self) -> int:
        """Bytes of both tables."""
        return self.cos.nbytes + self.sin.nbytes


def rope_table(spec: RopeSpec, positions: int) -> RopeTable:
    """Table of positions `[0, positions)`: angle(p, j) = p * base^(-2j/dim) / factors[j] / linear_scale."""
    pairs = spec.dim // 2
    frequency = spec.base ** (-2.0 * np.arange(pairs, dtype=np.float64) / spec.dim) / spec.linear_scale
    if spec.factors is not None:
        frequency = frequency / np.asarray(spec.factors, dtype=np.float64)
    cos = np.empty((positions, pairs), np.float32)
    sin = np.empty((positions, pairs), np.float32)
    for start in range(0, positions, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, positions)
        angle = np.arange(start, stop, dtype=np.float64)[:, None] * frequency
        cos[start:stop] = np.cos(angle)
        sin[start:stop] = np.sin(angle)
    return RopeTable(cos, sin, spec.interleaved)


def rope_nbytes(spec: RopeSpec, positions: int) -> int:
    """Bytes of `rope_table(spec, positions)`."""
    return 2 * 4 * positions * (spec.dim // 2)
