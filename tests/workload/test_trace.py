"""Traces of real traffic, in the layouts in which they are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.errors import ConfigError
from legato.workload.arrivals import Arrival
from legato.workload.trace import read_trace

MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2356]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
"""
OWN = """{"at_s": 1.5, "prompt_tokens": 100, "output_tokens": 5, "tenant": "a", "shared": [[7, 64]]}
{"at_s": 2, "prompt_tokens": 10, "output_tokens": 5}
"""


def read(tmp_path: Path, text: str, speed: float = 1.0) -> list[Arrival]:
    path = tmp_path / "trace"
    path.write_text(text)
    return list(read_trace(path, speed))


def test_mooncake_is_in_milliseconds_and_says_what_prompts_share(tmp_path: Path) -> None:
    first, second = read(tmp_path, MOONCAKE)
    assert first == Arrival(0.0, 6955, 52, ((46, 512), (47, 512), (2356, 512)))
    assert second.at_s == pytest.approx(3.053) and second.shared == ((46, 512), (47, 512))


@pytest.mark.parametrize(("text", "gap_s"), [(AZURE, 0.052), (AZURE_2024, 0.007405)], ids=["2023", "2024"])
def test_azure_has_dates(tmp_path: Path, text: str, gap_s: float) -> None:
    first, second = read(tmp_path, text)
    assert first.at_s == 0.0 and second.at_s == pytest.approx(gap_s, abs=1e-5)
    assert (first.prompt_tokens, first.output_tokens) in ((4808, 10), (2162, 5))


def test_burstgpt_has_seconds_and_failures_which_are_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, BURSTGPT) == [Arrival(0.0, 472, 18), Arrival(40.0, 1087, 230)]


def test_ones_own_json_lines(tmp_path: Path) -> None:
    assert read(tmp_path, OWN) == [Arrival(0.0, 100, 5, ((7, 64),), "a"), Arrival(0.5, 10, 5)]


def test_a_trace_is_replayed_faster(tmp_path: Path) -> None:
    assert read(tmp_path, BURSTGPT, speed=4.0)[1].at_s == 10.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests"),
        ("a,b\n1,2\n", "line 1: 'a,b' begins no layout"),
        ("TIMESTAMP,ContextTokens\n", "line 1: there is no column GeneratedTokens"),
        (AZURE + "2023-11-16 18:17:03.0,5,5\n", "line 4: it comes 1.03.* before the line above; sort it"),
        (AZURE + "2023-11-16 18:17:05.0,-5,5\n", "line 4: the prompt has -5 tokens"),
        (AZURE + "2023-11-16 18:17:05.0,5,-5\n", "line 4: the answer has -5 tokens"),
        (AZURE + "yesterday,5,5\n", "line 4: 'yesterday' is no time"),
        (AZURE + "2023-11-16 18:17:05.0,5\n", "line 4: it has 2 columns, and 3 are needed"),
        (BURSTGPT + "x,GPT-4,1,2,3,y\n", "line 5: 'x' is no time"),
        (BURSTGPT + "200,GPT-4,many,2,3,y\n", "line 5: 'many' is no number of tokens of the prompt"),
        (MOONCAKE + '{"timestamp": 40000, "input_length": 6}\n', "line 3: there is no output_length"),
        (MOONCAKE + '{"timestamp": 40000, "input_length": 0, "output_length": 1}\n', "line 3: the prompt has 0 tokens"),
        (MOONCAKE + "{broken\n", "line 3: it is no JSON"),
        (OWN + '{"at_s": 3, "prompt_tokens": 10}\n', "line 3: there is no output_tokens"),
        (OWN + '{"at_s": 3, "prompt_tokens": 10, "output_tokens": 1, "shared": [5]}\n', "line 3: shared is no list"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        list(read_trace(tmp_path / "binary"))
