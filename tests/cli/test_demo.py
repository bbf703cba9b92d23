"""`legato demo` as one types it, on a virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes import VOCAB
from typer.testing import CliRunner, Result

from demo.rig import engine_of
from legato.cli.main import app
from legato.engine.wire import EngineInfo

SMALL = ("--prompt-tokens", "600", "--itl-ms", "30.5", "--max-num-batched-tokens", "100")


class Rig:
    """Stands in for the model; `steps_left` until Ctrl-C. `asked`: the options it was loaded with."""

    def __init__(self) -> None:
        self.steps_left: int | None = None
        self.asked: dict[str, Any] = {}
        self.closed = 0
        self.now = lambda: 0.0

    def load(self, model: str, **asked: Any) -> Any:
        self.asked = {"model": model, **asked}
        engine, self.now = engine_of(
            itl_ms=asked["itl_ms"] or 40.0, most_tokens=asked["max_num_batched_tokens"], steps_left=self.steps_left
        )
        info = EngineInfo(3000, VOCAB, 400, 16, asked["max_num_batched_tokens"], 64, threads=2)
        return SimpleNamespace(engine=engine, info=info, text=SimpleNamespace(vocab=VOCAB), close=self.close)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    made = Rig()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("legato.llm.LLM", made.load)
    monkeypatch.setattr("legato.cli.demo._clock", lambda: made.now())
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


def test_without_a_terminal_it_prints_lines_and_leaves_the_page(rig: Rig) -> None:
    told = run(*SMALL)
    assert told.exit_code == 0, told.output
    for words in ("worst three gaps", "607", "103 · 103 · 103 ms", "Read in one step", "is in legato-demo.html"):
        assert words in told.stdout
    assert "\x1b" not in told.stdout and "█" not in told.stdout
    assert "Chunking off: the whole prompt in one step …" in told.stderr
    assert "<svg" in Path("legato-demo.html").read_text()
    assert rig.asked["enable_prefix_caching"] is False and rig.closed == 1


def test_json_is_one_document_and_leaves_no_file(rig: Rig) -> None:
    told = run(*SMALL, "--json")
    document = json.loads(told.stdout)
    assert told.stderr == ""
    assert document["complete"] is True
    assert document["command"] == "legato demo --itl-ms 30.5 --prompt-tokens 600 --max-num-batched-tokens 100"
    assert [run["figures"]["worst_gaps_ms"][0] for run in document["runs"]] == [607.0, 103.0, 30.0]
    assert not list(Path().iterdir())


def test_what_was_measured_is_drawn_again_without_a_model(rig: Rig) -> None:
    Path("demo.json").write_text(run(*SMALL, "--json").stdout)
    loaded, rig.asked = rig.asked, {}
    told = run("--from", "demo.json", "--svg", "demo.svg", "--html", "page.html")
    assert told.exit_code == 0, told.output
    assert loaded and not rig.asked
    assert "103 · 103 · 103 ms" in told.stdout
    assert Path("demo.svg").read_text() in Path("page.html").read_text()
    assert json.loads(run("--from", "demo.json", "--json").stdout) == json.loads(Path("demo.json").read_text())


def test_an_interrupt_shows_what_there_is_and_says_so(rig: Rig) -> None:
    rig.steps_left = 400
    told = run(*SMALL)
    assert told.exit_code == 130
    assert "607" in told.stdout and "Interrupted" in told.stdout
    assert "Interrupted" in Path("legato-demo.html").read_text()
    assert rig.closed == 1


def test_an_interrupt_before_the_first_token_leaves_nothing(rig: Rig) -> None:
    rig.steps_left = 0
    told = run(*SMALL)
    assert told.exit_code == 130
    assert told.stdout == "" and not list(Path().iterdir())


def test_the_prompt_and_the_gap_are_chosen_for_the_machine(rig: Rig) -> None:
    setup = json.loads(run("--json").stdout)["setup"]
    # 4 s in one pass would be 4,000 rows; the pool holds 3,000 positions of one request, the streams the rest.
    assert setup["itl_ms"] == 40.0 and setup["streams"] == 4
    assert setup["prompt_tokens"] % 100 == 0 or setup["prompt_tokens"] < 3000
    assert setup["step_tokens"] == min(512, setup["prompt_tokens"] // 4) or setup["prompt_tokens"] < 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "nowhere/page.html"], "nowhere/page.html cannot be written"),
        (["--svg", "nowhere/page.svg"], "cannot be written"),
        (["--from", "bad.json"], "bad.json is not what legato demo --json prints"),
        (["--from", "bad.json", "--streams", "2"], "--streams is for measuring"),
        (["smollm2-135m", "--from", "bad.json"], "MODEL is for measuring"),
        (["--streams", "8", "--max-num-batched-tokens", "8"], "none left for a prompt beside 8 streams"),
        (["--prompt-tokens", "5000"], "5000 tokens"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(rig: Rig, arguments: list[str], words: str) -> None:
    Path("bad.json").write_text('{"demo": 1}')
    told = run(*arguments)
    assert told.exit_code == 1, told.output
    assert words in told.stderr
    assert told.stderr.count("error: ") == 1
