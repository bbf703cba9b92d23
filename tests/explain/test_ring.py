"""A trace on disk is bounded, and its newest part can always be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from explain.rig import MACHINE
from legato.errors import ConfigError
from legato.explain.read import read_trace
from legato.explain.record import FORMAT, Asked, Ended, Fitted, Header, Options, Stepped, cost_of, encode_line
from legato.explain.ring import LEAST_BYTES, TraceWriter, older_path

HEADER = Header(FORMAT, "0", "tiny", 1.0, 2.0, 0.1, Options(10, 16, 100, 64, 8), MACHINE.to_dict())
IDS = list(range(1, 17))


def a_step(step: int, ids: list[int] = IDS) -> Stepped:
    n = len(ids)
    return Stepped(
        step,
        float(step),
        0.001,
        0.5,
        step + 0.6,
        ids,
        [9] * n,
        [1] * n,
        [1] * n,
        n,
        n,
        0,
        5,
        0.4,
        0.1,
        (n,) * 9,
        1.0,
        1.0,
    )


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, older_path(path)) if file.exists())


def test_the_size_on_disk_never_exceeds_the_limit_and_the_newest_steps_are_there(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    writer = TraceWriter(path, HEADER, LEAST_BYTES)
    for request_id in IDS:
        writer.write(Asked(request_id, 0.5, 100, 9000, blocks=[2**32 - 1] * 50))
    most = 0
    for step in range(6000):
        writer.write(a_step(step))
        if step % 50 == 0:
            most = max(most, size(path))
    assert LEAST_BYTES / 2 < most <= LEAST_BYTES
    trace = read_trace(path)
    numbers = [step.step for step in trace.steps]
    assert numbers == list(range(numbers[0], 6000)), "without a hole up to the last"
    assert len(numbers) > 1000
    assert trace.is_cut
    writer.close()


def test_requests_that_are_open_are_known_after_older_files_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    writer = TraceWriter(path, HEADER, LEAST_BYTES)
    writer.write(Asked(1, 0.5, 100, 9000, blocks=[7, 8]))
    writer.write(Asked(2, 0.5, 100, 9000))
    writer.write(a_step(0, [1, 2]))
    writer.write(Ended(2, "stop", 1, 1.0))
    for step in range(1, 6000):
        writer.write(a_step(step, [1]))
    writer.write(Fitted(9.0, MACHINE.scaled(3.0).to_dict()))
    for step in range(6000, 9000):
        writer.write(a_step(step, [1]))
    trace = read_trace(path)
    assert set(trace.requests) == {1}
    assert trace.requests[1].blocks == [7, 8]
    assert trace.requests[1].generated == trace.steps[0].step, "a token a step"
    assert cost_of(trace.header.cost) == MACHINE.scaled(3.0), "by which the steps of this file were foreseen"


def test_a_crowd_that_is_open_fills_a_quarter_at_most(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    writer = TraceWriter(path, HEADER, LEAST_BYTES)
    for request_id in range(3000):
        writer.write(Asked(request_id, 0.5, 10_000, 9000, blocks=[2**32 - 1] * 300))
        assert size(path) <= LEAST_BYTES
    for step in range(3000):
        writer.write(a_step(step))
    assert size(path) <= LEAST_BYTES
    assert len(read_trace(path).steps) > 300
    assert path.read_bytes().count(b'"type":"request"') > 2000, "without the names of their blocks they have room"


def test_a_line_longer_than_a_file_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    writer = TraceWriter(path, HEADER, LEAST_BYTES)
    writer.write(a_step(0, [1] * LEAST_BYTES))
    writer.write(a_step(1))
    assert [step.step for step in read_trace(path).steps] == [1]


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for steps in (5000, 3):
        writer = TraceWriter(path, HEADER, LEAST_BYTES)
        for step in range(steps):
            writer.write(a_step(step))
        writer.close()
    assert len(read_trace(path).steps) == 3
    assert not older_path(path).exists()


def test_what_is_no_trace_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF....")
    with pytest.raises(ConfigError, match=r"model\.gguf exists and is no trace.*another name"):
        TraceWriter(path, HEADER, LEAST_BYTES)
    assert path.read_bytes() == b"GGUF...."
    (tmp_path / "steps.1").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"steps\.1 exists and is no trace"):
        TraceWriter(tmp_path / "steps", HEADER, LEAST_BYTES)


def test_limits_and_folders_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_size is 1000 bytes; 1MiB is the least"):
        TraceWriter(tmp_path / "steps", HEADER, 1000)
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; make it first"):
        TraceWriter(tmp_path / "nowhere" / "steps", HEADER, LEAST_BYTES)
    assert not os.listdir(tmp_path)


def test_a_file_begins_with_what_is_looked_for(tmp_path: Path) -> None:
    """`require_room` tells a trace by its first bytes: they are those that the encoder writes."""
    path = tmp_path / "steps"
    path.write_bytes(encode_line(HEADER))
    TraceWriter(path, HEADER, LEAST_BYTES)
