"""Opening a model: a GGUF file, or a folder of safetensors. Everything is checked before a tensor is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from legato.errors import ConfigError, ModelNotFound, ModelUnsupported
from legato.exec.spec import ModelSpec
from legato.exec.weights.gguf import GgufFile
from legato.exec.weights.layout import check_tensors, expected_shapes
from legato.exec.weights.quantize import Quantize
from legato.exec.weights.safetensors import SafetensorsCheckpoint
from legato.exec.weights.spec_gguf import spec_from_gguf
from legato.exec.weights.tensor import F32, Checkpoint, HostTensor

_ROPE_FACTORS = "rope_freqs.weight"

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


def open_checkpoint(path: Path, *, quantize: Quantize | None = None) -> Checkpoint:
    """The model at `path`, its tensors checked by name and shape, none of them read yet.

    `quantize`: groups of 32 for the float matrices of a safetensors folder; refused for GGUF, whose file says how.
    Raises ModelNotFound, ModelUnsupported or ModelCorrupt.
    """
    if path.is_dir():
        return SafetensorsCheckpoint(path, quantize)
    if not path.exists():
        raise ModelNotFound(f"{path} does not exist")
    if path.suffix == ".safetensors":
        raise ModelUnsupported(f"{path} has the weights alone; give the folder that has its config.json beside it")
    return GgufCheckpoint(path, quantize)


def each_tensor(checkpoint: Checkpoint, progress: Progress | None = None) -> Iterator[tuple[str, HostTensor | F32]]:
    """(name, matrix or vector) one after the other, in model order: at most one is held here.

    `progress` is called after each with file bytes done and in total.
    """
    done = 0
    for name in checkpoint.names():
        yield name, checkpoint.tensor(name) if len(checkpoint.shape(name)) == 2 else checkpoint.vector(name)
        done += checkpoint.file_nbytes(name)
        if progress is not None:
            progress(done, checkpoint.nbytes)


class GgufCheckpoint:
    """A `Checkpoint` on a GGUF file."""

    def __init__(self, path: Path, quantize: Quantize | None = None) -> None:
        self.source = str(path)
        self._file = GgufFile(path)
        self._shapes = {name: info.shape for name, info in self._file.tensors.items()}
        if quantize is not None:
            raise ConfigError(
                f"--quantize {quantize} is for 16- and 32-bit safetensors; {path.name} is a GGUF file, which already "
                "says how each tensor is stored: leave the option out"
            )
        self.spec: ModelSpec = self._read_spec()
        self._expected = expected_shapes(self.spec)
        check_tensors(self.source, self._expected, {n: s for n, s in self._shapes.items() if n != _ROPE_FACTORS})
        self.nbytes = sum(self._file.tensors[name].nbytes for name in self._expected)

    @property
    def metadata(self) -> Mapping[str, object]:
        """All key-values of the file."""
        return self._file.metadata

    def names(self) -> Iterator[str]:
        """Canonical names, in model order."""
        return iter(self._expected)

    def shape(self, name: str) -> tuple[int, ...]:
        """(out, in) or (size,)."""
        return self._expected[name]

    def file_nbytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        return self._file.tensors[name].nbytes

    def file_type(self, name: str) -> str:
        """GGUF's name of the type."""
        return self._file.tensors[name].type_name

    def tensor(self, name: str) -> HostTensor:
        """The matrix `name`."""
        return self._file.matrix(name)

    def vector(self, name: str) -> F32:
        """The vector `name`, f32."""
        return self._file.vector(name)

    def _read_spec(self) -> ModelSpec:
        factors = None
        if _ROPE_FACTORS in self._shapes:
            shape = self._shapes[_ROPE_FACTORS]
            factors = self._file.vector(_ROPE_FACTORS).tolist() if len(shape) == 1 and math.prod(shape) < 4096 else []
        return spec_from_gguf(self.metadata, self._shapes, self.source, factors)
