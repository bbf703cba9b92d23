"""What is no trace, or a damaged one, is told with the line and the reason."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from explain.rig import Rig
from legato.errors import TraceError
from legato.explain import read
from legato.explain.read import read_trace
from legato.explain.record import FORMAT, Header, block_names
from legato.explain.ring import older_path


@pytest.fixture
def lines() -> list[bytes]:
    rig = Rig()
    rig.ask(1)
    rig.step(5)
    return rig.bytes().splitlines(keepends=True)


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    return path


def test_what_was_written_is_read_again(tmp_path: Path, lines: list[bytes]) -> None:
    trace = read_trace(written(tmp_path, b"".join(lines)))
    assert [step.step for step in trace.steps] == [0, 1, 2, 3, 4]
    assert trace.steps[1].ids == [1]
    assert trace.requests[1].prompt_tokens == 5
    assert not trace.notice and not trace.is_cut
    cost = trace.cost(4)
    assert cost is not None and cost.scale == trace.steps[4].scale


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no trace: it is empty; legato serve --trace FILE writes one"),
        (b"GGUF\x03\x00\x00\n", "is no trace: line 1 is no header"),
        (b'{"figures": {}}\n', "is no trace: line 1 is no header"),
        (b'{"type":"end","id":1,"reason":"stop","generated":1,"end_s":1.0}\n', "is no trace: line 1 is no header"),
    ],
)
def test_what_is_no_trace_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=re.escape(said)):
        read_trace(written(tmp_path, content))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_a_trace_of_another_format_is_told_with_both_numbers(tmp_path: Path, lines: list[bytes]) -> None:
    header = msgspec.structs.replace(msgspec.json.decode(lines[0], type=Header), format=FORMAT + 1)
    with pytest.raises(TraceError, match="has format 2, written by legato 0; this one reads format 1"):
        read_trace(written(tmp_path, msgspec.json.encode(header) + b"\n"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda line: line.replace(b'"step":', b'"stop":', 1), r"line 4: Object missing required field `step`"),
        (lambda line: line[:40] + b"\n", r"line 4: .*Input data was truncated|line 4: .*malformed"),
        (lambda line: line.replace(b'"decodes":1', b'"decodes":"1"'), r"line 4: Expected `int`, got `str`"),
        (lambda line: line.replace(b'"ids":[1]', b'"ids":[1,2]'), r"line 4: the columns of step 1 differ in length"),
        (lambda line: line.replace(b'"step":1,', b'"step":0,'), r"line 4: step 0 comes after step 0"),
    ],
)
def test_a_damaged_line_is_told_with_its_number(tmp_path: Path, lines: list[bytes], spoil: object, said: str) -> None:
    spoiled = spoil(lines[3])  # type: ignore[operator]
    assert spoiled != lines[3]
    with pytest.raises(TraceError, match=said):
        read_trace(written(tmp_path, b"".join([*lines[:3], spoiled, *lines[4:]])))


def test_a_last_line_that_was_cut_is_left_out_and_told(tmp_path: Path, lines: list[bytes]) -> None:
    trace = read_trace(written(tmp_path, b"".join(lines)[:-20]))
    assert [step.step for step in trace.steps] == [0, 1, 2, 3]
    assert f"line {len(lines)}: " in trace.notice
    assert "ends in the middle of this line, which is left out" in trace.notice


def test_lines_of_another_run_are_not_taken_for_older_ones(tmp_path: Path, lines: list[bytes]) -> None:
    path = written(tmp_path, b"".join([lines[0], lines[1], *lines[4:]]))
    older_path(path).write_bytes(b"".join(lines[:4]))
    assert [step.step for step in read_trace(path).steps] == [0, 1, 2, 3, 4]
    other = msgspec.structs.replace(msgspec.json.decode(lines[0], type=Header), unix_s=99.0)
    older_path(path).write_bytes(msgspec.json.encode(other) + b"\n" + b"".join(lines[1:4]))
    assert [step.step for step in read_trace(path).steps] == [2, 3, 4]


def test_files_that_change_places_while_they_are_read_are_read_again(
    tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or steps would be missing in the middle, and a gap over them would be blamed on an idle engine."""
    path, read_both = written(tmp_path, b"".join(lines[:4])), read._read_both

    def meanwhile(asked: Path) -> read.Trace:
        if older_path(path).exists():
            return read_both(asked)
        path.rename(older_path(path))
        path.write_bytes(b"".join([lines[0], *lines[4:]]))
        trace = read_both(asked)
        del trace.steps[2]
        return trace

    monkeypatch.setattr(read, "_read_both", meanwhile)
    assert [step.step for step in read_trace(path).steps] == [0, 1, 2, 3, 4]


def test_prompts_that_begin_alike_have_names_that_begin_alike() -> None:
    head = tuple(range(40))
    one, two = block_names(b"run", (*head, 1, 2, 3, 4, 5, 6, 7, 8, 9), 16), block_names(b"run", (*head, 9) * 2, 16)
    assert len(one) == 3 and one[:2] == two[:2] and one[2] != two[2]
    assert block_names(b"another run", head, 16)[0] != one[0]
