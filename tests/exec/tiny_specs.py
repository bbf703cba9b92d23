"""Tiny models, one for each kind of architecture that `ModelSpec` can describe."""

from __future__ import annotations

from dataclasses import replace

from legato.exec.spec import LayerSpec, ModelSpec, RopeSpec

_LLAMA = ModelSpec(
    architecture="llama",
    name="tiny-llama",
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    vocab=101,
    context_length=512,
    norm_eps=1e-5,
    activation="silu",
    layers=(LayerSpec(), LayerSpec(), LayerSpec()),
    ropes=(RopeSpec(base=10_000.0, dim=16, interleaved=True),),
    attention_scale=16**-0.5,
)

TINY_SPECS = {
    "llama": _LLAMA,
    "llama3": replace(
        _LLAMA,
        name="tiny-llama3",
        tied_embeddings=False,
        ropes=(RopeSpec(500_000.0, 16, interleaved=False, factors=(1.0, 1.0, 1.0, 1.4, 3.0, 8.0, 8.0, 8.0)),),
    ),
    "qwen2": replace(
        _LLAMA, name="tiny-qwen2", qkv_bias=True, kv_heads=1, ropes=(RopeSpec(1e6, 16, interleaved=False),)
    ),
    "qwen3": replace(
        _LLAMA,
        name="tiny-qwen3",
        qk_norm=True,
        head_dim=24,
        kv_heads=4,
        attention_scale=24**-0.5,
        ropes=(RopeSpec(1e6, 24, interleaved=False),),
    ),
    "gemma3": replace(
        _LLAMA,
        name="tiny-gemma3",
        qk_norm=True,
        post_norms=True,
        head_dim=32,
        kv_heads=1,
        activation="gelu_tanh",
        embedding_scale=8.0,
        attention_scale=24**-0.5,
        ropes=(
            RopeSpec(1e4, 32, interleaved=False),
            RopeSpec(1e6, 32, interleaved=False, linear_scale=8.0),
        ),
        layers=(LayerSpec(0, 20), LayerSpec(1), LayerSpec(0, 20)),
    ),
    "softcaps": replace(
        _LLAMA,
        name="tiny-softcaps",
        attention_softcap=3.0,
        logit_softcap=2.0,
        ropes=(RopeSpec(1e4, 8, interleaved=False),),
    ),
}
