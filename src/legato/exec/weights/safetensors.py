"""A folder with config.json and (sharded) safetensors, presented under canonical names.

Our own reader of the format: 8 bytes of header length, a JSON header, raw tensors. The `safetensors` package gives
NumPy no bf16 and maps the file, whose pages would count as this process's memory.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

from legato.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from legato.exec.weights.gguf import open_for_reading
from legato.exec.weights.layout import check_tensors, expected_shapes
from legato.exec.weights.quantize import Quantize, quantise
from legato.exec.weights.spec_hf import spec_from_config
from legato.exec.weights.tensor import F32, DenseTensor, DenseType, HostTensor, to_float32

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_JSON_BYTES = 64 << 20
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_DENSE: dict[str, DenseType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_NUMBERS = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}

_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# A text decoder sits at "model."; inside Gemma 3's image-and-text checkpoints at one of the other two.
_PREFIX = re.compile(r"^(?:language_model\.model\.|model\.language_model\.|language_model\.|model\.)?(.*)$")
_LAYER = re.compile(r"^layers\.(\d{1,5})\.(.+)\.(weight|bias)$")
_OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsCheckpoint:
    """A `Checkpoint` on a folder. Tensors are read from the file when asked for."""

    def __init__(self, folder: Path, quantize: Quantize | None = None) -> None:
        self.source = str(folder)
        self._quantize = quantize
        config_path = folder / "config.json"
        if not config_path.is_file():
            raise ModelNotFound(
                f"{folder} has no config.json: a model is a GGUF file, or a folder with config.json, {_SINGLE} and "
                "tokenizer.json"
            )
        config = read_json(config_path)
        self.spec = spec_from_config(config, str(config_path))
        self._gemma = self.spec.architecture == "gemma3"
        found = self._canonical(_find_entries(folder))
        self._expected = expected_shapes(self.spec)
        check_tensors(self.source, self._expected, {name: entry.shape for name, entry in found.items()})
        self._entries = found
        self.nbytes = sum(entry.nbytes for entry in found.values())

    @property
    def metadata(self) -> Mapping[str, object]:
        """Empty: tokenizer and template are files of the folder."""
        return {}

    def names(self) -> Iterator[str]:
        """Canonical names, in model order."""
        return iter(self._expected)

    def shape(self, name: str) -> tuple[int, ...]:
        """(out, in) or (size,)."""
        return self._expected[name]

    def file_nbytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        return self._entries[name].nbytes

    def file_type(self, name: str) -> str:
        """safetensors' name of the type."""
        return self._entries[name].type_name

    def tensor(self, name: str) -> HostTensor:
        """The matrix `name`: as stored, or quantised in groups of 32 if that was asked for."""
        dense = self._dense(name)
        if self._quantize is None:
            return dense
        # The embedding and the output matrix keep 8 bits: at 4 they cost far more quality than memory saved.
        kind = "int8" if name in ("token_embd.weight", "output.weight") else self._quantize
        return quantise(dense, kind, f"{self.source}: tensor {name}")

    def vector(self, name: str) -> F32:
        """The vector `name`, f32; Gemma's norms with the 1 that its config leaves implicit."""
        dense = self._dense(name)
        values = to_float32(dense.values, dense.dtype)
        return values + np.float32(1) if self._gemma and name.endswith("norm.weight") else values

    def _dense(self, name: str) -> DenseTensor:
        entry = self._entries[name]
        dtype = _DENSE.get(entry.type_name)
        if dtype is None:
            raise ModelUnsupported(
                f"{entry.file}: tensor {name} has type {entry.type_name}, not implemented; F32 F16 BF16 are"
            )
        values = np.empty(entry.shape, _NUMBERS[dtype])
        with open_for_reading(entry.file) as file:
            file.seek(entry.offset)
            got = file.readinto(values.reshape(-1).view(np.uint8).data)
        if got != entry.nbytes:
            raise ModelCorrupt(f"{entry.file}: cut short while reading tensor {name}")
        return DenseTensor(values, dtype)

    def _canonical(self, entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
        """Entries by canonical name; names without one stay as they are and are then reported as extra."""
        named = {}
        for name, entry in entries.items():
            if name.endswith("rotary_emb.inv_freq") or (self._gemma and name.startswith(_OTHER_MODALITIES)):
                continue
            canonical = canonical_name(name, gemma=self._gemma)
            if canonical == "output.weight" and self.spec.tied_embeddings:
                continue  # a copy of the embedding, as transformers takes it
            if canonical in named:
                raise ModelCorrupt(f"{self.source}: two tensors are called {canonical}")
            named[canonical] = entry
        return named


def canonical_name(name: str, *, gemma: bool) -> str:
    """GGUF's name of a Hugging Face tensor; `name` itself if it has none."""
    match = _PREFIX.match(name)
    rest = match.group(1) if match else name
    stem, _, kind = rest.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    layer = _LAYER.match(rest)
    if layer is None:
        return name
    number, stem, kind = layer.groups()
    local = _IN_LAYER.get(stem) or (_GEMMA_NORMS if gemma else _LLAMA_NORMS).get(stem)
    return f"blk.{int(number)}.{local}.{kind}" if local else name


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. ModelCorrupt if it is anything else."""
    with open_for_reading(path) as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise ModelCorrupt(f"{path} is over {_MAX_JSON_BYTES >> 20} MiB")
    return _parse(text, path)


def _parse(text: bytes, path: Path) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} does not hold a JSON object")
    return value


def _find_entries(folder: Path) -> dict[str, _Entry]:
    if (folder / _SINGLE).is_file():
        return _read_header(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise ModelNotFound(f"{folder} has neither {_SINGLE} nor {_INDEX}; other weight formats are not implemented")
    where = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelCorrupt(f"{folder / _INDEX} has no weight_map")
    entries: dict[str, _Entry] = {}
    for shard in sorted({str(file) for file in where.values()}):
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ModelCorrupt(f"{folder / _INDEX}: {shard[:80]!r} is not the name of a shard")
        if not (folder / shard).is_file():
            raise ModelCorrupt(f"{folder}: shard {shard} is missing; obtain it again")
        entries |= {name: entry for name, entry in _read_header(folder / shard).items() if where.get(name) == shard}
    if lost := [name for name in where if name not in entries]:
        raise ModelCorrupt(f"{folder}: {len(lost)} tensors of the index are in no shard, first {lost[0][:80]}")
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    with open_for_reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(8)
        if len(raw) < 8:
            raise ModelCorrupt(f"{path}: {size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", raw)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelCorrupt(
                f"{path}: a header of {length:,} bytes in a file of {size:,}: damaged, truncated or not safetensors"
            )
        header = _parse(file.read(length), path)
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: _entry(path, name, value, start, size) for name, value in header.items()}


def _entry(path: Path, name: str, value: object, start: int, size: int) -> _Entry:
    what = f"{path}: tensor {name[:80]}"
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{what} has no description")
    type_name, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(type_name, str) or not _naturals(shape) or not _naturals(span) or len(span) != 2:
        raise ModelCorrupt(f"{what} has an impossible description")
    if span[0] > span[1] or start + span[1] > size:
        raise ModelCorrupt(
            f"{what} ends at byte {start + span[1]:,}, the file has {size:,}; it is truncated, obtain it again"
        )
    nbytes = span[1] - span[0]
    item_bytes = _ITEM_BYTES.get(type_name)
    if item_bytes is not None and math.prod(shape) * item_bytes != nbytes:
        raise ModelCorrupt(f"{what} of type {type_name} and shape {shape} cannot have {nbytes:,} bytes")
    return _Entry(path, type_name, tuple(shape), start + span[0], nbytes)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
