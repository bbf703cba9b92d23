"""`ModelSpec` from the key-values of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from legato.errors import ModelCorrupt, ModelUnsupported
from legato.exec.spec import LayerSpec, ModelSpec, RopeSpec
from legato.exec.weights.architectures import unsupported
from legato.exec.weights.fields import MAX_CONTEXT, MAX_LAYERS, Fields, check_dimensions

GEMMA3_LOCAL_BASE = 10000.0  # transformers Gemma3TextConfig.rope_local_base_freq; older GGUF files do not carry it
_GEMMA3_PATTERN = 6  # five sliding layers, then a global one
_GEMMA3_27B_LAYERS = 62
_IMPLEMENTED = ("llama", "qwen2", "qwen3", "gemma3")


def spec_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
    rope_factors: Sequence[float] | None = None,
) -> ModelSpec:
    """The spec that `metadata` and the tensor directory describe.

    `shapes`: of every tensor, outermost first. `rope_factors`: the values of `rope_freqs.weight`, if the file has it.
    Raises ModelUnsupported for what is not implemented and ModelCorrupt for what cannot be.
    """
    general = Fields(metadata, source)
    architecture = general.text("general.architecture")
    if architecture not in _IMPLEMENTED:
        raise unsupported(source, architecture)
    fields = Fields(metadata, source, architecture + ".")
    if fields.integer("expert_count", 0, low=0):
        raise ModelUnsupported(f"{source}: a mixture of experts is not implemented")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", heads)
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    check_dimensions(source, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if (value_dim := fields.integer("attention.value_length", head_dim)) != head_dim:
        raise ModelUnsupported(f"{source}: keys of {head_dim} and values of {value_dim} elements are not implemented")
    layers = fields.integer("block_count", high=MAX_LAYERS)
    gemma = architecture == "gemma3"
    vocab = _vocab(general, shapes, source)
    return ModelSpec(
        architecture=architecture,
        name=general.text("general.name", architecture),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=fields.integer("feed_forward_length"),
        vocab=vocab,
        context_length=fields.integer("context_length", high=MAX_CONTEXT),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gemma else "silu",
        layers=_gemma3_layers(fields, layers) if gemma else _plain_layers(fields, layers),
        ropes=_ropes(fields, architecture, head_dim, rope_factors),
        attention_scale=_attention_scale(fields, gemma, layers, hidden, heads, head_dim),
        # fp32 as in llama.cpp and in transformers run in fp32. (In bf16 transformers rounds it: 25.25 for sqrt(640).)
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        tied_embeddings="output.weight" not in shapes,
        attention_softcap=_softcap(fields, "attn_logit_softcapping"),
        logit_softcap=_softcap(fields, "final_logit_softcapping"),
        first_token=_first_token(general, vocab),
    )


def _first_token(general: Fields, vocab: int) -> int | None:
    if general.raw("tokenizer.ggml.add_bos_token") is False:
        return None
    return general.token_id("tokenizer.ggml.bos_token_id", vocab)


def _vocab(general: Fields, shapes: Mapping[str, tuple[int, ...]], source: str) -> int:
    """Rows of the embedding; may exceed the tokenizer's vocabulary (padding), never the reverse."""
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise ModelCorrupt(f"{source}: tensor token_embd.weight is missing or not a matrix")
    tokens = general.raw("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > shape[0]:
        raise ModelCorrupt(f"{source}: the tokenizer has {len(tokens):,} tokens, the embedding {shape[0]:,} rows")
    return shape[0]


def _attention_scale(fields: Fields, gemma: bool, layers: int, hidden: int, heads: int, head_dim: int) -> float:
    """GGUF does not carry Gemma's query_pre_attn_scalar: it is the head dimension but in the 27B model."""
    if "attention.scale" in fields:
        return fields.number("attention.scale")
    if gemma and layers == _GEMMA3_27B_LAYERS:
        return 1.0 / math.sqrt(hidden / heads)
    return 1.0 / math.sqrt(head_dim)


def _plain_layers(fields: Fields, layers: int) -> tuple[LayerSpec, ...]:
    window = fields.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT) or None
    return (LayerSpec(rope=0, window=window),) * layers


def _gemma3_layers(fields: Fields, layers: int) -> tuple[LayerSpec, ...]:
    window = fields.integer("attention.sliding_window", high=MAX_CONTEXT)
    every, local = LayerSpec(rope=0, window=None), LayerSpec(rope=1, window=window)
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # one flag a layer: does it slide?
        if len(pattern) != layers:
            raise ModelCorrupt(
                f"{fields.source}: sliding_window_pattern has {len(pattern)} entries for {layers} layers"
            )
        return tuple(local if slides else every for slides in pattern)
    period = fields.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    return tuple(every if (layer + 1) % period == 0 else local for layer in range(layers))


def _ropes(fields: Fields, architecture: str, head_dim: int, factors: Sequence[float] | None) -> tuple[RopeSpec, ...]:
    dim = fields.integer("rope.dimension_count", head_dim, low=2)
    if dim > head_dim or dim % 2:
        raise ModelCorrupt(f"{fields.source}: rope.dimension_count {dim} does not fit a head of {head_dim}")
    if factors is not None and (len(factors) != dim // 2 or not all(f > 0 and math.isfinite(f) for f in factors)):
        raise ModelCorrupt(f"{fields.source}: rope_freqs.weight must be {dim // 2} positive numbers")
    base = fields.number("rope.freq_base", 10000.0)
    scale = _linear_scale(fields)
    # convert_hf_to_gguf permutes Q and K of the Llama family only
    interleaved = architecture == "llama"
    main = RopeSpec(base, dim, interleaved, scale, None if factors is None else tuple(map(float, factors)))
    if architecture != "gemma3":
        return (main,)
    local = RopeSpec(fields.number("rope.freq_base_swa", GEMMA3_LOCAL_BASE), dim, interleaved)
    return (main, local)


def _linear_scale(fields: Fields) -> float:
    if "rope.scaling.type" not in fields:  # files older than the key
        return fields.number("rope.scale_linear", 1.0)
    kind = fields.text("rope.scaling.type")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise ModelUnsupported(f"{fields.source}: RoPE scaling {kind[:40]!r} is not implemented; linear and llama3 are")
    return fields.number("rope.scaling.factor", 1.0)


def _softcap(fields: Fields, key: str) -> float | None:
    return fields.number(key) if key in fields else None
