"""Against transformers in fp32: each architecture on tiny random weights, SmolLM2 and Gemma 3 on dequantised files.

Values: tests/golden, made by tests/parity, or those of the folder $LEGATO_GOLDEN. "Relative" is to the largest absolute
logit of the prompt's last row.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from exec.backends import ISAS, needs_native, needs_torch
from legato.exec.batch import Batch
from legato.exec.kv import KvLayout
from legato.exec.reference.backend import ReferenceBackend, reference_weights
from legato.exec.reference.kv import ReferenceKv
from legato.exec.rope import rope_table
from legato.exec.weights.checkpoint import open_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"
BLOCK_TOKENS = 32
# Greedy texts are compared up to the first step where transformers' two best logits are closer than this.
NEAR_TIE = 2e-3
F32 = NDArray[np.float32]


def golden(name: str) -> dict[str, Any]:
    path = Path(os.environ.get("LEGATO_GOLDEN", GOLDEN)) / f"{name}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_tiny", GOLDEN / "tiny.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits_of(backend: Any, ids: list[int], start: int = 0, rows: list[int] | None = None) -> F32:
    """Logits of the given rows (default: all) of a pass over `ids`, the first of which is at position `start`."""
    count = len(ids)
    batch = Batch(
        tokens=np.array(ids, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        seq_row_starts=np.array([0, count], np.int32),
        block_tables=np.arange(-(-(start + count) // BLOCK_TOKENS), dtype=np.int32)[None],
        logit_rows=np.arange(count, dtype=np.int32) if rows is None else np.array(rows, np.int32),
    )
    return np.array(backend.run(batch))


def relative(found: F32, expected: Any, scale: float) -> float:
    return float(np.abs(found - np.asarray(expected)).max() / scale)


# ── every architecture, tiny and random ─────────────────────────────────────────────────────────

TINY = sorted(tiny().CONFIGS)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for name in TINY:
        tiny().make_tiny(name, folder / name)
    return folder


def check_tiny(backend: Any, name: str, tolerance: float) -> None:
    for prompt in golden("tiny")["models"][name]:
        found = logits_of(backend, prompt["ids"])
        assert relative(found[-1], prompt["logits"], np.abs(prompt["logits"]).max()) < tolerance
        assert found.argmax(axis=1).tolist() == prompt["argmax"]


@pytest.mark.parametrize("name", TINY)
def test_the_oracle_computes_what_transformers_does(name: str, tiny_models: Path) -> None:
    checkpoint = open_checkpoint(tiny_models / name)
    spec = checkpoint.spec
    weights = reference_weights(
        spec,
        lambda key: checkpoint.tensor(key).dequantise() if len(checkpoint.shape(key)) == 2 else checkpoint.vector(key),
        tuple(rope_table(rope, 128) for rope in spec.ropes),
    )
    kv = ReferenceKv(KvLayout.of(spec, block_tokens=BLOCK_TOKENS, dtype="f32"), 4)
    check_tiny(ReferenceBackend(spec, weights, kv), name, 1e-4)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TINY)
def test_the_kernels_compute_what_transformers_does(name: str, isa: str, tiny_models: Path) -> None:
    from legato import _native
    from legato.exec.model import load_model

    before = _native.isa()
    _native.set_isa(isa)
    try:
        model = load_model(
            tiny_models / name, kv_tokens=128, kv_dtype="f32", activations="f32", max_logit_rows=128, threads=1
        )
        check_tiny(model.backend, name, 1e-3)
    finally:
        _native.set_isa(before)


def torch_backend(path: Path, positions: int) -> Any:
    import torch

    from legato.exec.torch.backend import TorchBackend
    from legato.exec.torch.kv import TorchKv
    from legato.exec.torch.load import torch_weights

    checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
    spec = checkpoint.spec
    weights = torch_weights(checkpoint, tuple(rope_table(rope, positions) for rope in spec.ropes), cpu)
    kv = TorchKv(KvLayout.of(spec, block_tokens=BLOCK_TOKENS, dtype="f32"), -(-positions // BLOCK_TOKENS), cpu)
    return TorchBackend(spec, weights, kv)


@needs_torch
@pytest.mark.parametrize("name", TINY)
def test_torch_computes_what_transformers_does(name: str, tiny_models: Path) -> None:
    check_tiny(torch_backend(tiny_models / name, 128), name, 1e-3)


# ── the real models ─────────────────────────────────────────────────────────────────────────────


def load(path: Path, **options: Any) -> Any:
    from legato.exec.model import load_model

    rows = 256  # of a vocabulary of 262,144 are 256 MiB
    return load_model(
        path, max_num_batched_tokens=2048, max_num_seqs=4, max_logit_rows=rows, kv_tokens=2048, threads=2, **options
    ).backend


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"])
def real(request: pytest.FixtureRequest) -> tuple[str, Path]:
    path: Path = request.getfixturevalue(request.param.partition("-")[0] + "_path")
    return request.param, path


@needs_native
def test_logits_and_greedy_text_are_those_of_transformers(real: tuple[str, Path]) -> None:
    name, path = real
    check_real(load(path, activations="f32", kv_dtype="f32"), name)


@needs_torch
def test_torch_gives_logits_and_greedy_text_of_transformers(smollm2_path: Path) -> None:
    check_real(torch_backend(smollm2_path, 2048), "smollm2-135m")


def check_real(backend: Any, name: str) -> None:
    record = golden(name)
    worst, compared = 0.0, 0
    for prompt, expected in record["prompts"].items():
        rows = continuation(backend, expected)
        for where, values in (
            (expected["top_ids"], expected["top_logits"]),
            (record["sampled_ids"], expected["sampled_logits"]),
        ):
            error = relative(rows[0][where], values, expected["max_abs_logit"])
            worst = max(worst, error)
            assert error < 1e-3, f"{prompt}: {error:.1e}"
        gaps = np.array(expected["greedy_gaps"])
        ties = np.flatnonzero(gaps < NEAR_TIE * expected["max_abs_logit"])
        sure = int(ties[0]) if len(ties) else len(gaps)
        assert rows.argmax(axis=1)[:sure].tolist() == expected["greedy"][:sure], prompt
        compared += sure
    print(f"{name}: worst logit error {worst:.1e} of the largest, {compared} greedy tokens equal")
    assert compared > len(record["prompts"]) * 8


@needs_native
@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_fast_activations_agree_with_fp32(real: tuple[str, Path], activations: str) -> None:
    """The most likely next token in greedy texts, in all prompts and on a page, and the perplexity of the page.

    With 8 bits an activation and nothing else SmolLM2 agrees at 95.0 % of all positions (llama.cpp: 95.7 %).
    """
    from legato import _native

    if activations == "bf16" and _native.isa() != "amx":
        pytest.skip("bf16 activations need AMX")
    name, path = real
    record = golden(name)
    backend = load(path, activations=activations)
    texts = [
        continuation(backend, expected).argmax(axis=1) == np.array(expected["greedy"])
        for expected in record["prompts"].values()
    ]
    positions = [
        argmax_and_nll(backend, expected["ids"])[0] == np.array(expected["argmax"])
        for expected in [*record["prompts"].values(), record["page"]]
    ]
    in_texts, anywhere = float(np.concatenate(texts).mean()), float(np.concatenate(positions).mean())
    perplexity = float(np.exp(argmax_and_nll(backend, record["page"]["ids"])[1].mean()))
    expected_perplexity = record["page"]["perplexity"]
    print(
        f"{name} {activations}: top-1 agreement {in_texts:.2%} in greedy texts, "
        f"{positions[-1].mean():.2%} on the page, "
        f"{anywhere:.2%} at all positions; perplexity {perplexity:.3f}, "
        f"transformers fp32 {expected_perplexity:.3f} ({perplexity / expected_perplexity - 1:+.2%})"
    )
    assert min(in_texts, anywhere) >= 0.97
    assert perplexity == pytest.approx(expected_perplexity, rel=0.01)


def continuation(backend: Any, prompt: dict[str, Any]) -> F32:
    """Logits that choose each greedy token, given the ones before it: in one pass, which is bit-equal to one by one."""
    ids, greedy = prompt["ids"], prompt["greedy"]
    return logits_of(backend, ids + greedy[:-1], rows=list(range(len(ids) - 1, len(ids) + len(greedy) - 1)))


def argmax_and_nll(backend: Any, ids: list[int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Most likely token after every position, and the negative log-likelihood of ids[1:], 256 rows at a time."""
    best, losses = [], []
    for start in range(0, len(ids), 256):
        rows = logits_of(backend, ids[start : start + 256], start=start)
        best.append(rows.argmax(axis=1))
        for row, target in zip(rows, ids[start + 1 : start + 257], strict=False):
            largest = float(row.max())
            total = np.exp(row - largest).sum(dtype=np.float64)
            losses.append(np.log(total) + largest - float(row[target]))
    return np.concatenate(best), np.array(losses)
