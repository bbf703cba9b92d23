"""One decoder-only transformer for every architecture: written once against `Ops`, driven by `ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import numpy as np

from legato.errors import ModelCorrupt
from legato.exec.ops import FloatArray, Ops, Tensor, Weight
from legato.exec.rope import RopeTable
from legato.exec.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Weight]):
    """Weights of one layer. Matrices are `[out, in]` in the backend's own form, norms and biases float32 vectors."""

    attention_norm: FloatArray
    qkv: tuple[Weight, Weight, Weight]
    o: Weight
    ffn_norm: FloatArray
    gate_up: tuple[Weight, Weight]
    down: Weight
    qkv_bias: FloatArray | None = None
    q_norm: FloatArray | None = None
    k_norm: FloatArray | None = None
    post_attention_norm: FloatArray | None = None
    post_ffn_norm: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[Weight]):
    """All a decoder reads. `output` is the same object as `embedding` when the two are tied."""

    embedding: Weight
    layers: tuple[LayerWeights[Weight], ...]
    output_norm: FloatArray
    output: Weight
    ropes: tuple[RopeTable, ...]


def forward(ops: Ops[Tensor, Weight], spec: ModelSpec, weights: DecoderWeights[Weight]) -> Tensor:
    """Logits `[logit rows, vocab]` of one step; every row's keys and values are in the KV cache afterwards."""
    x = ops.embed(weights.embedding, spec.embedding_scale)
    for index, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        a = _attention(ops, spec, weights, index, layer, w, x)
        if index == len(spec.layers) - 1:
            # Nothing reads the last layer's output but the logits: from here on only their rows are computed.
            a, x = ops.select(a), ops.select(x)
        x = _project(ops, spec, a, w.o, w.post_attention_norm, x)
        h = ops.rms_norm(x, w.ffn_norm, spec.norm_eps)
        h = ops.gated(ops.linear(h, w.gate_up), spec.activation)
        x = _project(ops, spec, h, w.down, w.post_ffn_norm, x)
    logits = ops.linear(ops.rms_norm(x, weights.output_norm, spec.norm_eps), (weights.output,))
    return ops.softcap(logits, spec.logit_softcap) if spec.logit_softcap else logits


def _attention(
    ops: Ops[Tensor, Weight],
    spec: ModelSpec,
    weights: DecoderWeights[Weight],
    index: int,
    layer: LayerSpec,
    w: LayerWeights[Weight],
    x: Tensor,
) -> Tensor:
    table = weights.ropes[layer.rope]
    q = ops.rope_kv(
        ops.linear(ops.rms_norm(x, w.attention_norm, spec.norm_eps), w.qkv, w.qkv_bias),
        index,
        table.cos,
        table.sin,
        interleaved=table.interleaved,
        heads=spec.heads,
        q_norm=w.q_norm,
        k_norm=w.k_norm,
        eps=spec.norm_eps,
    )
    return ops.attention(
        q,
        index,
        heads=spec.heads,
        scale=spec.attention_scale,
        window=layer.window or 0,
        softcap=spec.attention_softcap or 0.0,
    )


def _project(
    ops: Ops[Tensor, Weight], spec: ModelSpec, h: Tensor, weight: Weight, post_norm: FloatArray | None, x: Tensor
) -> Tensor:
    """The residual stream after a block: x + W h, or x + norm(W h) where the model has post norms."""
    if post_norm is None:
        return ops.linear(h, (weight,), residual=x)
    return ops.add(x, ops.rms_norm(ops.linear(h, (weight,)), post_norm, spec.norm_eps))


def collect_weights(
    spec: ModelSpec,
    ropes: tuple[RopeTable, ...],
    matrix: Callable[[str, int, int], Weight],
    vector: Callable[[str, int], FloatArray],
) -> DecoderWeights[Weight]:
    """Weights under their canonical (GGUF) names, each read once, in file order.

    `matrix(name, out, in)` and `vector(name, length)` read one tensor and raise `ModelCorrupt` when it is missing or of
    another shape.
    """
    hidden, q, kv = spec.hidden, spec.q_width, spec.kv_width
    embedding = matrix("token_embd.weight", spec.vocab, hidden)
    layers = []
    for i in range(len(spec.layers)):
        p = f"blk.{i}."
        layers.append(
            LayerWeights(
                attention_norm=vector(p + "attn_norm.weight", hidden),
                qkv=(
                    matrix(p + "attn_q.weight", q, hidden),
                    matrix(p + "attn_k.weight", kv, hidden),
                    matrix(p + "attn_v.weight", kv, hidden),
                ),
                o=matrix(p + "attn_output.weight", hidden, q),
                ffn_norm=vector(p + "ffn_norm.weight", hidden),
                gate_up=(
                    matrix(p + "ffn_gate.weight", spec.ffn, hidden),
                    matrix(p + "ffn_up.weight", spec.ffn, hidden),
                ),
                down=matrix(p + "ffn_down.weight", hidden, spec.ffn),
                qkv_bias=np.concatenate(
                    [
                        vector(p + "attn_q.bias", q),
                        vector(p + "attn_k.bias", kv),
                        vector(p + "attn_v.bias", kv),
                    ]
                )
                if spec.qkv_bias
                else None,
                q_norm=vector(p + "attn_q_norm.weight", spec.head_dim) if spec.qk_norm else None,
                k_norm=vector(p + "attn_k_norm.weight", spec.head_dim) if spec.qk_norm else None,
                post_attention_norm=vector(p + "post_attention_norm.weight", hidden) if spec.post_norms else None,
                post_ffn_norm=vector(p + "post_ffw_norm.weight", hidden) if spec.post_norms else None,
            )
        )
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        output_norm=vector("output_norm.weight", hidden),
        output=embedding if spec.tied_embeddings else matrix("output.weight", spec.vocab, hidden),
        ropes=ropes,
    )


def expect_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises `ModelCorrupt` when tensor `name` does not have the shape the model's dimensions ask for."""
    if found != expected:
        raise ModelCorrupt(f"tensor {name} has shape {list(found)}, the model's dimensions need {list(expected)}")
