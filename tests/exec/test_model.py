"""`load_model`: options checked before anything is read, progress to the end, pools of a stated size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exec.backends import ISAS
from exec.fakes import FakeSource, plan
from exec.test_golden import golden, tiny
from legato.core.request import Request
from legato.errors import ConfigError, ModelNotFound, OutOfMemory

if not ISAS:
    pytest.skip("the native kernels are not built", allow_module_level=True)

from legato._native import isa
from legato.exec.cpu.backend import sample_ids
from legato.exec.model import LoadedModel, load_model


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "qwen2"
    tiny().make_tiny("qwen2", folder)
    return folder


def greedy(model: LoadedModel, prompt: list[int]) -> int:
    source = FakeSource()
    source.add(Request(0, tuple(prompt)), blocks=list(range(8)))
    model.executor.bind(source)
    return model.executor.execute(plan((0, 0, len(prompt), True))).token_ids[0]


def test_a_loaded_model_answers(qwen2: Path) -> None:
    model = load_model(qwen2, kv_tokens=1000, activations="f32", kv_dtype="f32", threads=1)
    assert (model.kv_blocks, model.kv_tokens, model.max_model_len) == (32, 1024, 512)
    for prompt in golden("tiny")["models"]["qwen2"]:
        assert greedy(model, prompt["ids"]) == prompt["argmax"][-1]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_weights_answer_and_are_smaller(qwen2: Path, quantize: Any) -> None:
    whole = load_model(qwen2, kv_tokens=256, threads=1)
    small = load_model(qwen2, kv_tokens=256, threads=1, quantize=quantize)
    assert small.footprint.weights < 0.35 * whole.footprint.weights
    assert 0 <= greedy(small, [5, 6, 7]) < 256


def test_an_engines_limits_do_not_show_in_its_answers(qwen2: Path) -> None:
    """The powers that equalise activations are chosen by one step at load: the same for any pool, step and threads."""
    models = [
        load_model(qwen2, quantize="int4", kv_tokens=32, max_num_batched_tokens=4, max_num_seqs=1, threads=1),
        load_model(qwen2, quantize="int4", kv_tokens=512, max_num_batched_tokens=256, max_num_seqs=8, threads=2),
    ]
    shifts = [model.backend.program.shifts for model in models]
    assert shifts[0] == shifts[1]
    if isa().startswith("avx"):
        assert len(shifts[0]) == 4 * len(models[0].spec.layers)  # the head has 8 bits
        assert any(any(exponents) for exponents in shifts[0])
    else:
        assert shifts == [[], []]


def test_samples_are_ids_of_the_vocabulary_behind_the_first_token(qwen2: Path) -> None:
    spec = load_model(qwen2, kv_tokens=32, threads=1).spec
    for vocab, first in ((1, None), (2, 1), (300, 7), (262_144, 2)):
        ids = sample_ids(replace(spec, vocab=vocab, first_token=first))
        assert len(ids) == 1024 and ids.min() >= 0 and ids.max() < vocab
        assert first is None or (ids[::64] == first).all()


def test_the_pool_is_by_default_every_sequence_at_full_length(qwen2: Path) -> None:
    model = load_model(qwen2, max_num_seqs=3, max_model_len=100, threads=1)
    assert model.kv_tokens == 3 * 128
    assert model.max_model_len == 100


def test_a_pool_shorter_than_the_context_bounds_the_length(qwen2: Path) -> None:
    assert load_model(qwen2, kv_tokens=70, threads=1).max_model_len == 96


def test_progress_reaches_the_size_of_the_file(qwen2: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(qwen2, kv_tokens=64, threads=1, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 1000}, ConfigError, r"max_model_len 1000 is not in \[2, 512\]"),
        ({"max_model_len": 1}, ConfigError, r"max_model_len 1 is not in"),
        ({"kv_tokens": 0}, ConfigError, "kv_tokens is 0"),
        ({"threads": -1}, ConfigError, "threads is -1"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, ConfigError, "max_num_batched_tokens is 0"),
        ({"block_tokens": 20}, ConfigError, "block_tokens 20"),
        ({"kv_dtype": "f64"}, ConfigError, "kv_dtype 'f64' is not one of f16, f32"),
        ({"kv_tokens": 1 << 50}, OutOfMemory, r"needs [\d,]+ MiB and [\d,]+ MiB of memory are available"),
    ],
)
def test_an_option_out_of_bounds_is_refused_with_its_number(
    qwen2: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(qwen2, **options)


def test_a_model_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_model(tmp_path / "nothing.gguf")


def test_a_model_larger_than_memory_is_refused_before_it_is_read(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.exec.model.available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemory, match="the model needs"):
        load_model(qwen2)


def test_damaged_weights_fail_the_step_and_name_the_request(qwen2: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from legato.errors import EngineError

    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny().CONFIGS["qwen2"]))
    tensors = load_file(qwen2 / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match="request 0 are not finite"):
        greedy(load_model(folder, kv_tokens=256, threads=1), [5, 6, 7])
