"""`Rig`: one loaded model, ready for one trial after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from legato._native import isa
from legato.exec.cpu.backend import Activations, CpuBackend, make_kv, record
from legato.exec.executor import ModelExecutor
from legato.exec.host_pool import BlockMemory, Bytes, HostPool
from legato.exec.kv import KvDtype, KvLayout
from legato.exec.memory import available_bytes, require_room
from legato.exec.model import load_model
from legato.exec.weights.quantize import Quantize


@dataclass(frozen=True, slots=True)
class RigShape:
    """What schedules must keep within. `max_rows`: of a step, and so of a prompt that is computed in one piece."""

    vocab: int
    first_token: int | None
    block_tokens: int
    max_model_len: int
    max_rows: int
    max_seqs: int
    pool_blocks: int
    threads: int
    kv_dtypes: tuple[KvDtype, ...]


class Rig(Protocol):
    """A model on which trials run, one at a time."""

    @property
    def shape(self) -> RigShape:
        """Its limits."""

    def executor(self, kv_dtype: KvDtype, *, blocks: int, host_blocks: int, threads: int) -> ModelExecutor:
        """An executor that remembers nothing of earlier ones, on KV blocks 0 … `blocks` - 1 full of `noise`."""


def noise(nbytes: int) -> Bytes:
    """Bytes that are finite numbers, some positive and some negative, whether read as f16, bf16 or f32.

    What a block holds before it is written is of no account, so it had better be wrong: an earlier trial's keys could
    be right by chance. No infinities: what is masked is multiplied by 0. Magnitudes up to 2 in f16.
    """
    random = np.random.default_rng(20)
    magnitudes = random.integers(0x30, 0x40, nbytes, np.uint8)
    signs = random.integers(0, 2, nbytes, np.uint8) * np.uint8(0x80)
    return np.asarray(magnitudes | signs)


def smear(kv: BlockMemory, blocks: int, with_bytes: Bytes) -> None:
    """Fills the first `blocks` blocks with the same bytes."""
    for block in range(blocks):
        kv.copy_in(block, with_bytes)


class NativeRig:
    """The native kernels: weights packed once, a program and a KV pool for each KV type."""

    def __init__(self, shape: RigShape, backends: dict[KvDtype, CpuBackend], description: str) -> None:
        self.shape = shape
        self.description = description
        self.isa = isa()
        self._backends = backends
        self._noise = {dtype: noise(backend.kv.block_nbytes) for dtype, backend in backends.items()}

    def executor(self, kv_dtype: KvDtype, *, blocks: int, host_blocks: int, threads: int) -> ModelExecutor:
        """See `Rig.executor`."""
        backend = self._backends[kv_dtype]
        backend.threads = threads
        smear(backend.kv, blocks, self._noise[kv_dtype])
        host = HostPool(backend.kv, host_blocks) if host_blocks else None
        return ModelExecutor(backend, block_tokens=self.shape.block_tokens, host=host)


def load_rig(
    path: Path,
    *,
    kv_dtypes: Sequence[KvDtype],
    step_tokens: int,
    prompt_tokens: int,
    answer_tokens: int,
    max_seqs: int,
    activations: Activations,
    quantize: Quantize | None,
    threads: int,
    block_tokens: int,
    max_model_len: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> NativeRig:
    """The model at `path` with room for two of the longest sequences. Options and errors are those of `load_model`.

    `prompt_tokens`, `answer_tokens`: the longest wanted; shorter if the model's context, or `max_model_len`, is.
    """
    longest_tokens = prompt_tokens + answer_tokens
    max_rows = max(step_tokens, min(prompt_tokens, max_model_len or prompt_tokens))
    max_seqs = min(max_seqs, max_rows)
    loaded = load_model(
        path,
        max_num_batched_tokens=max_rows,
        max_num_seqs=max_seqs,
        kv_tokens=2 * -(-longest_tokens // block_tokens) * block_tokens,
        kv_dtype=kv_dtypes[0],
        block_tokens=block_tokens,
        activations=activations,
        quantize=quantize,
        threads=threads,
        max_model_len=max_model_len,
        progress=progress,
    )
    backend, spec = loaded.backend, loaded.spec
    backends: dict[KvDtype, CpuBackend] = {kv_dtypes[0]: backend}
    for dtype in kv_dtypes[1:]:
        layout = KvLayout.of(spec, block_tokens=block_tokens, dtype=dtype)
        nbytes = loaded.kv_blocks * layout.block_bytes
        require_room("another KV pool", nbytes, available_bytes(), f"use --kv-dtype {kv_dtypes[0]} alone")
        kv = make_kv(layout, loaded.kv_blocks)
        program = record(
            spec,
            backend.weights,
            kv,
            max_rows=max_rows,
            max_seqs=max_seqs,
            max_logit_rows=max_seqs,
            activations=activations,
            threads=loaded.threads,
        )
        program.equalise(backend.program.shifts)
        backends[dtype] = CpuBackend(program, kv, backend.weights, loaded.threads)
    shape = RigShape(
        vocab=spec.vocab,
        first_token=spec.first_token,
        block_tokens=block_tokens,
        max_model_len=loaded.max_model_len,
        max_rows=max_rows,
        max_seqs=max_seqs,
        pool_blocks=loaded.kv_blocks,
        threads=loaded.threads,
        kv_dtypes=tuple(kv_dtypes),
    )
    return NativeRig(shape, backends, f"{spec.architecture}, {len(spec.layers)} layers, vocabulary {spec.vocab:,}")
