"""`legato certify`: exit status, one JSON document, a file to replay; and real models, which must be exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from certify import faults
from certify.rigs import native_rig
from legato.certify.campaign import Campaign
from legato.cli.main import app

pytest.importorskip("legato._native")
runner = CliRunner()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every model is a tiny random one; files land in a folder of their own."""
    monkeypatch.setattr("legato.certify.rig.load_rig", lambda path, **options: native_rig())
    monkeypatch.setattr("legato.assemble.resolve_model", lambda config, *_: Path(config.model))
    monkeypatch.chdir(tmp_path)


def certify(*arguments: str, status: int) -> dict[str, Any]:
    """The JSON document on the last line of stdout."""
    result = runner.invoke(app, ["certify", *arguments, "--json"])
    assert result.exit_code == status, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


@pytest.mark.usefixtures("tiny")
class TestTiny:
    def test_exact_is_status_0_with_what_was_exercised(self) -> None:
        report = certify("any.gguf", "--trials", "20", "--seed", "5", "--max-num-batched-tokens", "128", status=0)
        assert report["exact"] is True
        assert (report["model"], report["trials"], report["seed"]) == ("any.gguf", 20, 5)
        assert (report["mismatched_logit_bits"], report["mismatched_tokens"], report["failure"]) == (0, 0, None)
        assert report["compared_logits"] > 1000
        assert report["exercised"]["chunks"] > 10
        assert report["settings"]["max_num_batched_tokens"] == 128
        assert report["settings"]["threads"] == 2
        assert report["isa"]

    def test_people_are_told_what_was_exercised_and_the_verdict(self) -> None:
        result = runner.invoke(app, ["certify", "--trials", "3", "--max-num-batched-tokens", "128"])
        assert result.exit_code == 0, result.output
        assert "Legato certifies smollm2-135m" in result.stdout
        assert "0 bits and 0 tokens differ" in result.stdout
        assert result.stderr == ""

    def test_a_fault_is_status_1_and_the_schedule_fails_again_when_replayed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            faults.last_token_is_dropped(patch)
            found = certify("any.gguf", "--max-num-batched-tokens", "128", status=1)
            assert found["exact"] is False
            assert found["mismatched_logit_bits"] > 0
            assert found["failure"]["file"] == "certify-any.json"
            again = certify("--replay", "certify-any.json", status=1)
            assert again["model"] == "any.gguf"
            assert again["settings"] == found["settings"]
            assert again["failure"]["message"] == found["failure"]["message"]
            shown = runner.invoke(app, ["certify", "--replay", "certify-any.json"])
            assert "not exact" in shown.stdout
            assert found["failure"]["message"] in shown.stdout
        assert certify("--replay", "certify-any.json", status=0)["trials"] == 1

    def test_an_interrupt_gives_the_report_so_far_and_status_130(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replay = Campaign.replay

        def interrupted(self: Campaign, schedule: Any, number: int = 0) -> bool:
            if number == 3:
                raise KeyboardInterrupt
            return replay(self, schedule, number)

        monkeypatch.setattr(Campaign, "replay", interrupted)
        report = certify("--max-num-batched-tokens", "128", status=130)
        assert (report["trials"], report["interrupted"], report["exact"]) == (3, True, True)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "cannot read certify.json"),
            ("no", "is no JSON"),
            ("{}", "no schedule written by legato certify"),
            ('{"format": "legato certify 1", "failure": {"schedule": {}}}', "has no field"),
        ],
    )
    def test_a_file_that_is_no_schedule_is_one_line_and_status_1(self, content: str | None, words: str) -> None:
        if content is not None:
            Path("certify.json").write_text(content)
        result = runner.invoke(app, ["certify", "--replay", "certify.json"])
        assert (result.exit_code, result.stdout) == (1, "")
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_it_explains_itself() -> None:
    text = runner.invoke(app, ["certify", "--help"]).output
    for word in ("Examples", "--replay", "--seconds", "--kv-dtype", "legato certify gemma3-270m"):
        assert word in text


def test_the_default_model_is_exact(smollm2_path: Path) -> None:
    report = certify("smollm2-135m", "--trials", "8", status=0)
    assert (report["exact"], report["trials"], report["mismatched_logit_bits"]) == (True, 8, 0)


@pytest.mark.slow
def test_500_schedules_of_the_default_model_are_exact(smollm2_path: Path) -> None:
    report = certify("smollm2-135m", "--trials", "500", "--seed", "11", status=0)
    assert (report["exact"], report["trials"]) == (True, 500)
    assert report["exercised"]["restored_blocks"] > 0


@pytest.mark.slow
def test_500_schedules_of_gemma_with_its_windows_are_exact(gemma3_path: Path) -> None:
    report = certify("gemma3-270m", "--trials", "500", "--seed", "12", status=0)
    assert (report["exact"], report["trials"]) == (True, 500)
