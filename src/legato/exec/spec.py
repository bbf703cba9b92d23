"""`ModelSpec`: everything that tells one decoder-only transformer from another, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary table. Angle of pair j at position p: p * base^(-2j/dim) / factors[j] / linear_scale.

    `dim`: rotated leading elements of a head (even). `interleaved`: pairs are (2j, 2j+1), as in GGUF files of the
    Llama family, else (j, j + dim/2). `factors`: dim/2 divisors of the frequencies (Llama 3's scaling, already
    resolved), or None.
    """

    base: float
    dim: int
    interleaved: bool
    linear_scale: float = 1.0
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. `window`: a query at p sees keys in (p - window, p]; None: all of [0, p]."""

    rope: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions and options of one model. Sizes are elements; `ffn` is the width of gate and up each.

    `first_token`: what sequences begin with, if the file names one; sampling activations without it would mislead.
    """

    architecture: str
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    norm_eps: float
    activation: Activation
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    attention_scale: float
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    tied_embeddings: bool = True
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    first_token: int | None = None

    @property
    def q_width(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection."""
        return self.kv_heads * self.head_dim
