"""`ModelSpec` from a Hugging Face config.json, in the style of transformers 4 (rope_scaling) or 5 (rope_parameters)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from legato.errors import ModelCorrupt, ModelUnsupported
from legato.exec.spec import Activation, LayerSpec, ModelSpec, RopeSpec
from legato.exec.weights.architectures import unsupported
from legato.exec.weights.fields import MAX_CONTEXT, MAX_LAYERS, Fields, check_dimensions

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}

# What transformers' Gemma3TextConfig fills in: the larger checkpoints leave out what equals it.
_GEMMA3_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
_LOCAL_BASE = 10_000.0
_SLIDING, _FULL = "sliding_attention", "full_attention"


def spec_from_config(config: Mapping[str, object], source: str) -> ModelSpec:
    """The spec that a config.json describes. Raises ModelUnsupported or ModelCorrupt."""
    outer = Fields(config, source)
    model_type = outer.text("model_type")
    architecture = _ARCHITECTURES.get(model_type)
    if architecture is None:
        raise unsupported(source, model_type)
    if "quantization_config" in outer:
        raise ModelUnsupported(
            f"{source}: quantised safetensors ({_method(outer)}) are not implemented; use a GGUF file, or the "
            "unquantised model with --quantize"
        )
    fields = outer
    if model_type == "gemma3":
        section = outer.section("text_config")
        if section is None:
            raise ModelCorrupt(f"{source}: text_config is missing")
        fields = section
    if architecture == "gemma3":
        fields = fields.with_defaults(_GEMMA3_DEFAULTS)
    return _spec(fields, architecture, outer)


def _method(outer: Fields) -> str:
    section = outer.section("quantization_config")
    return "" if section is None else section.text("quant_method", "unknown method")[:40]


def _spec(fields: Fields, architecture: str, outer: Fields) -> ModelSpec:
    gemma = architecture == "gemma3"
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", 128 if architecture == "qwen3" else max(1, hidden // heads))
    check_dimensions(fields.source, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    _refuse_biases(fields)
    if fields.flag("use_bidirectional_attention", False):
        raise ModelUnsupported(f"{fields.source}: bidirectional attention is not implemented")
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab = fields.integer("vocab_size")
    return ModelSpec(
        architecture=architecture,
        name=outer.text("_name_or_path", architecture) or architecture,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=fields.integer("intermediate_size"),
        vocab=vocab,
        context_length=fields.integer("max_position_embeddings", high=MAX_CONTEXT),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, gemma),
        layers=_layers(fields, architecture, layers),
        ropes=_gemma3_ropes(fields, head_dim) if gemma else (_plain_rope(fields, head_dim),),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5 if gemma else 1.0 / math.sqrt(head_dim),
        # transformers rounds it to the type of the weights; in fp32, which is what is computed here, it does not.
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        tied_embeddings=outer.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False)),
        attention_softcap=_optional(fields, "attn_logit_softcapping"),
        logit_softcap=_optional(fields, "final_logit_softcapping"),
        first_token=outer.token_id("bos_token_id", vocab),
    )


def _refuse_biases(fields: Fields) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key, False):
            raise ModelUnsupported(f"{fields.source}: {key} is not implemented (Qwen2's QKV biases are)")


def _activation(fields: Fields, gemma: bool) -> Activation:
    key, wanted = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    if (found := fields.text(key, wanted)) != wanted:
        raise ModelUnsupported(f"{fields.source}: {key} {found[:40]!r} is not implemented here; {wanted} is")
    return "gelu_tanh" if gemma else "silu"


def _optional(fields: Fields, key: str) -> float | None:
    return fields.number(key) if key in fields else None


def _layers(fields: Fields, architecture: str, layers: int) -> tuple[LayerSpec, ...]:
    """Windows per layer, by the rules of each transformers config class."""
    local_rope = 1 if architecture == "gemma3" else 0
    window = _window(fields, architecture)
    full, sliding = LayerSpec(0, None), LayerSpec(local_rope, window)
    if window is None and architecture != "gemma3":
        return (full,) * layers
    if architecture == "mistral":
        return (sliding,) * layers
    if (kinds := fields.raw("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_SLIDING, _FULL) for kind in kinds):
            raise ModelUnsupported(
                f"{fields.source}: layer_types must be {layers} times {_SLIDING} or {_FULL}; others are not implemented"
            )
        return tuple(sliding if kind == _SLIDING else full for kind in kinds)
    if architecture == "gemma3":
        period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
        return tuple(full if (layer + 1) % period == 0 else sliding for layer in range(layers))
    first = fields.integer("max_window_layers", 28, low=0)
    return tuple(sliding if layer >= first else full for layer in range(layers))


def _window(fields: Fields, architecture: str) -> int | None:
    if architecture == "llama":
        return None
    if architecture in ("qwen2", "qwen3") and not fields.flag("use_sliding_window", False):
        return None
    if architecture == "mistral" and fields.is_null("sliding_window"):
        return None
    return fields.integer("sliding_window", 4096, high=MAX_CONTEXT)


def _plain_rope(fields: Fields, head_dim: int) -> RopeSpec:
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    base = fields.number("rope_theta", 10_000.0)
    return _rope(rope, base, head_dim, fields)


def _gemma3_ropes(fields: Fields, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """(global, local). Scaling applies to the global one."""
    base, local_base = fields.number("rope_theta"), fields.number("rope_local_base_freq", _LOCAL_BASE)
    rope, local = fields.section("rope_scaling"), None
    if (parameters := fields.section("rope_parameters")) is not None:
        rope, local = parameters.section(_FULL), parameters.section(_SLIDING)
    return _rope(rope, base, head_dim, fields), _rope(local, local_base, head_dim, fields)


def _rope(rope: Fields | None, base: float, head_dim: int, fields: Fields) -> RopeSpec:
    if fields.number("partial_rotary_factor", 1.0) != 1.0 or (
        rope is not None and rope.number("partial_rotary_factor", 1.0) != 1.0
    ):
        raise ModelUnsupported(f"{fields.source}: partial_rotary_factor is not implemented")
    if rope is None:
        return RopeSpec(base, head_dim, interleaved=False)
    base = rope.number("rope_theta", base)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeSpec(base, head_dim, interleaved=False)
    if kind == "linear":
        return RopeSpec(base, head_dim, interleaved=False, linear_scale=rope.number("factor"))
    if kind == "llama3":
        return RopeSpec(base, head_dim, interleaved=False, factors=_llama3_factors(rope, base, head_dim, fields))
    raise ModelUnsupported(
        f"{fields.source}: RoPE scaling {kind[:40]!r} is not implemented; implemented: default, linear, llama3"
    )


def _llama3_factors(rope: Fields, base: float, dim: int, fields: Fields) -> tuple[float, ...]:
    """Divisors of the frequencies, from transformers' `_compute_llama3_parameters`: long waves by `factor`, short ones
    by 1, those between interpolated."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    trained = rope.number("original_max_position_embeddings", fields.number("max_position_embeddings"))
    if high <= low:
        raise ModelCorrupt(f"{rope.source}: high_freq_factor {high} must exceed low_freq_factor {low}")
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / dim)
        if wavelength > trained / low:
            factors.append(factor)
        elif wavelength < trained / high:
            factors.append(1.0)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
