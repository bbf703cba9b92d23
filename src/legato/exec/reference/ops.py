"""Every operation in plain NumPy, one row at a time: slow, and meant to be read beside the formulas of `Ops`.

One row at a time also makes it row-invariant: no shape in here depends on how many rows the step has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.exec.batch import Batch
from legato.exec.ops import FloatArray, GateKind
from legato.exec.reference.kv import ReferenceKv

Rows = NDArray[Any]


class ReferenceOps:
    """Eager operations on the rows of one batch, in float32 or float64. Weights are float arrays `[out, in]`."""

    def __init__(self, kv: ReferenceKv, batch: Batch, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.kv = kv
        self.batch = batch
        self.dtype = dtype
        counts = np.diff(batch.seq_row_starts)
        self.row_blocks = np.repeat(batch.block_tables, counts, axis=0)  # [rows, width]: each row's own block table

    def _each(self, function: Callable[[Rows], Rows], x: Rows, cols: int) -> Rows:
        out = np.empty((len(x), cols), self.dtype)
        for row in range(len(x)):
            out[row] = function(x[row])
        return out

    def embed(self, weight: Rows, scale: float) -> Rows:
        """See `Ops.embed`."""
        return np.asarray(weight[self.batch.tokens].astype(self.dtype) * self.dtype(scale))

    def rms_norm(self, x: Rows, weight: FloatArray, eps: float) -> Rows:
        """See `Ops.rms_norm`."""
        return self._each(lambda row: _rms_norm(row, weight, eps), x, x.shape[1])

    def linear(
        self, x: Rows, weights: Sequence[Rows], bias: FloatArray | None = None, residual: Rows | None = None
    ) -> Rows:
        """See `Ops.linear`."""
        matrices = [weight.astype(self.dtype, copy=False) for weight in weights]
        y = self._each(lambda row: np.concatenate([w @ row for w in matrices]), x, sum(len(w) for w in matrices))
        if bias is not None:
            y = y + bias
        return y if residual is None else y + residual

    def rope_kv(
        self,
        qkv: Rows,
        layer: int,
        cos: FloatArray,
        sin: FloatArray,
        *,
        interleaved: bool,
        heads: int,
        q_norm: FloatArray | None = None,
        k_norm: FloatArray | None = None,
        eps: float = 0.0,
    ) -> Rows:
        """See `Ops.rope_kv`."""
        kv_heads, head_dim = self.kv.layout.kv_heads, self.kv.layout.head_dim
        queries = np.empty((len(qkv), heads * head_dim), self.dtype)
        for row, position in enumerate(self.batch.positions):
            q, k, v = np.split(qkv[row].reshape(-1, head_dim), [heads, heads + kv_heads])
            if q_norm is not None:
                q = _rms_norm(q, q_norm, eps)
            if k_norm is not None:
                k = _rms_norm(k, k_norm, eps)
            q = _rotate(q, cos[position], sin[position], interleaved)
            k = _rotate(k, cos[position], sin[position], interleaved)
            queries[row] = q.reshape(-1)
            block, offset = divmod(int(position), self.kv.layout.block_tokens)
            self.kv.write(layer, int(self.row_blocks[row, block]), offset, k, v)
        return queries

    def attention(
        self, q: Rows, layer: int, *, heads: int, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Rows:
        """See `Ops.attention`."""
        kv_heads, head_dim = self.kv.layout.kv_heads, self.kv.layout.head_dim
        out = np.empty_like(q)
        for row, position in enumerate(self.batch.positions):
            stop = int(position) + 1
            start = max(0, stop - window) if window else 0
            keys, values = self.kv.sequence(layer, self.row_blocks[row], start, stop)  # [n, kv_heads, head_dim]
            grouped = q[row].reshape(kv_heads, heads // kv_heads, head_dim)
            scores = np.einsum("hgd,nhd->hgn", grouped, keys.astype(self.dtype)) * self.dtype(scale)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = weights / weights.sum(axis=-1, keepdims=True)
            out[row] = np.einsum("hgn,nhd->hgd", weights, values.astype(self.dtype)).reshape(-1)
        return out

    def gated(self, x: Rows, kind: GateKind) -> Rows:
        """See `Ops.gated`."""
        gate, up = np.split(x, 2, axis=1)
        if kind == "silu":
            with np.errstate(over="ignore"):  # exp of a large number is infinite, and the gate then zero
                return np.asarray(gate / (1 + np.exp(-gate)) * up)
        inner = np.sqrt(2 / np.pi).astype(self.dtype) * (gate + self.dtype(0.044715) * gate**3)
        return np.asarray(self.dtype(0.5) * gate * (1 + np.tanh(inner)) * up)

    def add(self, x: Rows, y: Rows) -> Rows:
        """See `Ops.add`."""
        return x + y

    def softcap(self, x: Rows, cap: float) -> Rows:
        """See `Ops.softcap`."""
        return np.asarray(self.dtype(cap) * np.tanh(x / self.dtype(cap)))

    def select(self, x: Rows) -> Rows:
        """See `Ops.select`."""
        return x[self.batch.logit_rows]


def _rms_norm(x: Rows, weight: FloatArray, eps: float) -> Rows:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + x.dtype.type(eps)) * weight)


def _rotate(x: Rows, cos: FloatArray, sin: FloatArray, interleaved: bool) -> Rows:
    """Rotates the leading 2 * len(cos) elements of each head in `x [heads, head_dim]`."""
    pairs = len(cos)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = x[:, first], x[:, second]
    out = x.copy()
    out[:, first] = a * cos - b * sin
    out[:, second] = b * cos + a * sin
    return out
