"""GGUF key-values become the right spec, or a refusal that says why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exec.weights.synthetic import HEAD_DIM, HIDDEN, LAYERS, VOCAB, write_gguf
from legato.errors import ModelCorrupt, ModelError, ModelUnsupported
from legato.exec.spec import LayerSpec, ModelSpec, RopeSpec
from legato.exec.weights.checkpoint import open_checkpoint


def spec(tmp_path: Path, architecture: str = "llama", keys: dict[str, Any] | None = None, **options: Any) -> ModelSpec:
    write_gguf(tmp_path / "m.gguf", architecture, keys=keys, **options)
    return open_checkpoint(tmp_path / "m.gguf").spec


def test_llama(tmp_path: Path) -> None:
    assert spec(tmp_path, keys={"general.name": "Tiny"}) == ModelSpec(
        architecture="llama",
        name="Tiny",
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=512,
        vocab=VOCAB,
        context_length=512,
        norm_eps=float(np.float32(1e-5)),
        activation="silu",
        layers=(LayerSpec(), LayerSpec()),
        ropes=(RopeSpec(10000.0, 64, interleaved=True),),
        attention_scale=0.125,
        tied_embeddings=False,
    )


@pytest.mark.parametrize(("flag", "bos", "first"), [(None, 1, 1), (True, 1, 1), (False, 1, None), (True, VOCAB, None)])
def test_sequences_begin_with_the_token_that_is_put_in_front(
    tmp_path: Path, flag: bool | None, bos: int, first: int | None
) -> None:
    keys: dict[str, Any] = {"tokenizer.ggml.bos_token_id": bos}
    if flag is not None:
        keys["tokenizer.ggml.add_bos_token"] = flag
    assert spec(tmp_path, keys=keys).first_token == first


def test_qwen2_has_biases_and_half_split_rotation(tmp_path: Path) -> None:
    found = spec(tmp_path, "qwen2")
    assert found.qkv_bias and not found.qk_norm and not found.ropes[0].interleaved


def test_qwen3_has_head_norms_and_its_own_head_size(tmp_path: Path) -> None:
    found = spec(tmp_path, "qwen3")
    assert found.qk_norm and not found.qkv_bias and not found.ropes[0].interleaved and found.head_dim == HEAD_DIM


def test_gemma3_slides_five_layers_in_six_and_has_two_bases(tmp_path: Path) -> None:
    found = spec(tmp_path, "gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert found.layers == (LayerSpec(1, 64),) * LAYERS
    assert found.ropes == (RopeSpec(1e6, 64, False, linear_scale=8.0), RopeSpec(10000.0, 64, False))
    assert found.activation == "gelu_tanh" and found.post_norms and found.qk_norm
    assert found.embedding_scale == math.sqrt(HIDDEN)
    assert found.attention_scale == 0.125


@pytest.mark.parametrize(("pattern", "full"), [(2, [1]), ([False, True], [0]), (1, [0, 1])])
def test_gemma3_pattern_may_be_a_period_or_a_list(pattern: Any, full: list[int], tmp_path: Path) -> None:
    found = spec(tmp_path, "gemma3", {"attention.sliding_window_pattern": pattern})
    assert [at for at, layer in enumerate(found.layers) if layer.window is None] == full
    assert all(layer.rope == (0 if layer.window is None else 1) for layer in found.layers)


def test_llama3_scaling_comes_from_the_rope_freqs_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
    found = spec(tmp_path, extra={"rope_freqs.weight": factors})
    assert found.ropes[0].factors == tuple(factors.tolist())


@pytest.mark.parametrize("factors", [np.ones(5, np.float32), np.zeros(32, np.float32), np.full(32, np.nan, np.float32)])
def test_impossible_rope_factors_are_corrupt(factors: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match="rope_freqs"):
        spec(tmp_path, extra={"rope_freqs.weight": factors})


def test_a_sliding_window_of_a_llama_file_is_kept(tmp_path: Path) -> None:
    assert spec(tmp_path, keys={"attention.sliding_window": 128}).layers == (LayerSpec(0, 128),) * LAYERS


def test_per_layer_lists_of_one_value_are_that_value(tmp_path: Path) -> None:
    assert spec(tmp_path, keys={"attention.head_count_kv": [2, 2]}).kv_heads == 2


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"rope.scaling.type": "yarn"}, ModelUnsupported, "'yarn'.*linear and llama3"),
        ({"rope.scaling.type": "longrope"}, ModelUnsupported, "'longrope'"),
        ({"expert_count": 8}, ModelUnsupported, "mixture of experts"),
        ({"attention.head_count_kv": [2, 1]}, ModelUnsupported, "differs from layer to layer"),
        ({"attention.value_length": 32}, ModelUnsupported, "keys of 64 and values of 32"),
        ({"attention.head_count_kv": 3}, ModelCorrupt, "not a multiple of 3"),
        ({"block_count": 2**32 - 1}, ModelCorrupt, "block_count.*between"),
        ({"block_count": 3}, ModelCorrupt, "missing.*blk.2"),
        ({"embedding_length": 0}, ModelCorrupt, "embedding_length"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, ModelCorrupt, "finite"),
        ({"rope.freq_base": -1.0}, ModelCorrupt, "above zero"),
        ({"rope.dimension_count": 65}, ModelCorrupt, "does not fit"),
        ({"context_length": "many"}, ModelCorrupt, "integer"),
        ({"tokenizer.ggml.tokens": ["x"] * 97}, ModelCorrupt, "97 tokens, the embedding 96 rows"),
    ],
)
def test_what_is_not_implemented_or_cannot_be_is_named(
    keys: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        spec(tmp_path, keys=keys)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gemma2", "'gemma2' is not implemented"),
        ("phi3", "'phi3'"),
        ("mamba2", "recurrent or state-space"),
        ("rwkv7", "recurrent or state-space"),
        ("lfm2", "convolutional"),
        ("qwen3moe", "mixture of experts"),
        ("bert", "not a decoder-only"),
    ],
)
def test_other_architectures_are_refused_with_the_reason_and_what_there_is(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=f"{reason}.*Implemented: llama .*qwen3, gemma3"):
        spec(tmp_path, architecture)
