"""Small programs over the native kernels. The token id chooses a row of a table: a test says what every row holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from legato import _native

I32 = np.int32


def identity_rope(positions: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of no rotation, fp32 [positions, head_dim / 2]."""
    return np.ones((positions, head_dim // 2), np.float32), np.zeros((positions, head_dim // 2), np.float32)


@dataclass(frozen=True)
class Shape:
    """Attention of one layer."""

    head_dim: int = 64
    heads: int = 6
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    dtype: str = "f16"
    block_tokens: int = 32
    activations: str = "f32"  # with "int8" a kernel may round fp16 attention to bf16

    @property
    def cols(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass
class AttentionRig:
    """One layer of attention over `qkv` [ids, cols]: a row's q, k and v are those of its token id.

    Every sequence has random blocks of its own, `max_tokens` positions' worth.
    """

    shape: Shape
    qkv: np.ndarray
    sequences: int = 4
    max_tokens: int = 640
    seed: int = 0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self.scale = shape.head_dim**-0.5
        width = -(-self.max_tokens // shape.block_tokens)
        blocks = self.sequences * width + 3
        self.kv = _native.KvCache(2, blocks, shape.block_tokens, shape.kv_heads, shape.head_dim, shape.dtype)
        order = np.random.default_rng(self.seed).permutation(blocks)[: self.sequences * width]
        self.tables = order.reshape(self.sequences, width).astype(I32)
        rows = self.max_tokens * self.sequences
        self.program = _native.Program(
            self.kv,
            max_rows=rows,
            max_logit_rows=rows,
            max_seqs=self.sequences,
            activations=shape.activations,
            max_threads=2,
        )
        cos, sin = identity_rope(self.max_tokens, shape.head_dim)
        x = self.program.embed(_native.Matrix.pack_dense(self.qkv, dtype="f32"))
        q = self.program.rope_kv(x, 1, cos, sin, interleaved=False, heads=shape.heads)
        out = self.program.attention(
            q, 1, heads=shape.heads, scale=self.scale, window=shape.window, softcap=shape.softcap
        )
        self.program.seal(out)

    def step(self, chunks: Sequence[tuple[int, int, Sequence[int]]], threads: int = 1) -> list[np.ndarray]:
        """Each chunk is (sequence, first position, token ids). Returns the chunks' outputs [rows, heads * head_dim]."""
        ids = np.concatenate([np.asarray(chunk[2], I32) for chunk in chunks])
        positions = np.concatenate([np.arange(start, start + len(tokens), dtype=I32) for _, start, tokens in chunks])
        starts = np.cumsum([0, *(len(tokens) for _, _, tokens in chunks)]).astype(I32)
        tables = np.stack([self.tables[sequence] for sequence, _, _ in chunks])
        rows = np.arange(len(ids), dtype=I32)
        out = self.program.run(ids, positions, starts, tables, rows, threads).copy()
        return np.split(out, starts[1:-1])

    def cached(self, sequence: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(k, v) of a sequence's first `tokens` positions, each [tokens, kv_heads, head_dim]."""
        used = self.tables[sequence][: -(-tokens // self.shape.block_tokens)]
        blocks = [self.kv.read(1, int(block)) for block in used]
        return tuple(np.concatenate(part)[:tokens] for part in zip(*blocks, strict=True))  # type: ignore[return-value]

    def expect(self, tokens: Sequence[int], start: int = 0) -> np.ndarray:
        """float64 attention of the sequence `tokens`, rows from `start` on."""
        shape = self.shape
        rows = self.qkv[np.asarray(tokens)]
        q_cols, kv_cols = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q, k, v = np.split(rows, [q_cols, q_cols + kv_cols], axis=1)
        if shape.dtype == "f16":
            k, v = k.astype(np.float16), v.astype(np.float16)
        q = q.reshape(len(tokens), shape.heads, shape.head_dim).astype(np.float64)[start:]
        k, v = (x.reshape(len(tokens), shape.kv_heads, shape.head_dim).astype(np.float64) for x in (k, v))
        return dense_attention(q, k, v, start, self.scale, shape.window, shape.softcap).reshape(len(q), -1)


def dense_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, scale: float, window: int, softcap: float
) -> np.ndarray:
    """The oracle: causal attention of rows at positions `start`, ... to keys at positions 0, ..., in float64."""
    positions, keys = start + np.arange(len(q))[:, None], np.arange(len(k))[None, :]
    seen = keys <= positions
    if window:
        seen &= keys > positions - window
    out = np.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group]
    return out


def run_rows(
    record: Callable[[_native.Program, int], int],
    table: np.ndarray,
    ids: Sequence[int],
    *,
    threads: int = 1,
    activations: str = "f32",
) -> np.ndarray:
    """Runs `record(program, slot of table[ids])` -> slot, on one sequence; the result's rows are those of `ids`."""
    kv = _native.KvCache(1, max(1, len(ids) // 16 + 1), 16, 1, 8, "f32")
    program = _native.Program(
        kv, max_rows=len(ids), max_logit_rows=len(ids), max_seqs=1, activations=activations, max_threads=2
    )
    program.seal(record(program, program.embed(_native.Matrix.pack_dense(table, dtype="f32"))))
    rows = np.arange(len(ids), dtype=I32)
    tables = np.arange(len(ids) // 16 + 1, dtype=I32)[None]
    return program.run(np.asarray(ids, I32), rows, np.array([0, len(ids)], I32), tables, rows, threads).copy()
