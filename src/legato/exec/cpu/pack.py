"""Host tensors to the kernels' packed matrices, and how large these will be."""

from __future__ import annotations

from typing import NamedTuple

from legato._native import Matrix
from legato.exec.decoder import DecoderWeights
from legato.exec.rope import RopeTable
from legato.exec.weights.read import Progress, read_weights
from legato.exec.weights.tensor import Checkpoint, GroupedTensor, HostTensor

PANEL_OUTPUTS = 16


def pack(tensor: HostTensor) -> Matrix:
    """The tensor's values in panels of 16 outputs, none of them changed."""
    if isinstance(tensor, GroupedTensor):
        return Matrix.pack_grouped(
            tensor.q, tensor.scale, tensor.minimum, zero=tensor.zero, bits=tensor.bits, group=tensor.group
        )
    return Matrix.pack_dense(tensor.values, dtype=tensor.dtype)


def pack_weights(
    checkpoint: Checkpoint, ropes: tuple[RopeTable, ...], progress: Progress | None = None
) -> DecoderWeights[Matrix]:
    """All weights, packed one tensor at a time, so that only one is in memory twice.

    `progress(done, total)`, in bytes of the file, is called after each tensor. Raises ModelCorrupt.
    """
    return read_weights(checkpoint, ropes, pack, progress)


class _Packed(NamedTuple):
    """Bytes a group of 16 outputs takes: `codes` a value of one output (bytes), factors of `factor_bytes` a group."""

    code_bytes: float
    group: int
    factor_bytes: int


# Factors are fp16 where the file's are, fp32 for the products of Q4_K, Q5_K and Q6_K (11 + 6 bits or more).
_PACKED = {
    "F32": _Packed(4, 1, 0),
    "F16": _Packed(2, 1, 0),
    "BF16": _Packed(2, 1, 0),
    "Q8_0": _Packed(1, 32, 2),
    "Q4_0": _Packed(0.5, 32, 2),
    "Q4_1": _Packed(0.5, 32, 4),
    "Q5_0": _Packed(1, 32, 2),
    "Q5_1": _Packed(1, 32, 4),
    "Q4_K": _Packed(0.5, 32, 8),
    "Q5_K": _Packed(1, 32, 8),
    "Q6_K": _Packed(1, 16, 4),
}
_QUANTIZED = {"int8": _PACKED["Q8_0"], "int4": _PACKED["Q4_1"]}


def packed_nbytes(checkpoint: Checkpoint, quantize: str | None) -> int:
    """Bytes of all weights once packed; reads no tensor. `quantize`: what `open_checkpoint` was given."""
    return sum(_tensor_nbytes(checkpoint, name, quantize) for name in checkpoint.names())


def load_nbytes(checkpoint: Checkpoint, quantize: str | None) -> int:
    """Bytes needed for a moment of the load beyond those of all packed weights; reads no tensor.

    On its way through the host a tensor takes a byte a value and its factors if it is grouped, else what it has in the
    file; the tensors before it are packed by then.
    """
    packed = most = 0
    for name in checkpoint.names():
        rows, cols = _two(checkpoint.shape(name))
        packed += _tensor_nbytes(checkpoint, name, quantize)
        most = max(most, packed + max(rows * cols + rows * cols // 4, checkpoint.file_nbytes(name)))
    return max(0, most - packed)


def _tensor_nbytes(checkpoint: Checkpoint, name: str, quantize: str | None) -> int:
    rows, cols = _two(checkpoint.shape(name))
    if rows == 1:
        return 4 * cols
    form = _PACKED[checkpoint.file_type(name)]
    if quantize is not None and form.group == 1 and cols % 32 == 0:
        form = _QUANTIZED[quantize]
    padded_rows = -(-rows // PANEL_OUTPUTS) * PANEL_OUTPUTS
    return int(padded_rows * (cols * form.code_bytes + cols // form.group * form.factor_bytes))


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
