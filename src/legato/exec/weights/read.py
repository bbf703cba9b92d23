"""A checkpoint's weights, brought into a backend's own form one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable

from legato.exec.decoder import DecoderWeights, collect_weights, expect_shape
from legato.exec.ops import FloatArray, Weight
from legato.exec.rope import RopeTable
from legato.exec.weights.tensor import Checkpoint, HostTensor

Progress = Callable[[int, int], None]


def read_weights(
    checkpoint: Checkpoint,
    ropes: tuple[RopeTable, ...],
    make: Callable[[HostTensor], Weight],
    progress: Progress | None = None,
) -> DecoderWeights[Weight]:
    """All weights, each matrix as `make` gives it, so that only one tensor is in memory twice.

    `progress(done, total)`, in bytes of the file, is called after each tensor. Raises ModelCorrupt.
    """
    done = 0

    def advance(name: str) -> None:
        nonlocal done
        done += checkpoint.file_nbytes(name)
        if progress is not None:
            progress(done, checkpoint.nbytes)

    def matrix(name: str, rows: int, cols: int) -> Weight:
        expect_shape(name, checkpoint.shape(name), (rows, cols))
        made = make(checkpoint.tensor(name))
        advance(name)
        return made

    def vector(name: str, length: int) -> FloatArray:
        expect_shape(name, checkpoint.shape(name), (length,))
        values = checkpoint.vector(name)
        advance(name)
        return values

    return collect_weights(checkpoint.spec, ropes, matrix, vector)
