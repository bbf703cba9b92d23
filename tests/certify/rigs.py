"""Rigs of tiny random models, on the reference and on the native kernels, with room for faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exec.backends import RandomCheckpoint, cpu_backend, reference_backend
from exec.tiny_specs import TINY_SPECS
from legato.certify.draw import Limits
from legato.certify.rig import NativeRig, RigShape, noise, smear
from legato.exec.batch import Batch
from legato.exec.decoder import forward
from legato.exec.executor import ModelExecutor
from legato.exec.host_pool import Bytes, HostPool
from legato.exec.kv import KvDtype, KvLayout
from legato.exec.ops import FloatArray
from legato.exec.reference.kv import ReferenceKv
from legato.exec.reference.ops import ReferenceOps
from legato.exec.spec import LayerSpec

ANSWER_TOKENS = 6
SMALL = replace(
    TINY_SPECS["llama"], name="small", hidden=32, heads=2, kv_heads=1, ffn=32, vocab=61, layers=(LayerSpec(),) * 2
)


def limits_of(shape: RigShape, step_tokens: int, usual_tokens: int) -> Limits:
    """Small schedules: the reference takes a millisecond a row."""
    limits = Limits.of(shape, step_tokens=step_tokens, answer_tokens=ANSWER_TOKENS)
    return replace(limits, usual_tokens=usual_tokens, most_tokens=2 * usual_tokens, requests=5, usual_steps=16)


class ByteBlocks:
    """The blocks of a `ReferenceKv` as bytes: a `BlockMemory`."""

    def __init__(self, kv: ReferenceKv) -> None:
        self._kv = kv

    @property
    def block_nbytes(self) -> int:
        return int(self._kv.keys[:, 0].nbytes + self._kv.values[:, 0].nbytes)

    def copy_out(self, block: int, into: Bytes) -> None:
        into[:] = np.concatenate([self._bytes(part[:, block]) for part in (self._kv.keys, self._kv.values)])

    def copy_in(self, block: int, source: Bytes) -> None:
        keys, values = self._kv.keys, self._kv.values
        for part, data in zip((keys, values), np.split(source, 2), strict=True):
            part[:, block] = data.view(part.dtype).reshape(part[:, block].shape)

    def _bytes(self, part: NDArray[Any]) -> Bytes:
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


class _Reference:
    """The decoder over any `ReferenceOps`."""

    def __init__(self, ops: type[ReferenceOps], kv: ReferenceKv, weights: Any) -> None:
        self.ops, self.kv, self.weights = ops, kv, weights

    def run(self, batch: Batch) -> FloatArray:
        return np.asarray(forward(self.ops(self.kv, batch), SMALL, self.weights), np.float32)


class ReferenceRig:
    """NumPy, blocks of 4 tokens. `ops`: the operations, with a fault perhaps."""

    def __init__(self, ops: type[ReferenceOps] = ReferenceOps) -> None:
        self.shape = RigShape(
            vocab=SMALL.vocab,
            first_token=None,
            block_tokens=4,
            max_model_len=64,
            max_rows=40,
            max_seqs=4,
            pool_blocks=24,
            threads=1,
            kv_dtypes=("f16", "f32"),
        )
        self.ops = ops
        self.weights = reference_backend(RandomCheckpoint(SMALL), blocks=1, block_tokens=16, positions=64).weights
        self.kv: dict[str, ReferenceKv] = {}
        for dtype in self.shape.kv_dtypes:
            layout = KvLayout(len(SMALL.layers), SMALL.kv_heads, SMALL.head_dim, 4, dtype)
            self.kv[dtype] = ReferenceKv(layout, self.shape.pool_blocks)

    @property
    def limits(self) -> Limits:
        return limits_of(self.shape, 20, 32)

    def executor(self, kv_dtype: KvDtype, *, blocks: int, host_blocks: int, threads: int) -> ModelExecutor:
        kv = self.kv[kv_dtype]
        memory = ByteBlocks(kv)
        smear(memory, blocks, noise(memory.block_nbytes))
        host = HostPool(memory, host_blocks) if host_blocks else None
        return ModelExecutor(_Reference(self.ops, kv, self.weights), block_tokens=4, host=host)


def native_rig(spec_name: str = "llama", form: Callable[[str], str] = lambda name: "F32") -> NativeRig:
    """The native kernels, blocks of 16 tokens."""
    from legato import _native

    checkpoint = RandomCheckpoint(TINY_SPECS[spec_name], form)
    backends: dict[KvDtype, Any] = {}
    for dtype in ("f16", "f32"):
        backends[dtype] = cpu_backend(
            checkpoint,
            blocks=32,
            block_tokens=16,
            positions=256,
            isa=_native.isa(),
            activations="int8",
            kv_dtype=dtype,
            threads=2,
            max_rows=200,
        )
    shape = RigShape(
        vocab=checkpoint.spec.vocab,
        first_token=1,
        block_tokens=16,
        max_model_len=256,
        max_rows=200,
        max_seqs=4,
        pool_blocks=32,
        threads=2,
        kv_dtypes=("f16", "f32"),
    )
    return NativeRig(shape, backends, spec_name)
