"""The oracle: the decoder over `ReferenceOps`, behind the interface every backend has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.exec.batch import Batch
from legato.exec.decoder import DecoderWeights, collect_weights, expect_shape, forward
from legato.exec.ops import FloatArray
from legato.exec.reference.kv import ReferenceKv
from legato.exec.reference.ops import ReferenceOps
from legato.exec.rope import RopeTable
from legato.exec.spec import ModelSpec


class ReferenceBackend:
    """Runs batches eagerly in NumPy. `dtype` float64 tells rounding from error in the others."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[NDArray[Any]],
        kv: ReferenceKv,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.kv = kv
        self.dtype = dtype

    def run(self, batch: Batch) -> FloatArray:
        """Logits `[len(batch.logit_rows), vocab]`; keys and values of all rows are in `kv` afterwards."""
        ops = ReferenceOps(self.kv, batch, self.dtype)
        return np.asarray(forward(ops, self.spec, self.weights), np.float32)


def reference_weights(
    spec: ModelSpec, tensor: Callable[[str], NDArray[Any]], ropes: tuple[RopeTable, ...]
) -> DecoderWeights[NDArray[Any]]:
    """Weights for `ReferenceBackend`. `tensor(name)`: values, float32. Raises ModelCorrupt on a wrong shape."""

    def matrix(name: str, rows: int, cols: int) -> NDArray[Any]:
        values = tensor(name)
        expect_shape(name, values.shape, (rows, cols))
        return values

    def vector(name: str, length: int) -> FloatArray:
        values = tensor(name)
        expect_shape(name, values.shape, (length,))
        return np.asarray(values, np.float32)

    return collect_weights(spec, ropes, matrix, vector)
