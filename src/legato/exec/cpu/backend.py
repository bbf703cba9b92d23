"""The decoder on the native kernels: recorded once as a program, replayed for every batch."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from legato._native import KvCache, Matrix, Program
from legato.exec.batch import Batch
from legato.exec.cpu.ops import RecordingOps
from legato.exec.decoder import DecoderWeights, forward
from legato.exec.kv import KvLayout
from legato.exec.ops import FloatArray
from legato.exec.rope import rope_table
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


# Rows that the shifts of equalised activations are chosen by, the same whatever the engine's limits are, so that these
# do not show in the bits of an answer.
_SAMPLE_SEQUENCES, _SAMPLE_TOKENS = 16, 64


def choose_shifts(
    spec: ModelSpec, weights: DecoderWeights[Matrix], *, activations: Activations, threads: int
) -> list[list[int]]:
    """What `Program.equalise` wants, by a step on 1,024 fixed token ids; depends on the model and the instruction set.

    Costs that step, and its scratch for as long as it takes. More ids, longer sequences or text that the model writes
    itself are no better (docs/decisions/0009).
    """
    block_tokens = 32
    layout = KvLayout.of(spec, block_tokens=block_tokens, dtype="f16")
    blocks = _SAMPLE_TOKENS // block_tokens
    kv = make_kv(layout, _SAMPLE_SEQUENCES * blocks)
    ropes = tuple(rope_table(rope, _SAMPLE_TOKENS) for rope in spec.ropes)
    rows = _SAMPLE_SEQUENCES * _SAMPLE_TOKENS
    program = record(
        spec,
        dataclasses.replace(weights, ropes=ropes),
        kv,
        max_rows=rows,
        max_seqs=_SAMPLE_SEQUENCES,
        max_logit_rows=_SAMPLE_SEQUENCES,
        activations=activations,
        threads=threads,
    )
    if not program.shifts:
        return []
    return program.choose_shifts(
        sample_ids(spec),
        np.tile(np.arange(_SAMPLE_TOKENS, dtype=np.int32), _SAMPLE_SEQUENCES),
        np.arange(_SAMPLE_SEQUENCES + 1, dtype=np.int32) * _SAMPLE_TOKENS,
        np.arange(_SAMPLE_SEQUENCES * blocks, dtype=np.int32).reshape(_SAMPLE_SEQUENCES, blocks),
        np.arange(1, _SAMPLE_SEQUENCES + 1, dtype=np.int32) * _SAMPLE_TOKENS - 1,
        threads,
    )


def sample_ids(spec: ModelSpec) -> NDArray[np.int32]:
    """`[1024]`: sixteen sequences of 64 token ids, each after the model's first token if it has one.

    Evenly spread in their logarithm from 200 on: a vocabulary's early merges are its common words.
    """
    golden_ratio = 0.6180339887498949
    spread = np.arange(_SAMPLE_SEQUENCES * _SAMPLE_TOKENS) * golden_ratio % 1.0
    least = min(200, spec.vocab // 2)
    ids = np.asarray(np.clip(least * (spec.vocab / max(least, 1)) ** spread, 0, spec.vocab - 1), np.int32)
    if spec.first_token is not None:
        ids[::_SAMPLE_TOKENS] = spec.first_token
    return ids


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
