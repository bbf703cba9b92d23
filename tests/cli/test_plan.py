"""`legato plan` as one types it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from legato.cli.main import app
from legato.core.shape import StepShape
from legato.sim import catalog
from legato.sim.ideal import Ideal


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_example_of_the_help_prints_the_chunks_and_what_they_cost() -> None:
    told = run("--model", "llama-3.1-8b", "--device", "h100", "--prompt", "8000", "--chunk", "512", "--decodes", "32")
    assert told.exit_code == 0, told.output
    for words in ("16 chunks = 15 × 512 + 320", "Llama 3.1 8B", "NVIDIA H100 SXM", "in one pass"):
        assert words in told.output


def test_json_has_every_step_and_they_add_up() -> None:
    told = run("--chunk", "1000", "--json")
    document = json.loads(told.output)
    assert document["chunks"] == len(document["steps"]) == 8
    assert sum(step["rows"] for step in document["steps"]) == 8000
    assert abs(sum(step["ms"] for step in document["steps"]) - document["ttft_ms"]) < 0.01
    for step in document["steps"]:
        parts = max(step["weights_ms"], step["arithmetic_ms"]) + step["attention_ms"] + step["kv_ms"] + step["fixed_ms"]
        assert abs(parts - step["ms"]) < 0.001


def test_the_mask_is_drawn_into_a_file_too(tmp_path: Path) -> None:
    told = run("--mask", "--prompt", "18", "--chunk", "6", "--svg", str(tmp_path / "mask.svg"))
    assert told.exit_code == 0
    assert "chunk 3" in told.output
    assert (tmp_path / "mask.svg").read_text().startswith("<svg")


def test_this_machine_is_planned_for_by_what_it_was_measured_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Ideal(catalog.model("smollm2-135m"), catalog.device("laptop"), fixed_s=0.001).cost
    closed = []

    class Measured:
        def __init__(self, model: str, **options: object) -> None:
            assert (model, options["itl_ms"]) == ("mine", 0)
            pacer = SimpleNamespace(tracker=SimpleNamespace(cost=measured, margin=1.2))
            state = SimpleNamespace(total_blocks=2000, block_tokens=32, context=8192)
            self.engine = SimpleNamespace(pacer=pacer, state=state, close=lambda: closed.append(model))

    monkeypatch.setattr("legato.llm.LLM", Measured)
    document = json.loads(run("--device", "this", "--model", "mine", "--itl-ms", "50", "--json").output)
    assert closed == ["mine"]
    assert document["device"] == "this machine, measured"
    whole = measured.predict(
        StepShape.of_decodes([1024] * 32, measured.attention).with_chunk(measured.attention, 0, 8000)
    )
    assert document["whole_ttft_ms"] == pytest.approx(1e3 * whole, rel=1e-4)
    assert document["worst_gap_ms"] <= 50


def test_bad_input_says_what_there_is() -> None:
    for arguments, words in (
        (["--device", "tpu"], "h100"),
        (["--model", "gpt-5"], "llama-3.1-8b"),
        (["--chunk", "0"], "1 is the least"),
        (["--itl-ms", "3"], "streams alone take"),
        (["--chunk", "5", "--itl-ms", "9"], "give one of them"),
        (["--model", "llama-3.1-70b"], "not even the weights fit"),
        (["--decodes", "900"], "beside the weights 4"),
        (["--prompt", "140000"], "Llama 3.1 8B takes 131,072"),
        (["--svg", "x.svg"], "--mask"),
        (["--mask", "--prompt", "100000"], "cannot be drawn"),
    ):
        told = run(*arguments)
        assert told.exit_code == 1, arguments
        assert words in told.output, (arguments, told.output)


def test_the_list_names_sources() -> None:
    told = run("--list", "--json")
    known = json.loads(told.output)
    assert {"h100", "h200", "a100", "l4", "mi300x", "laptop"} <= set(known["devices"])
    assert {"llama-3.1-8b", "llama-3.1-70b", "mistral-7b", "yi-34b", "qwen3-30b-a3b"} <= set(known["models"])
    assert all(entry["source"] for kind in known.values() for entry in kind.values())
