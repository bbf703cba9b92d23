"""Whole tiny models of every architecture: the native backend against the oracle, and splits that change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec.backends import (
    ISAS,
    RandomCheckpoint,
    batch_of,
    cpu_backend,
    needs_native,
    needs_torch,
    reference_backend,
    torch_backend,
)
from exec.tiny_specs import TINY_SPECS
from legato.exec.batch import Batch
from legato.exec.ops import FloatArray

BLOCK_TOKENS, BLOCKS, POSITIONS = 16, 64, 256


@pytest.fixture
def restore_isa() -> Iterator[None]:
    yield
    if ISAS:
        from legato import _native

        _native.set_isa(ISAS[-1])


def tokens_of(seed: int, count: int) -> FloatArray:
    return np.random.default_rng(seed).integers(0, 101, count).astype(np.int32)


def mixed_steps() -> list[Batch]:
    """Three sequences: prefilled in chunks that mix with each other's, then a decode of all."""
    batches = []
    for step in ([(0, 40), (0, 3)], [(40, 23), (3, 1)], [(63, 1), (4, 66)]):
        rows = sum(count for _, count in step)
        batches.append(batch_of(*step, block_tokens=BLOCK_TOKENS, tokens=tokens_of(len(batches), rows)))
    # The same blocks for the same sequence in every step.
    tables = np.array([[9, 4, 7, 1, 0], [2, 3, 11, 5, 30]], np.int32)
    return [
        Batch(b.tokens, b.positions, b.seq_row_starts, tables[:, : b.block_tables.shape[1]].copy(), b.logit_rows)
        for b in batches
    ]


def worst(found: FloatArray, expected: FloatArray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check_logits_and_cache(backend: Any, checkpoint: RandomCheckpoint) -> None:
    """Those of the oracle, after steps that mix prompts and decodes."""
    oracle = reference_backend(
        checkpoint, dtype=np.float64, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, positions=POSITIONS
    )
    for batch in mixed_steps():
        assert worst(backend.run(batch), oracle.run(batch)) < 1e-4
    for layer in range(len(checkpoint.spec.layers)):
        for block in (9, 4, 7, 2, 3, 11, 5):
            for found, expected in zip(backend.kv.read(layer, block), oracle.kv.read(layer, block), strict=True):
                assert worst(found, expected) < 1e-4


@needs_native
@pytest.mark.usefixtures("restore_isa")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TINY_SPECS)
def test_native_logits_and_cache_are_those_of_the_oracle(name: str, isa: str) -> None:
    checkpoint = RandomCheckpoint(TINY_SPECS[name])
    sizes: dict[str, Any] = {"blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "positions": POSITIONS}
    check_logits_and_cache(cpu_backend(checkpoint, isa=isa, threads=2, **sizes), checkpoint)


@needs_torch
@pytest.mark.parametrize("name", TINY_SPECS)
def test_torch_logits_and_cache_are_those_of_the_oracle(name: str) -> None:
    checkpoint = RandomCheckpoint(TINY_SPECS[name])
    sizes: dict[str, Any] = {"blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "positions": POSITIONS}
    check_logits_and_cache(torch_backend(checkpoint, **sizes), checkpoint)


@needs_torch
@pytest.mark.parametrize("name", TINY_SPECS)
def test_torch_with_weights_of_16_bits_is_near_the_oracle(name: str) -> None:
    import torch

    checkpoint = RandomCheckpoint(TINY_SPECS[name])
    sizes: dict[str, Any] = {"blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "positions": POSITIONS}
    oracle = reference_backend(checkpoint, dtype=np.float64, **sizes)
    found = torch_backend(checkpoint, dtype=torch.bfloat16, **sizes)
    for batch in mixed_steps():
        assert worst(found.run(batch), oracle.run(batch)) < 0.05


@needs_native
@pytest.mark.usefixtures("restore_isa")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_weights_keep_their_values_in_every_packed_form(form: str, isa: str) -> None:
    checkpoint = RandomCheckpoint(TINY_SPECS["llama"], form=lambda name: form)
    sizes: dict[str, Any] = {"blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "positions": POSITIONS}
    oracle = reference_backend(checkpoint, dtype=np.float64, **sizes)
    exact = cpu_backend(checkpoint, isa=isa, **sizes)
    integer = cpu_backend(checkpoint, isa=isa, activations="int8", kv_dtype="f16", **sizes)
    for batch in mixed_steps():
        expected = oracle.run(batch)
        assert worst(exact.run(batch), expected) < 1e-4
        assert worst(integer.run(batch), expected) < 0.1  # activations have 8 bits, and three layers to err in


splits = st.lists(st.integers(1, 50), min_size=2, max_size=5)


def run_split(backend: Any, counts: list[int], tokens: FloatArray, first_block: int) -> FloatArray:
    """Logits of all positions of one sequence, computed `counts` at a time in blocks from `first_block` on."""
    start, rows = 0, []
    for count in counts:
        batch = batch_of((start, count), block_tokens=BLOCK_TOKENS, tokens=tokens[start : start + count])
        table = first_block + np.arange(batch.block_tables.shape[1], dtype=np.int32)[None]
        batch = Batch(batch.tokens, batch.positions, batch.seq_row_starts, table, batch.logit_rows)
        rows.append(np.array(backend.run(batch)))
        start += count
    return np.concatenate(rows)


@pytest.mark.parametrize("name", TINY_SPECS)
@settings(max_examples=4, deadline=None)
@given(counts=splits)
def test_the_oracle_gives_the_same_bits_however_a_prompt_is_split(name: str, counts: list[int]) -> None:
    backend = reference_backend(
        RandomCheckpoint(TINY_SPECS[name]), blocks=60, block_tokens=BLOCK_TOKENS, positions=POSITIONS * 2
    )
    counts = counts[:3]
    tokens = tokens_of(5, sum(counts))
    whole = run_split(backend, [sum(counts)], tokens, 0)
    assert run_split(backend, counts, tokens, 30).tobytes() == whole.tobytes()


@needs_native
@pytest.mark.usefixtures("restore_isa")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TINY_SPECS)
@settings(max_examples=3, deadline=None)
@given(counts=splits, threads=st.sampled_from([1, 2]))
def test_the_native_backend_gives_the_same_bits_however_a_prompt_is_split(
    name: str, isa: str, counts: list[int], threads: int
) -> None:
    checkpoint = RandomCheckpoint(TINY_SPECS[name], form=lambda tensor: "Q4_1" if "ffn" in tensor else "Q8_0")
    backend = cpu_backend(
        checkpoint,
        blocks=60,
        block_tokens=BLOCK_TOKENS,
        positions=POSITIONS * 2,
        isa=isa,
        activations="int8",
        kv_dtype="f16",
        max_rows=320,
    )
    tokens = tokens_of(5, sum(counts))
    whole = run_split(backend, [sum(counts)], tokens, 0)
    backend.threads = threads
    assert run_split(backend, counts, tokens, 30).tobytes() == whole.tobytes()
    for layer in range(len(checkpoint.spec.layers)):
        for block in range(sum(counts) // BLOCK_TOKENS):
            for one, other in zip(backend.kv.read(layer, block), backend.kv.read(layer, 30 + block), strict=True):
                assert one.tobytes() == other.tobytes()
