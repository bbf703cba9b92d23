"""The decoder on the native kernels: recorded once as a program, replayed for every batch."""

from __future__ import annotations

from typing import Literal

from legato._native import KvCache, Matrix, Program
from legato.exec.batch import Batch
from legato.exec.cpu.ops import RecordingOps
from legato.exec.decoder import DecoderWeights, forward
from legato.exec.kv import KvLayout
from legato.exec.ops import FloatArray
from legato.exec.spec import ModelSpec

Activations = Literal["int8", "bf16", "f32"]


def make_kv(layout: KvLayout, blocks: int) -> KvCache:
    """A pool of `blocks` blocks. The operating system provides its pages as they are first written."""
    return KvCache(layout.layers, blocks, layout.block_tokens, layout.kv_heads, layout.head_dim, layout.dtype)


def record(
    spec: ModelSpec,
    weights: DecoderWeights[Matrix],
    kv: KvCache,
    *,
    max_rows: int,
    max_seqs: int,
    max_logit_rows: int,
    activations: Activations,
    threads: int,
) -> Program:
    """The sealed program of one step, for at most `threads`; its scratch memory is allocated with the first run."""
    program = Program(
        kv,
        max_rows=max_rows,
        max_logit_rows=max_logit_rows,
        max_seqs=max_seqs,
        activations=activations,
        max_threads=threads,
    )
    program.seal(forward(RecordingOps(program), spec, weights))
    return program


class CpuBackend:
    """A recorded program with its KV pool. `threads`: at most that many; the bits do not depend on it."""

    def __init__(self, program: Program, kv: KvCache, weights: DecoderWeights[Matrix], threads: int) -> None:
        self.program = program
        self.kv = kv
        self.weights = weights
        self.threads = threads

    def run(self, batch: Batch) -> FloatArray:
        """Logits `[len(batch.logit_rows), vocab]`, valid until the next call; the GIL is released meanwhile."""
        return self.program.run(
            batch.tokens,
            batch.positions,
            batch.seq_row_starts,
            batch.block_tables,
            batch.logit_rows,
            self.threads,
        )
