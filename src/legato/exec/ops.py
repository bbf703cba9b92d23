"""The operations a decoder-only transformer needs: a backend implements `Ops`, `decoder.forward` calls nothing else.

A *tensor* is opaque to the decoder: the reference computes it at once, the CPU backend hands out slot numbers while it
records a program. It stands for a matrix of float32 `[rows, cols]`, one row a token of the step's ragged batch.

**Row invariance** binds every method: an output row is produced by the same sequence of floating-point operations
whatever the number of rows, whichever rows stand beside it, however the threads are counted. So a prompt computed in
chunks, in company, or again after preemption gives the same bits. `tests/exec/test_ops_contract.py` holds every backend
to the numbers, `tests/exactness` to the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
GateKind = Literal["silu", "gelu_tanh"]

Tensor = TypeVar("Tensor")
Weight = TypeVar("Weight")
Weight_contra = TypeVar("Weight_contra", contravariant=True)


class Ops(Protocol[Tensor, Weight_contra]):
    """Operations on the rows of one step. Vectors (norms, biases, tables) are plain float32 NumPy arrays."""

    def embed(self, weight: Weight_contra, scale: float) -> Tensor:
        """`[rows, hidden]`: the weight row of each token id, times `scale`."""

    def rms_norm(self, x: Tensor, weight: FloatArray, eps: float) -> Tensor:
        """`[rows, cols]`: x / sqrt(mean(x**2) + eps) * weight, the mean over the columns of a row."""

    def linear(
        self,
        x: Tensor,
        weights: Sequence[Weight_contra],
        bias: FloatArray | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`[rows, sum(out)]`: x @ W.T of each `W [out, in]` side by side, plus `bias [sum(out)]`, plus `residual`."""

    def rope_kv(
        self,
        qkv: Tensor,
        layer: int,
        cos: FloatArray,
        sin: FloatArray,
        *,
        interleaved: bool,
        heads: int,
        q_norm: FloatArray | None = None,
        k_norm: FloatArray | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """`[rows, heads * head_dim]`: the rotated queries. Writes rotated keys and the values into the KV cache.

        `qkv` has the columns of q, k and v side by side. `q_norm`, `k_norm [head_dim]`: RMS norm of each head before
        the rotation. `cos`, `sin [positions, dim / 2]` are indexed by absolute position; elements of a head from
        `dim` on are not rotated. Pair j is (2j, 2j+1) if `interleaved`, else (j, j + dim/2):
        a' = a cos - b sin, b' = b cos + a sin.
        """

    def attention(
        self, q: Tensor, layer: int, *, heads: int, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        """`[rows, heads * head_dim]`: softmax(scale * q k) v over the cached keys of the row's own sequence.

        The mask is by absolute position: a row at p sees keys [0, p], with `window` > 0 only (p - window, p]. With
        `softcap` > 0 a score s becomes softcap * tanh(s / softcap). Query head h reads KV head h // (heads / kv_heads).
        The keys of this step's rows are in the cache already: `rope_kv` of the layer comes first.
        """

    def gated(self, x: Tensor, kind: GateKind) -> Tensor:
        """`[rows, cols / 2]`: act(gate) * up, of the columns `[gate | up]`; act is SiLU or the tanh form of GELU."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """`[rows, cols]`: x + y."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """`[rows, cols]`: cap * tanh(x / cap)."""

    def select(self, x: Tensor) -> Tensor:
        """`[logit rows, cols]`: the rows whose logits the step needs, in order. May be none."""
