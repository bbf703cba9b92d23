"""`legato tune` and `--config` as one types them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from legato.cli import tune as command
from legato.cli.config_file import ConfigFile
from legato.cli.main import app
from legato.errors import ConfigError
from legato.tune.sweep import Point

H100 = ("--simulate", "--model", "llama-3.1-8b", "--device", "h100", "--every", "1", "--duration", "4")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_a_simulated_sweep_says_why_draws_and_writes_a_configuration(tmp_path: Path) -> None:
    told = run(*H100, "--plot", "knee.svg", "--itl-ms", "20")
    assert told.exit_code == 0, told.output
    for words in ("◀ knee", "take it", "the time to a first token", "Kneedle", "90 % from", "legato.toml", "20 ms"):
        assert words in told.output, words
    config = tomllib.loads(Path("legato.toml").read_text())
    assert config["max-num-seqs"] == 64 and config["max-num-batched-tokens"] >= 256
    assert "First token of a long prompt" in Path("knee.svg").read_text()
    assert not Path("legato-tune.jsonl").exists()


def test_json_has_points_advice_and_chunks() -> None:
    document = json.loads(run(*H100, "--budgets", "256,512,1024", "--itl-ms", "0", "--json").output)
    assert [p["tokens"] for p in document["points"]] == [256, 512, 1024]
    assert [p["itl_p99_ms"] for p in document["points"]] == sorted(p["itl_p99_ms"] for p in document["points"])
    assert document["advice"]["options"]["max-num-batched-tokens"] in (256, 512, 1024)
    assert document["efficiency"]["least_rows"]["0.9"] >= document["efficiency"]["least_rows"]["0.8"]
    assert document["simulated"] and document["load"]["streams"] == 8


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (*H100, "--budgets", "256,512,1024", "--itl-ms", "0")
    add, measured = command._each, list[int]()

    def interrupted(settings: Any, measure: Any, kept: Any, seen: Any) -> list[Point]:
        def once(setting: Any) -> Point:
            if len(measured) == 2:
                raise KeyboardInterrupt
            measured.append(setting.tokens)
            return measure(setting)

        return add(settings, once, kept, seen)

    monkeypatch.setattr(command, "_each", interrupted)
    told = run(*arguments)
    assert told.exit_code == 130 and "2 of 3 settings are kept in legato-tune.jsonl" in told.output
    measured.clear()
    assert run(*arguments).exit_code == 0
    assert measured == [1024]


def test_bad_input_says_what_there_is() -> None:
    for arguments, words in (
        (("--device", "h100"), "give --simulate"),
        ((*H100, "--budgets", "32,64,128"), "cannot hold one for each of 64"),
        ((*H100, "--itl-ms", "1"), "can be kept"),
        ((*H100, "--itl-ms", "x"), "--itl-ms is 'x'"),
        ((*H100, "--budgets", "256,512"), "a knee needs 3"),
        ((*H100, "--prompt-tokens", "900000"), "takes 131,072"),
        ((*H100, "--out", "/nowhere/x.toml"), "cannot be written"),
        ((*H100, "--plot", "x.pdf"), "neither"),
    ):
        told = run(*arguments)
        assert told.exit_code == 1, (arguments, told.output)
        assert words in told.output, (arguments, told.output)
        Path("legato-tune.jsonl").unlink(missing_ok=True)


small = typer.Typer(add_completion=False)


@small.command()
def show(model: str = "m", itl_ms: float | None = None, tenant_weight: list[str] | None = None, shed: bool = False,
         config_file: ConfigFile = None) -> None:  # fmt: skip
    print(json.dumps([model, itl_ms, tenant_weight, shed]))


def test_a_file_gives_options_and_the_command_line_counts_more(tmp_path: Path) -> None:
    file = tmp_path / "legato.toml"
    file.write_text('model = "x"\nitl-ms = 60\ntenant_weight = ["a=2"]\nshed = true\n')
    assert json.loads(CliRunner().invoke(small, ["--config", str(file)]).output) == ["x", 60.0, ["a=2"], True]
    told = CliRunner().invoke(small, ["--itl-ms", "5", "--config", str(file), "--model", "y", "--no-shed"])
    assert json.loads(told.output) == ["y", 5.0, ["a=2"], False]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("itl = 5\n", "no option 'itl'; there are "),
        ("itl-ms 5\n", "is no TOML"),
        ("[serve]\nitl-ms = 5\n", "is a table"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "legato.toml"
    if content is not None:
        file.write_text(content)
    told = CliRunner().invoke(small, ["--config", str(file)])
    assert isinstance(told.exception, ConfigError) and words in str(told.exception)


def test_what_tune_writes_serve_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*H100, "--budgets", "256,512,1024", "--itl-ms", "9").exit_code == 0
    seen: list[Any] = []
    monkeypatch.setattr("legato.cli.serve._serve", lambda config, *rest: seen.append(config))
    monkeypatch.setattr("legato.cli.serve._run", lambda main: 0)
    told = CliRunner().invoke(app, ["serve", "--config", "legato.toml", "--port", "0"])
    assert told.exit_code == 0, told.output
    written = tomllib.loads(Path("legato.toml").read_text())
    assert seen[0].max_num_batched_tokens == written["max-num-batched-tokens"]
    assert seen[0].itl_ms == written.get("itl-ms", seen[0].itl_ms) and seen[0].max_num_seqs == 64
