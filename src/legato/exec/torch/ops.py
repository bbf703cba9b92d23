"""Every operation as torch has it, eagerly. Fast, and not row-invariant: vendor products round by shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from legato.exec.ops import FloatArray, GateKind
from legato.exec.torch.kv import TorchKv
from legato.exec.torch.rows import Group, Rows


class Vectors:
    """Norms, biases and tables on a device: each NumPy array is brought there once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there: dict[int, tuple[FloatArray, torch.Tensor]] = {}

    def __call__(self, values: FloatArray) -> torch.Tensor:
        """The same, there."""
        found = self._there.get(id(values))
        if found is None:  # the array is kept too, or another one could get its id
            found = self._there[id(values)] = values, torch.from_numpy(values).to(self._device)
        return found[1]


class TorchOps:
    """Operations on the rows of one batch. The residual stream is float32; products are of the weights' type."""

    def __init__(self, kv: TorchKv, rows: Rows, vectors: Vectors) -> None:
        self._kv = kv
        self._rows = rows
        self._vectors = vectors

    def embed(self, weight: torch.Tensor, scale: float) -> torch.Tensor:
        """See `Ops.embed`."""
        return weight[self._rows.tokens].float() * scale

    def rms_norm(self, x: torch.Tensor, weight: FloatArray, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self._vectors(weight)

    def linear(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        bias: FloatArray | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.linear`."""
        parts = [functional.linear(x.to(weight.dtype), weight).float() for weight in weights]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if bias is not None:
            y = y + self._vectors(bias)
        return y if residual is None else y + residual

    def rope_kv(
        self,
        qkv: torch.Tensor,
        layer: int,
        cos: FloatArray,
        sin: FloatArray,
        *,
        interleaved: bool,
        heads: int,
        q_norm: FloatArray | None = None,
        k_norm: FloatArray | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """See `Ops.rope_kv`."""
        kv_heads, head_dim = self._kv.layout.kv_heads, self._kv.layout.head_dim
        rows = qkv.view(len(qkv), -1, head_dim)
        q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        turns = [self._vectors(table)[self._rows.positions][:, None, :] for table in (cos, sin)]
        q, k = (_rotate(x, turns[0], turns[1], interleaved) for x in (q, k))
        self._kv.write(layer, self._rows.blocks, self._rows.offsets, k, v)
        return q.flatten(1)

    def attention(
        self, q: torch.Tensor, layer: int, *, heads: int, scale: float, window: int = 0, softcap: float = 0.0
    ) -> torch.Tensor:
        """See `Ops.attention`. Sequences with equally many rows go together, over the longest one's blocks."""
        out = torch.empty_like(q)
        for group in self._rows.groups:
            sequences, n = group.rows.shape
            asked = q[group.rows.flatten()].view(sequences, n, heads, -1).transpose(1, 2)
            keys, values = (part.float() for part in self._kv.sequences(layer, group.blocks))
            seen = _seen(group, keys.shape[2], window)
            if softcap:
                found = _capped(asked, keys, values, seen, scale, softcap)
            else:
                found = functional.scaled_dot_product_attention(
                    asked, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
                )
            out[group.rows.flatten()] = found.transpose(1, 2).reshape(sequences * n, -1)
        return out

    def gated(self, x: torch.Tensor, kind: GateKind) -> torch.Tensor:
        """See `Ops.gated`."""
        gate, up = x.chunk(2, dim=1)
        act = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
        return act * up

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Ops.add`."""
        return x + y

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """See `Ops.softcap`."""
        return cap * torch.tanh(x / cap)

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ops.select`."""
        return x[self._rows.logit_rows]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates the leading 2 * pairs elements of each head in `x [rows, heads, head_dim]`."""
    pairs = cos.shape[-1]
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = x[..., first], x[..., second]
    out = x.clone()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def _seen(group: Group, keys: int, window: int) -> torch.Tensor:
    """`[sequences, 1, n, keys]`: whether a row sees a position."""
    at = group.positions[:, :, None]
    key = torch.arange(keys, device=at.device)
    seen = key <= at
    if window:
        seen &= key > at - window
    return seen[:, None]


def _capped(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """Attention with `cap * tanh(score / cap)`, which the library's has no place for."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = cap * torch.tanh(q @ keys.transpose(2, 3) * scale / cap)
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ values
