"""GGUF blocks become grouped tensors that say exactly what the file says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from legato.exec.weights.quants import decode, is_implemented
from legato.exec.weights.tensor import DenseTensor, GroupedTensor

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4}


def random_blocks(type_name: str, out: int, inputs: int, seed: int = 0) -> np.ndarray:
    """u8[out, row bytes]: random bits everywhere but in the fp16 scales, which are finite."""
    kind = GGMLQuantizationType[type_name]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    if type_name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((out, inputs)).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(out, -1)
    raw = rng.integers(0, 256, (out * inputs // block, block_bytes), dtype=np.uint8)
    halves = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(type_name, [0])
    for at in halves:
        raw[:, at : at + 2] = (rng.standard_normal((len(raw), 1)) * 0.01).astype(np.float16).view(np.uint8)
    return raw.reshape(out, -1)


@pytest.mark.parametrize("type_name", TYPES)
def test_a_decoded_matrix_equals_the_reference_dequantisation_exactly(type_name: str) -> None:
    raw = random_blocks(type_name, out=37, inputs=768)
    tensor = decode(type_name, 37, 768, lambda start, stop: raw[start:stop])
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(tensor.dequantise(), expected.reshape(37, 768))
    if isinstance(tensor, GroupedTensor):
        assert tensor.bits == BITS.get(type_name, 8)
        assert tensor.q.max() < 1 << tensor.bits
        assert tensor.group == (16 if type_name == "Q6_K" else 32)


@pytest.mark.parametrize("type_name", TYPES)
def test_reading_in_pieces_gives_the_same_tensor(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(type_name, out=9, inputs=256)
    whole = decode(type_name, 9, 256, lambda start, stop: raw[start:stop])
    monkeypatch.setattr("legato.exec.weights.quants._CHUNK_BYTES", raw.shape[1] * 2)
    pieces = decode(type_name, 9, 256, lambda start, stop: raw[start:stop])
    np.testing.assert_array_equal(whole.dequantise(), pieces.dequantise())


@pytest.mark.parametrize("type_name", [name for name in TYPES if name.startswith("Q")])
def test_scales_of_every_exponent_and_sign_survive(type_name: str) -> None:
    raw = random_blocks(type_name, out=256, inputs=256).reshape(256, -1)
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]
    blocks = raw.reshape(-1, block_bytes)
    at = 208 if type_name == "Q6_K" else 0
    halves = np.linspace(0, 65535, len(blocks)).astype(np.uint16)
    halves[~np.isfinite(halves.view(np.float16))] = 0
    blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    tensor = decode(type_name, 256, 256, lambda start, stop: raw[start:stop])
    np.testing.assert_array_equal(
        tensor.dequantise(), gguf.quants.dequantize(raw, GGMLQuantizationType[type_name]).reshape(256, 256)
    )


def test_sixteen_bit_values_keep_their_bits() -> None:
    raw = random_blocks("BF16", out=4, inputs=64)
    tensor = decode("BF16", 4, 64, lambda start, stop: raw[start:stop])
    assert isinstance(tensor, DenseTensor)
    assert tensor.dtype == "bf16"
    np.testing.assert_array_equal(tensor.values.view(np.uint8), raw)


def test_types_without_kernels_are_not_claimed() -> None:
    assert not any(is_implemented(name) for name in ("IQ2_XXS", "Q2_K", "Q3_K", "MXFP4", "TQ1_0", "I32", "F64"))
