"""GGUF files: what is in them comes out, and damage is a sentence, never a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exec.weights.synthetic import BASE_KEYS, byte_level_keys, gguf_shapes, write_gguf
from legato.errors import ConfigError, ModelCorrupt, ModelError, ModelNotFound, ModelUnsupported
from legato.exec.weights.checkpoint import each_tensor, open_checkpoint
from legato.exec.weights.gguf import GgufFile, read_metadata
from legato.models.tokenizer import tokenizer_from_gguf

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound file with a tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    write_gguf(path, type_name="Q4_1", keys=byte_level_keys())
    return path.read_bytes()


@pytest.mark.parametrize("type_name", TYPES)
def test_every_tensor_of_a_file_comes_out_with_its_values(type_name: str, tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "m.gguf", type_name=type_name)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    seen = {}
    for name, tensor in each_tensor(checkpoint):
        seen[name] = tensor if isinstance(tensor, np.ndarray) else tensor.dequantise()
        assert checkpoint.shape(name) == seen[name].shape
    assert seen.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(seen[name], value, err_msg=name)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_opens_with_exactly_its_tensors(architecture: str, tied: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture, tied=tied)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert set(checkpoint.names()) == set(gguf_shapes(architecture, tied))
    assert checkpoint.spec.tied_embeddings is tied


def test_progress_counts_the_bytes_of_the_file_to_the_end(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", type_name="Q8_0")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    calls: list[tuple[int, int]] = []
    for _ in each_tensor(checkpoint, lambda done, total: calls.append((done, total))):
        pass
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == checkpoint.nbytes == calls[0][1]


def test_metadata_of_every_kind_comes_out_as_plain_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint64("a", 2**40)
    writer.add_int8("b", -3)
    writer.add_bool("c", True)
    writer.add_float64("d", 0.1)
    writer.add_array("e", ["x", "héé"])
    writer.add_array("f", [1.5, -2.0])
    writer.add_array("g", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_metadata(tmp_path / "m.gguf")
    expected = {"a": 2**40, "b": -3, "c": True, "d": 0.1, "e": ["x", "héé"], "f": [1.5, -2.0], "g": [True, False]}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": ("blk.1.ffn_up.weight", "output_norm.weight")}, r"missing \(2\): blk.1.ffn_up.weight, output_norm"),
        ({"extra": {"blk.0.attn_output.bias": np.zeros(4, np.float32)}}, r"not part .*attn_output.bias"),
        ({"reshape": {"blk.0.attn_k.weight": (64, 256)}}, r"attn_k.weight is \[64, 256\], should be \[128, 256\]"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(change: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", **change)
    with pytest.raises(ModelCorrupt, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_tensor_type_without_kernels_is_refused_by_name_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    name = b"blk.0.ffn_gate.weight"
    at = data.index(name) + len(name) + 4 + 16  # dimensions, two sizes
    assert struct.unpack_from("<I", data, at)[0] == GGMLQuantizationType.F32
    changed = data[:at] + struct.pack("<I", GGMLQuantizationType.Q2_K) + data[at + 4 :]
    path.write_bytes(changed)
    with pytest.raises(ModelUnsupported, match=r"ffn_gate.weight has type Q2_K, .*implemented: F32 F16"):
        GgufFile(path).matrix(name.decode())


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", ModelCorrupt, "too short"),
        (b"GGUF", ModelCorrupt, "too short"),
        (b"PK\x03\x04" + bytes(100), ModelCorrupt, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), ModelUnsupported, "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ModelUnsupported, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), ModelCorrupt, "cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), ModelCorrupt, "cannot fit"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), ModelCorrupt, "cannot fit|ends inside"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), ModelCorrupt, "general.architecture is missing"),
    ],
)
def test_what_is_no_gguf_file_is_refused(data: bytes, error: type[ModelError], message: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_missing_file_and_a_folder_without_a_model_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        open_checkpoint(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound, match=r"no config.json"):
        open_checkpoint(tmp_path)


def test_quantising_a_gguf_file_again_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="--quantize int8"):
        open_checkpoint(tmp_path / "m.gguf", quantize="int8")


def test_a_split_model_is_refused_with_the_way_to_merge_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", keys={"general.type": "model"})
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"3 parts.*gguf-split --merge"):
        open_checkpoint(tmp_path / "s.gguf")


@pytest.mark.parametrize("key", [key for key in BASE_KEYS if key not in ("attention.head_count_kv", "rope.freq_base")])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", keys={key: None})
    with pytest.raises(ModelCorrupt, match=f"llama.{key} is missing"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_file_cut_anywhere_is_refused(sample: bytes, tmp_path: Path) -> None:
    header = sample.index(b"ffn_down") + 400
    cuts = {0, 1, 23, 24, len(sample) - 1, *range(30, header, 37), *range(header, len(sample), len(sample) // 50)}
    path = tmp_path / "cut.gguf"
    for cut in sorted(cuts):
        path.write_bytes(sample[:cut])
        with pytest.raises(ModelCorrupt):
            open_checkpoint(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_header_bytes_give_a_model_error_or_a_model(sample: bytes, tmp_path: Path, data: st.DataObject) -> None:
    header = sample.rindex(b"blk.") + 60
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
        for _ in each_tensor(checkpoint):
            pass
        tokenizer_from_gguf(checkpoint.metadata, "flipped").encode("abc")
    except ModelError:
        pass  # the property: nothing else comes


def test_a_file_cut_after_it_was_opened_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, type_name="Q8_0")
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelCorrupt, match="cut short while reading"):
        for _ in each_tensor(checkpoint):
            pass
