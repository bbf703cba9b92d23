"""Every implementation of `Ops` behind one face, for contract tests; and checkpoints of random weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from legato.exec.batch import Batch
from legato.exec.kv import KvLayout
from legato.exec.reference.backend import ReferenceBackend, reference_weights
from legato.exec.reference.kv import ReferenceKv
from legato.exec.reference.ops import ReferenceOps
from legato.exec.rope import rope_table
from legato.exec.spec import ModelSpec
from legato.exec.weights.layout import expected_shapes
from legato.exec.weights.tensor import DenseTensor, GroupedTensor, HostTensor

try:
    from legato import _native
except ImportError:  # the kernels are not built: only the reference is tested
    _native = None  # type: ignore[assignment]

try:
    import torch
except ImportError:  # an extra
    torch = None  # type: ignore[assignment]

ISAS: list[str] = [] if _native is None else _native.isas()
needs_native = pytest.mark.skipif(_native is None, reason="the native kernels are not built")

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed: pip install 'legato-serve[torch]'")

Build = Callable[[Any], Any]


def batch_of(*sequences: tuple[int, int], block_tokens: int, tokens: NDArray[np.int32] | None = None) -> Batch:
    """A batch of (start, count) sequences with disjoint, scattered blocks; logits of every row; tokens 0, 1, 2, …."""
    starts = np.array([start for start, _ in sequences], np.int32)
    counts = np.array([count for _, count in sequences], np.int32)
    rows = int(counts.sum())
    width = int(max(-(-(start + count) // block_tokens) for start, count in sequences))
    tables = np.arange(len(sequences) * width, dtype=np.int32).reshape(width, len(sequences)).T[:, ::-1].copy()
    row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Batch(
        tokens=np.arange(rows, dtype=np.int32) if tokens is None else tokens,
        positions=(np.arange(rows) + np.repeat(starts - row_starts[:-1], counts)).astype(np.int32),
        seq_row_starts=row_starts,
        block_tables=tables,
        logit_rows=np.arange(rows, dtype=np.int32),
    )


class OpsUnderTest:
    """One implementation with its own KV pool. `run` gives the rows of the tensor that `build(ops)` returns."""

    layout: KvLayout

    def weight(self, values: NDArray[np.float32]) -> Any:
        raise NotImplementedError

    def run(self, build: Build, batch: Batch) -> NDArray[np.float32]:
        raise NotImplementedError

    def read(self, layer: int, block: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        raise NotImplementedError


class ReferenceUnderTest(OpsUnderTest):
    def __init__(self, layout: KvLayout, blocks: int) -> None:
        self.layout, self.kv = layout, ReferenceKv(layout, blocks)

    def weight(self, values: NDArray[np.float32]) -> Any:
        return values

    def run(self, build: Build, batch: Batch) -> NDArray[np.float32]:
        return np.array(build(ReferenceOps(self.kv, batch)))

    def read(self, layer: int, block: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self.kv.read(layer, block)


class NativeUnderTest(OpsUnderTest):
    def __init__(self, layout: KvLayout, blocks: int, isa: str, threads: int) -> None:
        from legato.exec.cpu.backend import make_kv

        self.layout, self.kv, self.isa, self.threads = layout, make_kv(layout, blocks), isa, threads

    def weight(self, values: NDArray[np.float32]) -> Any:
        return _native.Matrix.pack_dense(values, dtype="f32")

    def run(self, build: Build, batch: Batch) -> NDArray[np.float32]:
        from legato.exec.cpu.ops import RecordingOps

        _native.set_isa(self.isa)
        rows = max(1, len(batch.tokens))
        program = _native.Program(
            self.kv, max_rows=rows, max_logit_rows=rows, max_seqs=len(batch.seq_row_starts) - 1, activations="f32"
        )
        program.seal(build(RecordingOps(program)))
        out = program.run(
            batch.tokens,
            batch.positions,
            batch.seq_row_starts,
            batch.block_tables,
            batch.logit_rows,
            self.threads,
        )
        return np.array(out)

    def read(self, layer: int, block: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self.kv.read(layer, block)


class TorchUnderTest(OpsUnderTest):
    def __init__(self, layout: KvLayout, blocks: int) -> None:
        from legato.exec.torch.kv import TorchKv

        self.layout, self.kv = layout, TorchKv(layout, blocks, torch.device("cpu"))

    def weight(self, values: NDArray[np.float32]) -> Any:
        return torch.from_numpy(values.copy())

    def run(self, build: Build, batch: Batch) -> NDArray[np.float32]:
        from legato.exec.torch.ops import TorchOps, Vectors
        from legato.exec.torch.rows import Rows

        cpu = torch.device("cpu")
        with torch.inference_mode():
            rows = Rows.of(batch, self.layout.block_tokens, cpu)
            return np.array(build(TorchOps(self.kv, rows, Vectors(cpu))).numpy())

    def read(self, layer: int, block: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self.kv.read(layer, block)


@pytest.fixture
def native_isa() -> Iterator[None]:
    """Puts back the instruction set that a test has changed."""
    before = _native.isa() if _native else ""
    yield
    if _native:
        _native.set_isa(before)


@dataclass(frozen=True)
class RandomCheckpoint:
    """Random weights for any spec: the same name gives the same values. `form(name)` says how a matrix is stored."""

    spec: ModelSpec
    form: Callable[[str], str] = lambda name: "F32"
    source: str = "random weights"
    metadata: dict[str, object] = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        return sum(self.file_nbytes(name) for name in self.names())

    def names(self) -> Iterator[str]:
        return iter(expected_shapes(self.spec))

    def shape(self, name: str) -> tuple[int, ...]:
        return expected_shapes(self.spec)[name]

    def file_nbytes(self, name: str) -> int:
        return 4 * int(np.prod(self.shape(name)))

    def file_type(self, name: str) -> str:
        return self.form(name) if len(self.shape(name)) == 2 else "F32"

    def tensor(self, name: str) -> HostTensor:
        rng, (out, inputs) = self._rng(name), self.shape(name)
        kind = self.form(name)
        if kind in ("Q4_1", "Q8_0"):
            scale = rng.uniform(0.5, 1.5, (out, inputs // 32)) / np.sqrt(inputs)
            if kind == "Q8_0":
                q = rng.integers(1, 256, (out, inputs), np.uint8)
                return GroupedTensor(q, _half(scale / 64), None, zero=128, bits=8, group=32)
            q = rng.integers(0, 16, (out, inputs), np.uint8)
            return GroupedTensor(q, _half(scale / 4), _half(-7.5 * scale / 4), zero=0, bits=4, group=32)
        values = (rng.standard_normal((out, inputs)) / np.sqrt(inputs)).astype(np.float32)
        if kind == "F16":
            return DenseTensor(values.astype(np.float16), "f16")
        if kind == "BF16":
            return DenseTensor((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16), "bf16")
        return DenseTensor(values, "f32")

    def vector(self, name: str) -> NDArray[np.float32]:
        centre = 0.0 if name.endswith("bias") else 1.0
        return (centre + 0.1 * self._rng(name).standard_normal(self.shape(name))).astype(np.float32)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(name.encode()))


def _half(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(np.float16).astype(np.float32)


def reference_backend(
    checkpoint: RandomCheckpoint, *, blocks: int, block_tokens: int, positions: int, dtype: type = np.float32
) -> ReferenceBackend:
    """The oracle on the checkpoint's values, with a KV pool in float32."""
    spec = checkpoint.spec
    weights = reference_weights(
        spec,
        lambda name: (
            checkpoint.tensor(name).dequantise() if len(checkpoint.shape(name)) == 2 else checkpoint.vector(name)
        ),
        tuple(rope_table(rope, positions) for rope in spec.ropes),
    )
    kv = ReferenceKv(KvLayout.of(spec, block_tokens=block_tokens, dtype="f32"), blocks)
    return ReferenceBackend(spec, weights, kv, dtype)


