"""Tiny models with random weights, written as GGUF files and safetensors folders."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 256, 4, 2, 64, 512, 96, 2

BASE_KEYS: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
ARCHITECTURE_KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    "gemma3": {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": 64,
        "rope.freq_base": 1e6,
    },
}


def gguf_shapes(architecture: str, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a tiny model of this architecture, written down by hand."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if architecture == "qwen2":
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if architecture in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        if architecture == "gemma3":
            block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    type_name: str = "F32",
    keys: Mapping[str, Any] | None = None,
    tied: bool = False,
    drop: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    reshape: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a model and returns the values its tensors stand for. `keys`: with the architecture's prefix left out, or
    whole if they hold a "tokenizer." or "general." key; None removes one."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = {**BASE_KEYS, **ARCHITECTURE_KEYS.get(architecture, {}), **(keys or {})}
    for key, value in settings.items():
        if value is not None:
            whole = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
            _add_key(writer, whole, value)
    shapes = {name: shape for name, shape in gguf_shapes(architecture, tied).items() if name not in drop}
    shapes |= reshape or {}
    rng = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        kind = GGMLQuantizationType[type_name if len(shape) == 2 else "F32"]
        raw = _random_tensor(rng, kind, shape)
        writer.add_tensor(name, raw, raw_dtype=kind)
        values[name] = gguf.quants.dequantize(raw, kind).reshape(shape)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
        values[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _random_tensor(rng: np.random.Generator, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    if kind.name in ("Q4_K", "Q5_K", "Q6_K"):  # gguf has no quantiser for these
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (int(np.prod(shape)) // block, block_bytes), dtype=np.uint8)
        for at in [208] if kind.name == "Q6_K" else [0, 2]:
            raw[:, at : at + 2] = np.full((len(raw), 1), 0.01, np.float16).view(np.uint8)
        return raw.reshape(shape[0], -1)
    return gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32) * 0.05, kind)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_level_keys() -> dict[str, Any]:
    """A tokenizer of VOCAB tokens: one special, one user-defined, letters, and a few merges."""
    letters = [chr(code) for code in range(33, 33 + 90)] + ["ab", "abc"]
    tokens = ["<|end|>", "<tag>", *letters, "Ġ", "Ċ"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens[:VOCAB],
        "tokenizer.ggml.token_type": [3, 4] + [1] * (VOCAB - 2),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.eos_token_id": 0,
    }


# ---- safetensors ----------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json of a tiny model; None removes a key."""
    extra = {"sliding_window": 64, "query_pre_attn_scalar": 64} if model_type.startswith("gemma3") else {}
    if model_type == "mistral":
        extra = {"sliding_window": None}
    merged = {"model_type": model_type, **CONFIG, **extra, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def hf_names(architecture: str) -> dict[str, str]:
    """Hugging Face name -> GGUF name, written down by hand."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    for layer in range(LAYERS):
        hf, ours = f"model.layers.{layer}.", f"blk.{layer}."
        names |= {
            f"{hf}input_layernorm.weight": f"{ours}attn_norm.weight",
            f"{hf}self_attn.q_proj.weight": f"{ours}attn_q.weight",
            f"{hf}self_attn.k_proj.weight": f"{ours}attn_k.weight",
            f"{hf}self_attn.v_proj.weight": f"{ours}attn_v.weight",
            f"{hf}self_attn.o_proj.weight": f"{ours}attn_output.weight",
            f"{hf}mlp.gate_proj.weight": f"{ours}ffn_gate.weight",
            f"{hf}mlp.up_proj.weight": f"{ours}ffn_up.weight",
            f"{hf}mlp.down_proj.weight": f"{ours}ffn_down.weight",
        }
        if architecture == "gemma3":
            names |= {
                f"{hf}post_attention_layernorm.weight": f"{ours}post_attention_norm.weight",
                f"{hf}pre_feedforward_layernorm.weight": f"{ours}ffn_norm.weight",
                f"{hf}post_feedforward_layernorm.weight": f"{ours}post_ffw_norm.weight",
            }
        else:
            names[f"{hf}post_attention_layernorm.weight"] = f"{ours}ffn_norm.weight"
        if architecture == "qwen2":
            names |= {f"{hf}self_attn.{x}_proj.bias": f"{ours}attn_{x}.bias" for x in "qkv"}
        if architecture in ("qwen3", "gemma3"):
            names |= {f"{hf}self_attn.{x}_norm.weight": f"{ours}attn_{x}_norm.weight" for x in "qk"}
    return names


def write_folder(
    folder: Path, configuration: dict[str, Any], *, dtype: str = "F32", shards: int = 1, prefix: str = "model."
) -> dict[str, np.ndarray]:
    """Writes a folder and returns its values by GGUF name, as stored. `prefix` replaces "model."."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    architecture = {"gemma3_text": "gemma3"}.get(configuration["model_type"], configuration["model_type"])
    text = configuration.get("text_config", configuration)
    shapes = gguf_shapes("llama" if architecture == "mistral" else architecture, tied=text["tie_word_embeddings"])
    rng = np.random.default_rng(1)
    stored: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for name, ours in hf_names(architecture).items():
        if ours in shapes:
            value = (rng.standard_normal(shapes[ours]) * 0.05).astype(np.float32)
            bits = {"F32": value, "F16": value.astype(np.float16), "BF16": (value.view(np.uint32) >> 16).astype("<u2")}
            name = name.replace("model.", prefix, 1) if name.startswith("model.") else name
            stored[name] = bits[dtype]
            values[ours] = _as_float32(bits[dtype])
    names = list(stored)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", stored, dtype)
        return values
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: stored[name] for name in names[shard::shards]}
        write_safetensors(folder / file, part, dtype)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return values


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """The format by hand: bf16 is no NumPy type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(value.tobytes() for value in tensors.values()))


def _as_float32(value: np.ndarray) -> np.ndarray:
    if value.dtype == np.uint16:
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value.astype(np.float32)
