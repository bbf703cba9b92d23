"""Tiny random models in the Hugging Face format, one a supported architecture. NumPy only: the same everywhere.

`make_tiny(name, folder)` writes config.json and model.safetensors (fp32). tests/golden/tiny.json holds what the library
transformers computes on them for `tiny_prompts()`; tests/parity/make_tiny.py makes that file.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 256
PROMPT_LENGTHS = (5, 37, 100)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_SILU: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0}

# The rope keys are written as published configurations write them.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        **_SILU,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "intermediate_size": 176,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    "llama3": {
        **_COMMON,
        **_SILU,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "mistral": {
        **_COMMON,
        **_SILU,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 3,
        "intermediate_size": 144,
        "head_dim": 24,
        "rope_theta": 10000.0,
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        **_COMMON,
        **_SILU,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 3,
        "intermediate_size": 192,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        **_COMMON,
        **_SILU,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        **_COMMON,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "intermediate_size": 160,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
}


def make_tiny(name: str, folder: Path) -> None:
    """Writes config.json and model.safetensors of CONFIGS[name] into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(tiny_weights(name), folder / "model.safetensors", metadata={"format": "pt"})


def tiny_weights(name: str) -> dict[str, np.ndarray]:
    """fp32 tensors by their Hugging Face names. Each tensor's seed is its own name: their order does not matter."""
    config = CONFIGS[name]
    gemma = config["model_type"] == "gemma3_text"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: dict[str, np.ndarray] = {}

    def draw(key_name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(zlib.crc32(f"{name}/{key_name}".encode())))

    def matrix(key_name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = draw(key_name).standard_normal((rows, columns)) * (gain / np.sqrt(columns))
        tensors[key_name] = values.astype(np.float32)

    def vector(key_name: str, length: int, mean: float, spread: float) -> None:
        tensors[key_name] = (mean + spread * draw(key_name).standard_normal(length)).astype(np.float32)

    def norm(key_name: str, length: int) -> None:
        vector(key_name, length, 0.0 if gemma else 1.0, 0.2)  # Gemma multiplies by 1 + weight

    matrix("model.embed_tokens.weight", VOCABULARY, hidden, gain=1.0 if gemma else 4.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        matrix(prefix + "self_attn.q_proj.weight", query, hidden, gain=1.5)
        matrix(prefix + "self_attn.k_proj.weight", key, hidden, gain=1.5)
        matrix(prefix + "self_attn.v_proj.weight", key, hidden)
        matrix(prefix + "self_attn.o_proj.weight", hidden, query)
        matrix(prefix + "mlp.gate_proj.weight", inner, hidden)
        matrix(prefix + "mlp.up_proj.weight", inner, hidden)
        matrix(prefix + "mlp.down_proj.weight", hidden, inner)
        norm(prefix + "input_layernorm.weight", hidden)
        norm(prefix + "post_attention_layernorm.weight", hidden)
        if config["model_type"] == "qwen2":
            for part, length in (("q", query), ("k", key), ("v", key)):
                vector(prefix + f"self_attn.{part}_proj.bias", length, 0.0, 0.5)
        if config["model_type"] in ("qwen3", "gemma3_text"):
            norm(prefix + "self_attn.q_norm.weight", head)
            norm(prefix + "self_attn.k_norm.weight", head)
        if gemma:
            norm(prefix + "pre_feedforward_layernorm.weight", hidden)
            norm(prefix + "post_feedforward_layernorm.weight", hidden)
    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", VOCABULARY, hidden, gain=4.0)
    return tensors


def tiny_prompts(name: str) -> list[list[int]]:
    """One prompt of random ids for each of PROMPT_LENGTHS."""
    draw = np.random.Generator(np.random.PCG64(zlib.crc32(f"{name}/prompts".encode())))
    return [draw.integers(3, VOCABULARY, length).tolist() for length in PROMPT_LENGTHS]
