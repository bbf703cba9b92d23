"""`legato explain` as one types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from explain.rig import Rig
from legato.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], terminal_width=200)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rig = Rig(itl_s=0.08)
    for request_id in range(1, 4):
        rig.ask(request_id, 20, 40)
    rig.step(6)
    rig.ask(9, 700, 10)
    rig.step(14)
    rig.machine.slowdown = 12.0
    rig.step()
    rig.machine.slowdown = 1.0
    rig.finish()
    path = tmp_path / "steps.jsonl"
    path.write_bytes(rig.bytes())
    return path


def test_it_says_what_was_late_and_why(path: Path) -> None:
    told = run(str(path), "--budget-ms", "50", "--worst", "2")
    assert told.exit_code == 0, told.output
    for words in (
        "tiny · ",
        "4 requests",
        "A gap may be 50 ms",
        "chunks",
        "noise",
        "The 2 worst",
        "of request 1 came after",
    ):
        assert words in told.output
    assert told.output.count("over the budget: ") == 2
    assert "(so for 2 more)" in told.output


def test_by_default_the_budget_is_the_servers(path: Path) -> None:
    assert "A gap may be 80 ms: 4 of 126 are longer" in run(str(path)).output
    assert "none of 126 is longer." in run(str(path), "--budget-ms", "900").output


def test_one_request_is_told_from_its_arrival_to_its_end(path: Path) -> None:
    told = run(str(path), "--request", "9", "--worst", "3")
    assert "Request 9: prompt of 700 tokens, 10 generated, ended with length after" in told.output
    assert "its own prompt (700 tokens in" in told.output
    assert "Its 3 longest gaps of 9" in told.output


def test_json_has_every_late_gap_and_its_parts_add_up(path: Path) -> None:
    document = json.loads(run(str(path), "--budget-ms", "50", "--json").output)
    assert document["requests"] == len(document["first_tokens"]) == 4
    assert sum(cause["gaps"] for cause in document["causes"].values()) == len(document["late"]) > 10
    for gap in [*document["late"], *document["first_tokens"]]:
        assert sum(gap["parts_ms"].values()) == pytest.approx(gap["gap_ms"], rel=1e-3)
        assert gap["sentence"]
    one = json.loads(run(str(path), "--request", "2", "--json").output)
    assert len(one["every_gap"]) == 39
    assert len(one["late"]) == 1


def test_files_are_written_beside(path: Path, tmp_path: Path) -> None:
    page, tracks = tmp_path / "late.html", tmp_path / "late.json"
    told = run(str(path), "--html", str(page), "--chrome", str(tracks))
    assert told.exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(tracks.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--request", "5"], "has no request 5; it has 1, 2, 3, 9"),
        (["--html", "nowhere/late.html"], "there is no folder nowhere; make it first"),
    ],
)
def test_what_is_not_there_is_told(path: Path, arguments: list[str], said: str) -> None:
    told = run(str(path), *arguments)
    assert told.exit_code == 1
    assert said in told.output


def test_a_file_that_is_no_trace_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    told = run(str(tmp_path / "notes.txt"))
    assert told.exit_code == 1
    assert "notes.txt is no trace: line 1 is no header" in told.output


def test_a_trace_without_a_step_and_one_that_is_cut_are_told(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    told = run(str(path))
    assert told.exit_code == 0
    assert "note: " in told.output and "ends in the middle of this line" in told.output
    path.write_bytes(whole.splitlines(keepends=True)[0])
    assert "has no step yet" in run(str(path)).output


def test_serve_checks_where_a_trace_goes_before_it_loads(tmp_path: Path) -> None:
    def serve(*arguments: str) -> str:
        told = CliRunner().invoke(app, ["serve", "nothing.gguf", *arguments])
        assert told.exit_code == 1
        return told.output

    assert "there is no folder" in serve("--trace", str(tmp_path / "none" / "steps"))
    assert "1MiB is the least" in serve("--trace", str(tmp_path / "steps"), "--trace-size", "5KiB")
    assert "trace_size is 5MiB, and nothing is traced" in serve("--trace-size", "5MiB")
    (tmp_path / "mine").write_text("my notes")
    assert "exists and is no trace" in serve("--trace", str(tmp_path / "mine"))
