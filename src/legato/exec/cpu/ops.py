"""`Ops` that writes down: every call becomes an entry of a native `Program`, which is replayed each step."""

from __future__ import annotations

from collections.abc import Sequence

from legato._native import Matrix, Program
from legato.exec.ops import FloatArray, GateKind

NO_SLOT = -1


class RecordingOps:
    """Tensors are slot numbers of `program`. Row counts and table contents come with each replay, not here."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def embed(self, weight: Matrix, scale: float) -> int:
        """See `Ops.embed`."""
        return self._program.embed(weight, scale)

    def rms_norm(self, x: int, weight: FloatArray, eps: float) -> int:
        """See `Ops.rms_norm`."""
        return self._program.rms_norm(x, weight, eps)

    def linear(
        self, x: int, weights: Sequence[Matrix], bias: FloatArray | None = None, residual: int | None = None
    ) -> int:
        """See `Ops.linear`. Integer activations of `x` are made once for all `weights`."""
        return self._program.linear(x, list(weights), bias, NO_SLOT if residual is None else residual)

    def rope_kv(
        self,
        qkv: int,
        layer: int,
        cos: FloatArray,
        sin: FloatArray,
        *,
        interleaved: bool,
        heads: int,
        q_norm: FloatArray | None = None,
        k_norm: FloatArray | None = None,
        eps: float = 0.0,
    ) -> int:
        """See `Ops.rope_kv`."""
        return self._program.rope_kv(
            qkv, layer, cos, sin, interleaved=interleaved, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=eps
        )

    def attention(self, q: int, layer: int, *, heads: int, scale: float, window: int = 0, softcap: float = 0.0) -> int:
        """See `Ops.attention`."""
        return self._program.attention(q, layer, heads=heads, scale=scale, window=window, softcap=softcap)

    def gated(self, x: int, kind: GateKind) -> int:
        """See `Ops.gated`."""
        return self._program.gated(x, kind)

    def add(self, x: int, y: int) -> int:
        """See `Ops.add`."""
        return self._program.add(x, y)

    def softcap(self, x: int, cap: float) -> int:
        """See `Ops.softcap`."""
        return self._program.softcap(x, cap)

    def select(self, x: int) -> int:
        """See `Ops.select`."""
        return self._program.select(x)
