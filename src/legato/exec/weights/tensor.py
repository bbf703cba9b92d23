"""Weights on the host, as the file has them: grouped integers with scales, or dense floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from legato.exec.spec import ModelSpec

DenseType = Literal["f32", "f16", "bf16"]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A matrix in groups along its inputs: value = scale * (q - zero) + minimum.

    `q` u8[out, in], one value a byte whatever `bits` (4: 0..15, 8: 0..255). `scale` f32[out, in/group];
    `minimum` the same shape, or None for 0.
    """

    q: U8
    scale: F32
    minimum: F32 | None
    zero: int
    bits: Literal[4, 8]
    group: Literal[16, 32]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.q.shape[0], self.q.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held on the host."""
        return self.q.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def dequantise(self) -> F32:
        """f32[out, in]: each value computed in fp32, one product and one sum."""
        out, inputs = self.shape
        values = (self.q.astype(np.int16) - self.zero).astype(np.float32).reshape(out, -1, self.group)
        values *= self.scale[:, :, None]
        if self.minimum is not None:
            values += self.minimum[:, :, None]
        return values.reshape(out, inputs)


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A matrix of floats. `values` [out, in]: f32, f16, or u16 holding the bits of a bf16."""

    values: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
    dtype: DenseType

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held on the host."""
        return self.values.nbytes

    def dequantise(self) -> F32:
        """f32[out, in], exact."""
        return to_float32(self.values, self.dtype)


HostTensor = GroupedTensor | DenseTensor


class Checkpoint(Protocol):
    """An open model file or folder. Tensors are read when asked for and not kept: ask once for each."""

    @property
    def spec(self) -> ModelSpec:
        """Dimensions and options."""

    @property
    def source(self) -> str:
        """Where it came from, for messages."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file: the total for a progress bar."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """GGUF key-values (the tokenizer and chat template are among them); empty for a folder."""

    def names(self) -> Iterator[str]:
        """Canonical (GGUF) names of the tensors, in the order of the model."""

    def shape(self, name: str) -> tuple[int, ...]:
        """(out, in) of a matrix, (size,) of a vector; reads no tensor."""

    def file_nbytes(self, name: str) -> int:
        """Bytes of one tensor in the file: a step of the progress bar."""

    def file_type(self, name: str) -> str:
        """How the file stores it: "Q4_1", "BF16", ...; reads no tensor."""

    def tensor(self, name: str) -> HostTensor:
        """The matrix `name`. KeyError if there is none; ModelCorrupt if it cannot be read."""

    def vector(self, name: str) -> F32:
        """The vector (norm or bias) `name` as f32[size]."""


def to_float32(values: NDArray[np.generic], dtype: DenseType) -> F32:
    """f32 of the same shape; exact for every input."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)
