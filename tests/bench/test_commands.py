"""The two commands as one types them, against a server over a real socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.fake_server import FakeServer, serving_apart
from legato.bench.plot import Picture, draw_svg
from legato.cli.main import app

runner = CliRunner()
QUICK = ["--streams", "3", "--every", "0.25", "--duration", "0.7", "--warmup", "0", "--prompt-tokens", "500"]


def test_interference_reports_draws_and_ends_with_one_json_document(tmp_path: Path) -> None:
    svg, html, data = tmp_path / "a.svg", tmp_path / "a.html", tmp_path / "a.json"
    with serving_apart(FakeServer(gap_s=0.01, s_per_token=0.0004)) as server:
        arguments = ["bench", "interference", "--url", server.url, *QUICK, "--budget-ms", "500", "--seed", "1"]
        result = runner.invoke(app, [*arguments, "--svg", str(svg), "--html", str(html), "--data", str(data), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["valid"] and document["settings"]["streams"] == 3 and document["server"]["takes_ids"]
    found = document["figures"]
    assert found["long_sent"] == found["long_completed"] == 3
    assert found["itl_ms"]["p50"] == pytest.approx(10, abs=8)
    assert found["long_ttft_ms"]["p50"] == pytest.approx(200, abs=100)
    assert found["tokens_per_chunk"] in (None, 1.0)
    assert document["machine"]["server_is_local"] and document["machine"]["client_cores"] < 1
    assert svg.read_text().startswith("<svg") and "<table>" in html.read_text()
    assert draw_svg(Picture(**json.loads(data.read_text()))).count("\n") == svg.read_text().count("\n")


def test_interference_shows_its_figures_to_a_reader() -> None:
    with serving_apart(FakeServer(gap_s=0.01)) as server:
        result = runner.invoke(app, ["bench", "interference", "--url", server.url, *QUICK, "--budget-ms", "500"])
    assert result.exit_code == 0, result.output
    for word in ("ITL", "stalls", "TTFT", "tokens/s", "of a core"):
        assert word in result.stdout


def test_an_invalid_run_prints_no_figure_and_is_status_1(tmp_path: Path) -> None:
    with serving_apart(FakeServer(gap_s=0.01)) as server:
        arguments = ["bench", "interference", "--url", server.url, *QUICK, "--every", "5", "--json"]
        result = runner.invoke(app, [*arguments, "--svg", str(tmp_path / "a.svg")])
    assert result.exit_code == 1
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["valid"] is False and document["figures"] is None
    assert "1 of 1 long prompts got a first token, and 2 are needed" in document["reasons"][0]
    assert result.stderr.startswith("error: this run shows nothing")
    assert not (tmp_path / "a.svg").exists()


def test_capacity_tells_every_rate_and_the_highest() -> None:
    arguments = ["--ttft-ms", "900", "--itl-ms", "900", "--prompt-tokens", "20:0.5", "--output-tokens", "3"]
    with serving_apart(FakeServer(gap_s=0.001)) as server:
        command = ["bench", "capacity", "--url", server.url, *arguments, "--duration", "0.5", "--max-rate", "16"]
        result = runner.invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    document = json.loads(last)
    assert document["requests_per_s"] == 16 and len(lines) == len(document["probes"]) == 2
    assert all("meets" in line for line in lines)
    assert document["settings"]["prompt_tokens"] == "20:0.5"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["interference", "--url", "http://127.0.0.1:9"], "legato serve"),
        (["interference", "--url", "localhost"], "--url is"),
        (["interference", "--prompt-tokens", "many"], "--prompt-tokens is"),
        (["interference", "--svg", "/no/such/folder/a.svg"], "no folder"),
        (["capacity", "--ttft-ms", "9", "--itl-ms", "9", "--url", "http://127.0.0.1:9"], "legato serve"),
        (["capacity", "--ttft-ms", "9", "--itl-ms", "9", "--output-tokens", "4:x"], "--output-tokens is"),
        (["capacity", "--ttft-ms", "9", "--itl-ms", "9", "--max-rate", "0.1", "--duration", "5"], "--max-rate"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and words in result.stderr


def test_both_verbs_explain_themselves() -> None:
    for verb in ("interference", "capacity"):
        assert "Usage" in runner.invoke(app, ["bench", verb, "--help"]).output
        assert verb in runner.invoke(app, ["bench", "--help"]).output
