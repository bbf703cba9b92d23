"""Folders of safetensors: canonical names, values kept or quantised, damage named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exec.weights.synthetic import config, write_folder, write_safetensors
from legato.errors import ModelCorrupt, ModelError, ModelNotFound, ModelUnsupported
from legato.exec.weights.checkpoint import each_tensor, open_checkpoint
from legato.exec.weights.quantize import quantise
from legato.exec.weights.tensor import Checkpoint, DenseTensor, GroupedTensor

MODEL_TYPES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


def read_all(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {
        name: tensor if isinstance(tensor, np.ndarray) else tensor.dequantise()
        for name, tensor in each_tensor(checkpoint)
    }


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_come_out_under_canonical_names(model_type: str, dtype: str, tmp_path: Path) -> None:
    values = write_folder(tmp_path, config(model_type), dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    found = read_all(checkpoint)
    assert found.keys() == values.keys()
    for name, value in values.items():
        if model_type == "gemma3_text" and name.endswith("norm.weight"):
            value = value + np.float32(1)
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    tensor = checkpoint.tensor("blk.0.ffn_up.weight")
    assert isinstance(tensor, DenseTensor) and tensor.dtype == dtype.lower()


def test_shards_are_one_model(tmp_path: Path) -> None:
    values = write_folder(tmp_path, config("llama"), shards=3)
    assert read_all(open_checkpoint(tmp_path)).keys() == values.keys()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_an_image_and_text_gemma_is_read(prefix: str, tmp_path: Path) -> None:
    inner = {key: value for key, value in config("gemma3_text").items() if key != "model_type"}
    outer = {"model_type": "gemma3", "text_config": inner | {"tie_word_embeddings": True}}
    names = write_folder(tmp_path, outer, prefix=prefix)
    assert open_checkpoint(tmp_path).spec.architecture == "gemma3"
    assert read_all(open_checkpoint(tmp_path)).keys() == names.keys()


def test_a_copy_of_a_tied_embedding_and_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    write_folder(tmp_path, config("llama"))
    (tmp_path / "config.json").write_text(json.dumps(config("llama", tie_word_embeddings=True)))
    assert open_checkpoint(tmp_path).spec.tied_embeddings
    assert "output.weight" not in set(open_checkpoint(tmp_path).names())


@pytest.mark.parametrize(("kind", "bits", "bound"), [("int8", 8, 1 / 254), ("int4", 4, 1 / 14)])
def test_quantised_values_stay_within_half_a_step(kind: str, bits: int, bound: float, tmp_path: Path) -> None:
    values = write_folder(tmp_path, config("llama"), dtype="BF16")
    checkpoint = open_checkpoint(tmp_path, quantize=kind)  # type: ignore[arg-type]
    tensor = checkpoint.tensor("blk.0.ffn_up.weight")
    assert isinstance(tensor, GroupedTensor) and tensor.bits == bits and tensor.group == 32
    expected = values["blk.0.ffn_up.weight"].reshape(-1, 32)
    error = np.abs(tensor.dequantise().reshape(-1, 32) - expected)
    span = np.ptp(expected, axis=1) if kind == "int4" else np.abs(expected).max(axis=1)
    assert (error.max(axis=1) <= span * bound * 1.25 + 1e-6).all()
    assert np.array_equal(tensor.scale, tensor.scale.astype(np.float16)), "kept in fp16 without loss"
    embedding = checkpoint.tensor("token_embd.weight")
    assert isinstance(embedding, GroupedTensor) and embedding.bits == 8


def test_int4_refitting_never_raises_the_error_of_plain_rounding() -> None:
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    tensor = quantise(DenseTensor(values, "f32"), "int4", "x")
    groups = values.reshape(64, 8, 32)
    low = groups.min(axis=2, keepdims=True)
    step = (groups.max(axis=2, keepdims=True) - low) / 15
    plain = np.rint((groups - low) / step) * step + low
    error = ((tensor.dequantise() - values) ** 2).mean()
    assert error < 0.97 * ((plain - groups) ** 2).mean()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-9, -3.0, 1e30])
def test_constant_and_extreme_groups_quantise_finitely(kind: str, value: float) -> None:
    values = np.full((2, 64), value, np.float32)
    values[1, 3] = -value
    tensor = quantise(DenseTensor(values, "f32"), kind, "x")  # type: ignore[arg-type]
    assert np.isfinite(tensor.dequantise()).all()
    np.testing.assert_allclose(tensor.dequantise()[0], values[0], rtol=0.01, atol=1e-7)


def test_values_that_are_not_finite_cannot_be_quantised() -> None:
    values = np.full((1, 32), np.inf, np.float32)
    with pytest.raises(ModelCorrupt, match="x holds values that are not finite"):
        quantise(DenseTensor(values, "f32"), "int8", "x")


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, config("qwen2"))
    (tmp_path / "config.json").write_text(json.dumps(config("llama", intermediate_size=100)))
    with pytest.raises(ModelCorrupt, match=r"not part .*attn_q.bias.*\[512, 256\], should be \[100, 256\]"):
        open_checkpoint(tmp_path)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, config("llama"), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelCorrupt, match=r"shard model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelNotFound, match=r"neither model.safetensors nor"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin"])
def test_an_index_cannot_point_outside_its_folder(shard: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelCorrupt, match="not the name of a shard"):
        open_checkpoint(tmp_path)


def test_other_number_types_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, config("llama"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(ModelUnsupported, match="type I32, not implemented; F32 F16 BF16 are"):
        open_checkpoint(tmp_path).tensor("token_embd.weight")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 3) + b"{x}",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelCorrupt):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "nul", '{"model_type": 3}', "{}", "\xff"])
def test_what_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelCorrupt):
        open_checkpoint(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_give_a_model_error_or_a_model(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    if not (tmp_path / "sound").exists():
        write_folder(tmp_path, config("llama"), dtype="F16")
        (tmp_path / "sound").write_bytes(path.read_bytes())
    sound = (tmp_path / "sound").read_bytes()
    header = 8 + struct.unpack_from("<Q", sound)[0]
    damaged = bytearray(sound[: data.draw(st.sampled_from([len(sound), len(sound) // 2, header, header - 1, 9]))])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, min(header, len(damaged)) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        for _ in each_tensor(open_checkpoint(tmp_path)):
            pass
    except ModelError:
        pass  # the property: nothing else comes


def test_weights_alone_are_no_model(tmp_path: Path) -> None:
    write_folder(tmp_path, config("llama"))
    with pytest.raises(ModelUnsupported, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_duplicate_canonical_names_are_corrupt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    one = np.ones((96, 256), np.float32)
    write_safetensors(
        tmp_path / "model.safetensors", {"model.embed_tokens.weight": one, "embed_tokens.weight": one}, "F32"
    )
    with pytest.raises(ModelCorrupt, match=r"two tensors are called token_embd.weight"):
        open_checkpoint(tmp_path)
