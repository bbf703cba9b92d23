"""The command: what it prints, where, and with which status."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from legato.cli.main import app
from legato.cli.serve import order_of
from legato.engine.wire import EngineInfo
from legato.server.terms import Admission

runner = CliRunner()


@pytest.mark.parametrize("verb", ["serve", "chat", "generate", "pull", "version"])
def test_every_verb_explains_itself(verb: str) -> None:
    result = runner.invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert verb in runner.invoke(app, ["--help"]).output


def test_version_names_the_kernels() -> None:
    facts = json.loads(runner.invoke(app, ["version", "--json"]).output)
    assert set(facts) == {"legato", "python", "kernels"}


def test_pull_lists_the_aliases() -> None:
    names = [row["name"] for row in json.loads(runner.invoke(app, ["pull", "--list", "--json"]).output)]
    assert "smollm2-135m" in names
    assert "(default)" in runner.invoke(app, ["pull", "--list"]).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "no-such-model", "--port", "0"], "no-such-model"),
        (["serve", "--port", "0", "--max-num-batched-tokens", "8"], "max_num_seqs is 64"),
        (["serve", "--port", "0", "--kv-memory", "much"], "'much' is no size"),
        (["serve", "--port", "0", "--block-tokens", "20"], "multiple of 16"),
        (["serve", "--host", "192.0.2.1"], "192.0.2.1"),
        (["serve", "--shed"], "give ttft_ms"),
        (["serve", "--tenant-header", "x-tenant"], "choose fair"),
        (["serve", "--policy", "fair", "--tenant-header", "my tenant"], "write it as X-Tenant"),
        (["serve", "--policy", "fair", "--tenant-header", "Authorization"], "a secret"),
        (["serve", "--policy", "fair", "--tenant-weight", "gold=3"], "no request can be of tenant 'gold'"),
        (["serve", "--policy", "fair", "--tenant-weight", "key-2BB80D53=3"], "no request can be of tenant 'key-2BB"),
        (["serve", "--policy", "fair", "--tenant-header", "t", "--tenant-weight", "größe=3"], "printable ASCII"),
        (["serve", "--policy", "fair", *["--tenant-weight", "key-2bb80d53=3"] * 2], "has two weights"),
        (["serve", "--tenant-weight", "key-2bb80d53=3"], "mean nothing to policy slo"),
        (["serve", "--port", "0", "--max-num-batched-tokens", "0"], "max_num_batched_tokens is 0"),
        (["serve", "--policy", "fair", "--tenant-weight", "gold"], "write it as gold=3"),
        (["serve", "--policy", "fair", "--tenant-weight", "gold=much"], "write it as gold=3"),
        (["pull", "no-such-model"], "no-such-model"),
        (["generate", "./missing.gguf", "hello"], "missing.gguf"),
        (["chat", "./missing.gguf"], "missing.gguf"),
        (["generate", "--temperature", "9", "hello"], "temperature is 9"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_status_1(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.parametrize("arguments", [["serve", "--port", "99999"], ["serve", "--kv-dtype", "f8"], ["nonsense"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert runner.invoke(app, arguments).exit_code == 2


def test_a_taken_port_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = runner.invoke(app, ["serve", "--port", str(port)])
    assert result.exit_code == 1
    assert f"port {port} on 127.0.0.1 is taken" in result.stderr


@pytest.mark.parametrize(
    ("info", "admission", "words"),
    [
        ({"policy": "slo"}, Admission(), "prompts by when they are due, short ones first"),
        ({"policy": "fcfs"}, Admission(), "in order of arrival"),
        ({"policy": "fair", "ttft_s": 2.0}, Admission(True), "a tenant is an API key · .* within 2,000 ms, else 429"),
        ({"policy": "fair", "ttft_s": 2.0}, Admission(False, "X-Team"), "a tenant is X-Team · .* if possible"),
    ],
)
def test_the_banner_says_who_goes_first(info: dict[str, Any], admission: Admission, words: str) -> None:
    assert re.search(words, order_of(EngineInfo(1, 1, 1, 1, 1, 1, **info), admission))


def test_a_file_that_is_no_model_is_one_clear_sentence(tmp_path: Path) -> None:
    """From the engine's process to the terminal: no traceback, status 1."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    command = [sys.executable, "-m", "legato.cli.main", "serve", str(path), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "broken.gguf" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("fake_llm")
class TestGenerate:
    def test_one_prompt_streams_its_text_to_stdout(self) -> None:
        result = runner.invoke(app, ["generate", "abc", "--max-tokens", "5"])
        assert (result.exit_code, result.stdout) == (0, "abcab\n")

    def test_the_prompt_may_come_from_a_pipe(self) -> None:
        result = runner.invoke(app, ["generate", "smollm2-135m", "--max-tokens", "5"], input="xyz")
        assert result.stdout == "xyzxy\n"

    def test_several_prompts_are_one_json_line_each(self) -> None:
        result = runner.invoke(app, ["generate", "ab", "c", "--max-tokens", "3", "--json"])
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert [row["text"] for row in rows] == ["aba", "ccc"]
        assert rows[0]["finish_reason"] == "length"
        assert rows[0]["completion_tokens"] == 3

    def test_chat_uses_the_template_and_stop_ends_before_the_text(self) -> None:
        result = runner.invoke(app, ["generate", "--chat", "hi", "--stop", "|"])
        assert result.stdout == "user:hi\n"

    def test_an_error_of_the_request_is_one_line(self) -> None:
        result = runner.invoke(app, ["generate", "x" * 600])
        assert (result.exit_code, result.stdout) == (1, "")
        assert "600 tokens; 512 fit" in result.stderr


@pytest.mark.usefixtures("fake_llm")
class TestChat:
    def talk(self, *lines: str, options: tuple[str, ...] = ()) -> str:
        result = runner.invoke(app, ["chat", "--max-tokens", "12", *options], input="".join(f"{x}\n" for x in lines))
        assert result.exit_code == 0, result.output
        return result.stdout

    def test_a_turn_is_answered_with_its_figures(self) -> None:
        out = self.talk("hi")
        assert "user:hi|user" in out
        assert "12 tokens" in out
        assert "tok/s" in out

    def test_the_next_turn_carries_the_conversation_until_reset(self) -> None:
        out = self.talk("a", "b", "/reset", "c")
        before, after = out.split("forgotten")
        assert "user:a|user:" in before
        assert "user:a|assis" in before
        assert "user:c|user:" in after

    def test_commands_are_explained_and_wrong_ones_told(self) -> None:
        out = self.talk("/help", "/nonsense", "/system be brief", "x", "/system", "/exit", "never read")
        assert "/reset" in out
        assert "There is no /nonsense" in out
        assert "system:be br" in out
        assert "never" not in out

    def test_a_line_that_ends_in_a_backslash_goes_on(self) -> None:
        assert "user:a\nb|" in self.talk("a\\", "b")

    def test_when_the_context_is_full_the_oldest_turns_go(self) -> None:
        out = self.talk(*["x" * 100] * 8)
        assert "oldest turns are forgotten" in out
        assert "600 tokens" not in out

    def test_a_message_that_never_fits_is_refused_and_the_talk_goes_on(self) -> None:
        out = self.talk("x" * 600, "hi")
        assert "512 fit" in out
        assert "user:hi|" in out
