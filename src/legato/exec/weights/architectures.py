"""Which architectures are implemented, and why others are not."""

from __future__ import annotations

from legato.errors import ModelUnsupported

IMPLEMENTED = "llama (Llama 2 and 3, SmolLM2, Mistral), qwen2, qwen3, gemma3 (text)"

_RECURRENT = "it has recurrent or state-space layers, whose state is not a KV cache and is not implemented"
_CONVOLUTIONAL = "it has convolutional layers, whose state is not a KV cache and is not implemented"
_EXPERTS = "it is a mixture of experts, which is not implemented"
_ENCODER = "it is not a decoder-only language model"

_REASONS = {
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "jamba": _RECURRENT,
    "bamba": _RECURRENT,
    "zamba2": _RECURRENT,
    "rwkv6": _RECURRENT,
    "rwkv7": _RECURRENT,
    "rwkv6qwen2": _RECURRENT,
    "arwkv7": _RECURRENT,
    "plamo2": _RECURRENT,
    "falconh1": _RECURRENT,
    "nemotronh": _RECURRENT,
    "granitehybrid": _RECURRENT,
    "granitemoehybrid": _RECURRENT,
    "recurrentgemma": _RECURRENT,
    "qwen3next": _RECURRENT,
    "qwen35": _RECURRENT,
    "kimilinear": _RECURRENT,
    "lfm2": _CONVOLUTIONAL,
    "lfm2moe": _CONVOLUTIONAL,
    "mixtral": _EXPERTS,
    "qwen2moe": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "deepseek2": _EXPERTS,
    "deepseekv2": _EXPERTS,
    "deepseekv3": _EXPERTS,
    "gptoss": _EXPERTS,
    "olmoe": _EXPERTS,
    "llama4": _EXPERTS,
    "bert": _ENCODER,
    "nomicbert": _ENCODER,
    "t5": _ENCODER,
    "t5encoder": _ENCODER,
    "whisper": _ENCODER,
    "clip": _ENCODER,
}


def unsupported(source: str, architecture: str) -> ModelUnsupported:
    """The refusal of `architecture`: its name, the reason where one is known, and what is implemented."""
    reason = _REASONS.get(architecture.lower().replace("_", "").replace("-", ""))
    because = f": {reason}" if reason else ""
    return ModelUnsupported(
        f"{source}: architecture {architecture[:80]!r} is not implemented{because}. Implemented: {IMPLEMENTED}"
    )
