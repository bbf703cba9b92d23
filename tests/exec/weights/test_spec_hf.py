"""config.json, in the style of transformers 4 and 5, becomes the right spec, or a refusal that says why."""

from __future__ import annotations

import math
from typing import Any

import pytest

from exec.weights.synthetic import config
from legato.errors import ModelCorrupt, ModelError, ModelUnsupported
from legato.exec.spec import LayerSpec, ModelSpec, RopeSpec
from legato.exec.weights.spec_hf import spec_from_config

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def spec(model_type: str, **changes: Any) -> ModelSpec:
    return spec_from_config(config(model_type, **changes), "config.json")


def test_llama() -> None:
    found = spec("llama")
    assert found.ropes == (RopeSpec(10000.0, 64, interleaved=False),)
    assert (found.hidden, found.heads, found.kv_heads, found.head_dim, found.ffn) == (256, 4, 2, 64, 512)
    assert found.attention_scale == 0.125 and not found.tied_embeddings and found.activation == "silu"


def test_sequences_begin_with_the_token_that_the_config_names() -> None:
    assert spec("llama", bos_token_id=1).first_token == 1
    for other in (None, [1], 10**9):
        assert spec("llama", bos_token_id=other).first_token is None


def test_head_size_defaults_to_its_share_of_the_hidden_size() -> None:
    assert spec("llama", head_dim=...).head_dim == 64
    assert spec("qwen3", head_dim=...).head_dim == 128


@pytest.mark.parametrize("style", ["transformers 4", "transformers 5", "old key"])
def test_llama3_scaling_divides_long_waves_only(style: str) -> None:
    if style == "transformers 5":
        found = spec("llama", rope_theta=..., rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    elif style == "old key":
        old = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
        found = spec("llama", rope_theta=500000.0, rope_scaling=old)
    else:
        found = spec("llama", rope_theta=500000.0, rope_scaling=LLAMA3)
    rope = found.ropes[0]
    assert rope.base == 500000.0 and rope.factors is not None and len(rope.factors) == 32
    assert rope.factors[0] == 1.0 and rope.factors[-1] == 32.0
    assert list(rope.factors) == sorted(rope.factors)
    middle = [factor for factor in rope.factors if 1.0 < factor < 32.0]
    assert middle
    at = rope.factors.index(middle[0])
    wavelength = 2 * math.pi * 500000.0 ** (2 * at / 64)
    smooth = (8192 / wavelength - 1.0) / 3.0
    assert middle[0] == pytest.approx(1 / ((1 - smooth) / 32 + smooth))


def test_linear_scaling() -> None:
    assert spec("llama", rope_scaling={"type": "linear", "factor": 4.0}).ropes[0].linear_scale == 4.0


def test_mistral_windows_every_layer_unless_null() -> None:
    assert spec("mistral", sliding_window=128).layers == (LayerSpec(0, 128),) * 2
    assert spec("mistral", sliding_window=...).layers == (LayerSpec(0, 4096),) * 2, "transformers' default"
    assert spec("mistral", sliding_window=None).layers == (LayerSpec(),) * 2


def test_qwen2_windows_only_on_request_and_from_a_layer_on() -> None:
    assert spec("qwen2", sliding_window=128).layers == (LayerSpec(),) * 2
    assert spec("qwen2").qkv_bias
    windowed = spec("qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=1)
    assert windowed.layers == (LayerSpec(), LayerSpec(0, 128))
    listed = spec(
        "qwen3", sliding_window=128, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]
    )
    assert listed.layers == (LayerSpec(0, 128), LayerSpec()) and listed.qk_norm


def test_gemma3_in_both_styles() -> None:
    four = spec(
        "gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
        query_pre_attn_scalar=100,
    )
    five = spec(
        "gemma3_text",
        rope_theta=...,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=100,
    )
    assert four == five
    assert four.layers == (LayerSpec(1, 64), LayerSpec(0, None))
    assert four.ropes == (RopeSpec(1e6, 64, False, 8.0), RopeSpec(10000.0, 64, False))
    assert four.attention_scale == 0.1 and four.embedding_scale == 16.0 and four.activation == "gelu_tanh"


def test_a_large_gemma3_leaves_out_what_transformers_fills_in() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    found = spec_from_config({"model_type": "gemma3", "text_config": text}, "config.json")
    assert (found.heads, found.kv_heads, found.head_dim, found.vocab) == (8, 4, 256, 262208)
    assert found.tied_embeddings and found.ropes[0].base == 1e6 and found.ropes[0].linear_scale == 8.0
    assert [at for at, layer in enumerate(found.layers) if layer.window is None] == [5, 11, 17, 23, 29]


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "message"),
    [
        ("gemma2", {}, ModelUnsupported, "'gemma2' is not implemented. Implemented"),
        ("mamba", {}, ModelUnsupported, "recurrent"),
        ("qwen3_moe", {}, ModelUnsupported, "mixture of experts"),
        ("qwen3_next", {}, ModelUnsupported, "recurrent"),
        ("lfm2", {}, ModelUnsupported, "convolutional"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ModelUnsupported, "'yarn'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ModelUnsupported, "'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, ModelCorrupt, "factor is missing"),
        ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ModelCorrupt, "must exceed"),
        ("llama", {"rope_scaling": 3}, ModelCorrupt, "rope_scaling.*an object"),
        ("llama", {"partial_rotary_factor": 0.5}, ModelUnsupported, "partial_rotary_factor"),
        ("llama", {"attention_bias": True}, ModelUnsupported, "attention_bias"),
        ("llama", {"mlp_bias": True}, ModelUnsupported, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, ModelUnsupported, "hidden_act 'gelu'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, ModelUnsupported, "gptq.*GGUF"),
        ("gemma3_text", {"use_bidirectional_attention": True}, ModelUnsupported, "bidirectional"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear_attention"] * 2},
         ModelUnsupported, "layer_types"),
        ("llama", {"hidden_size": ...}, ModelCorrupt, "hidden_size is missing"),
        ("llama", {"hidden_size": "big"}, ModelCorrupt, "integer"),
        ("llama", {"num_hidden_layers": 10**9}, ModelCorrupt, "between"),
        ("llama", {"num_key_value_heads": 3}, ModelCorrupt, "multiple of 3"),
        ("llama", {"head_dim": 63}, ModelCorrupt, "odd"),
        ("llama", {"rope_theta": float("inf")}, ModelCorrupt, "finite"),
        ("llama", {"tie_word_embeddings": "yes"}, ModelCorrupt, "true or false"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_or_cannot_be_is_named(
    model_type: str, changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec(model_type, **changes)
