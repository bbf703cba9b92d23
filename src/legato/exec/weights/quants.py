"""GGUF block formats to grouped tensors, value for value.

Layouts: ggml's `block_q*` structs (ggml/src/ggml-common.h). Every scale and minimum below is exact in fp32: a product
of an fp16 (11 bits) and a 6- or 8-bit integer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from legato.exec.weights.tensor import F32, U8, DenseTensor, DenseType, GroupedTensor, HostTensor

# bytes read and unpacked at a time: bounds the temporaries, fits the second-level cache's order of magnitude
_CHUNK_BYTES = 4 << 20

ReadRows = Callable[[int, int], U8]
"""(first row, row after last) -> u8[rows, bytes of a row]."""

_Unpack = Callable[[U8, U8, F32, F32], None]
"""Raw blocks u8[n, block bytes] into q u8[n, block], scale f32[n, groups], minimum f32[n, groups] (unused if none)."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One grouped GGUF type. `block`: elements in a block of `block_bytes`; the block is divided into groups."""

    block: int
    block_bytes: int
    bits: Literal[4, 8]
    group: Literal[16, 32]
    zero: int
    has_minimum: bool
    unpack: _Unpack


def is_implemented(type_name: str) -> bool:
    """Whether `decode` knows the GGUF type of this name."""
    return type_name in _GROUPED or type_name in _DENSE


def implemented_types() -> str:
    """The names, for a message."""
    return " ".join([*_DENSE, *_GROUPED])


def decode(type_name: str, out: int, inputs: int, read: ReadRows) -> HostTensor:
    """The matrix [out, inputs] of a GGUF type, read in pieces of a few MiB. `inputs` is a multiple of the block."""
    if type_name in _DENSE:
        return _decode_dense(_DENSE[type_name], out, inputs, read)
    form = _GROUPED[type_name]
    groups = inputs // form.group
    q = np.empty((out, inputs), np.uint8)
    scale = np.empty((out, groups), np.float32)
    minimum = np.empty((out, groups), np.float32) if form.has_minimum else None
    for start, stop in _row_chunks(out, inputs // form.block * form.block_bytes):
        rows = stop - start
        blocks = read(start, stop).reshape(rows * (inputs // form.block), form.block_bytes)
        per_block = form.block // form.group
        form.unpack(
            blocks,
            q[start:stop].reshape(-1, form.block),
            scale[start:stop].reshape(-1, per_block),
            (scale if minimum is None else minimum)[start:stop].reshape(-1, per_block),
        )
    return GroupedTensor(q, scale, minimum, form.zero, form.bits, form.group)


def _decode_dense(dtype: DenseType, out: int, inputs: int, read: ReadRows) -> DenseTensor:
    number: np.dtype[Any] = np.dtype({"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[dtype])
    values = np.empty((out, inputs), number)
    for start, stop in _row_chunks(out, inputs * number.itemsize):
        values[start:stop] = read(start, stop).view(number).reshape(stop - start, inputs)
    return DenseTensor(values, dtype)


def _row_chunks(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _half(raw: U8) -> F32:
    """u8[n, 2k] -> f32[n, k]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: U8, q: U8) -> None:
    """u8[n, 16] -> q u8[n, 32]: low nibbles are the first half, high ones the second."""
    np.bitwise_and(raw, 0x0F, out=q[:, :16])
    np.right_shift(raw, 4, out=q[:, 16:])


def _add_fifth_bits(raw: U8, q: U8) -> None:
    """Bit j of the little-endian u32 in raw u8[n, 4] becomes bit 4 of q[:, j]."""
    q |= np.unpackbits(raw, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    scale[:] = _half(blocks[:, :2])
    _nibbles(blocks[:, 2:], q)


def _q4_1(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    scale[:] = _half(blocks[:, :2])
    minimum[:] = _half(blocks[:, 2:4])
    _nibbles(blocks[:, 4:], q)


def _q5_0(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    scale[:] = _half(blocks[:, :2])
    _nibbles(blocks[:, 6:], q)
    _add_fifth_bits(blocks[:, 2:6], q)


def _q5_1(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    scale[:] = _half(blocks[:, :2])
    minimum[:] = _half(blocks[:, 2:4])
    _nibbles(blocks[:, 8:], q)
    _add_fifth_bits(blocks[:, 4:8], q)


def _q8_0(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    scale[:] = _half(blocks[:, :2])
    np.bitwise_xor(blocks[:, 2:], 0x80, out=q)  # signed + 128


def _k_scales(blocks: U8, scale: F32, minimum: F32) -> None:
    """The head of Q4_K and Q5_K: d, dmin, and eight 6-bit scales and minima in 12 bytes."""
    head = blocks[:, 4:16]
    low, high, mixed = head[:, 0:4], head[:, 4:8], head[:, 8:12]
    scales = np.concatenate([low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minima = np.concatenate([high & 0x3F, (mixed >> 4) | ((high >> 2) & 0x30)], axis=1)
    np.multiply(_half(blocks[:, 0:2]), scales, out=scale, casting="unsafe", dtype=np.float32)
    np.multiply(-_half(blocks[:, 2:4]), minima, out=minimum, casting="unsafe", dtype=np.float32)


def _q4_k(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    _k_scales(blocks, scale, minimum)
    _k_nibbles(blocks[:, 16:144], q)


def _k_nibbles(raw: U8, q: U8) -> None:
    """u8[n, 128] -> q u8[n, 256]: each 32 bytes hold a group of low nibbles and the next group of high ones."""
    low = raw.reshape(-1, 4, 32)
    pairs = q.reshape(-1, 4, 2, 32)
    np.bitwise_and(low, 0x0F, out=pairs[:, :, 0])
    np.right_shift(low, 4, out=pairs[:, :, 1])


def _q5_k(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    _k_scales(blocks, scale, minimum)
    _k_nibbles(blocks[:, 48:176], q)
    groups = q.reshape(-1, 8, 32)
    bits = blocks[:, 16:48]
    for group in range(8):
        groups[:, group] |= ((bits >> np.uint8(group)) & np.uint8(1)) << np.uint8(4)


def _q6_k(blocks: U8, q: U8, scale: F32, minimum: F32) -> None:
    low = blocks[:, 0:128].reshape(-1, 2, 2, 32)  # half of the block, which 32 of its 64 bytes
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    groups = q.reshape(-1, 2, 4, 32)
    for quarter in range(4):
        nibble = low[:, :, quarter % 2] >> np.uint8(4 if quarter >= 2 else 0)
        two = (high >> np.uint8(2 * quarter)) & np.uint8(3)
        np.bitwise_or(nibble & np.uint8(0x0F), two << np.uint8(4), out=groups[:, :, quarter])
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    np.multiply(_half(blocks[:, 208:210]), scales, out=scale)


_DENSE: dict[str, DenseType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

_GROUPED = {
    "Q8_0": BlockFormat(32, 34, 8, 32, 128, False, _q8_0),
    "Q4_0": BlockFormat(32, 18, 4, 32, 8, False, _q4_0),
    "Q4_1": BlockFormat(32, 20, 4, 32, 0, True, _q4_1),
    "Q5_0": BlockFormat(32, 22, 8, 32, 16, False, _q5_0),
    "Q5_1": BlockFormat(32, 24, 8, 32, 0, True, _q5_1),
    "Q4_K": BlockFormat(256, 144, 4, 32, 0, True, _q4_k),
    "Q5_K": BlockFormat(256, 176, 8, 32, 0, True, _q5_k),
    "Q6_K": BlockFormat(256, 210, 8, 16, 32, False, _q6_k),
}