def cpu_backend(
    checkpoint: RandomCheckpoint,
    *,
    blocks: int,
    block_tokens: int,
    positions: int,
    isa: str,
    activations: str = "f32",
    kv_dtype: str = "f32",
    threads: int = 1,
    max_rows: int = 128,
) -> Any:
    """The native backend on the same checkpoint."""
    from legato.exec.cpu.backend import CpuBackend, make_kv, record
    from legato.exec.cpu.pack import pack_weights

    _native.set_isa(isa)
    spec = checkpoint.spec
    weights = pack_weights(checkpoint, tuple(rope_table(rope, positions) for rope in spec.ropes))
    kv = make_kv(KvLayout.of(spec, block_tokens=block_tokens, dtype=kv_dtype), blocks)  # type: ignore[arg-type]
    program = record(
        spec,
        weights,
        kv,
        max_rows=max_rows,
        max_seqs=16,
        max_logit_rows=max_rows,
        activations=activations,  # type: ignore[arg-type]
        threads=2,
    )
    return CpuBackend(program, kv, weights, threads)


def torch_backend(
    checkpoint: RandomCheckpoint, *, blocks: int, block_tokens: int, positions: int, dtype: Any = None
) -> Any:
    """The torch backend on the same checkpoint, its matrices of type `dtype`, float32 if None."""
    from legato.exec.decoder import collect_weights
    from legato.exec.torch.backend import TorchBackend
    from legato.exec.torch.kv import TorchKv

    spec = checkpoint.spec
    weights = collect_weights(
        spec,
        tuple(rope_table(rope, positions) for rope in spec.ropes),
        lambda name, out, inputs: torch.from_numpy(checkpoint.tensor(name).dequantise()).to(dtype or torch.float32),
        lambda name, length: checkpoint.vector(name),
    )
    kv = TorchKv(KvLayout.of(spec, block_tokens=block_tokens, dtype="f32"), blocks, torch.device("cpu"))
    return TorchBackend(spec, weights, kv)
