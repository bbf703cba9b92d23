"""Blocks on disk: found again after a restart, bounded, and never in the way."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from exec.archive_rig import BLOCK_NBYTES, FILE_NBYTES, WAIT_S, block_of, found, key_of, path_of, store
from legato.errors import ConfigError
from legato.exec import archive as module
from legato.exec.archive import DiskArchive

Open = Callable[..., DiskArchive]


@pytest.fixture
def open_archive(tmp_path: Path) -> Iterator[Open]:
    """Opens archives of small blocks on one folder; closes them at the end."""
    opened: list[DiskArchive] = []

    def open_archive(blocks: int = 100, **options: int) -> DiskArchive:
        opened.append(DiskArchive(tmp_path / "kv", BLOCK_NBYTES, blocks * FILE_NBYTES, **options))
        return opened[-1]

    yield open_archive
    for archive in opened:
        archive.close()


class Gate:
    """Stands in for the function that writes files: holds them until it is opened, or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.error: OSError | None = None
        self._write = module._write_file
        monkeypatch.setattr(module, "_write_file", self)

    def __call__(self, path: Path, header: bytes, data: bytes) -> None:
        self.reached.set()
        assert self.open.wait(WAIT_S)
        if self.error is not None:
            self._write(path, header, data[: len(data) // 2])
            raise self.error
        self._write(path, header, data)


def test_blocks_are_found_again_after_a_restart(open_archive: Open) -> None:
    first = open_archive()
    for number in range(5):
        assert first.put(key_of(number), block_of(number))
        assert key_of(number) in first
    first.close()
    assert (first.written, len(first), first.nbytes) == (5, 5, 5 * FILE_NBYTES)
    second = open_archive()
    assert (len(second), second.nbytes) == (5, 5 * FILE_NBYTES)
    assert key_of(4) in second
    assert key_of(5) not in second
    assert found(second, 3, 1, 4, 0, 2) == [3, 1, 4, 0, 2]
    assert (second.read, second.damaged, second.written) == (5, 0, 0)


def test_a_fetch_ends_at_the_first_block_that_is_not_there(open_archive: Open) -> None:
    archive = open_archive()
    store(archive, 0, 1, 3)
    assert found(archive, 0, 1, 2, 3) == [0, 1]
    assert found(archive, 2, 0) == []
    assert found(archive) == []
    assert (archive.read, archive.damaged) == (2, 0)


def test_an_array_is_copied_when_it_is_put(open_archive: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    archive = open_archive()
    buffer = np.frombuffer(block_of(1), np.uint8).copy()
    assert archive.put(key_of(1), buffer)
    buffer[:] = 0
    gate.open.set()
    archive.flush()
    assert found(open_archive(), 1) == [1]


def test_a_block_that_waits_to_be_written_is_already_found(open_archive: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    archive = open_archive()
    assert archive.put(key_of(1), block_of(1))
    assert archive.put(key_of(2), block_of(2))
    assert gate.reached.wait(WAIT_S)
    assert found(archive, 1, 2) == [1, 2]
    assert len(archive) == 0
    gate.open.set()
    archive.flush()
    assert (len(archive), archive.written) == (2, 2)


def test_the_least_recently_used_go_first_also_across_a_restart(open_archive: Open, tmp_path: Path) -> None:
    archive = open_archive(blocks=4)
    store(archive, 0, 1, 2, 3)
    assert found(archive, 0) == [0]
    store(archive, 4)
    assert [n for n in range(5) if key_of(n) in archive] == [0, 2, 3, 4]
    assert found(archive, 2) == [2]
    archive.close()
    again = open_archive(blocks=4)
    store(again, 5)
    assert [n for n in range(6) if path_of(tmp_path / "kv", n).exists()] == [0, 2, 4, 5]
    again.close()
    smaller = open_archive(blocks=2)
    assert [n for n in range(6) if path_of(tmp_path / "kv", n).exists()] == [2, 5]
    assert (len(smaller), smaller.evicted, archive.evicted, again.evicted) == (2, 2, 1, 1)


def test_of_a_prefix_the_end_goes_first(open_archive: Open) -> None:
    """A fetch begins with the first block: without it the others are lost too."""
    archive = open_archive(blocks=4)
    store(archive, 3, 2, 1, 0)
    assert found(archive, 0, 1, 2, 3) == [0, 1, 2, 3]
    store(archive, 4, 5)
    assert found(archive, 0, 1, 2, 3) == [0, 1]


def test_putting_a_block_again_keeps_it_and_writes_nothing(open_archive: Open) -> None:
    archive = open_archive(blocks=2)
    store(archive, 0, 1, 0, 2)
    assert archive.written == 3
    assert [n for n in range(3) if key_of(n) in archive] == [0, 2]


def test_opening_removes_left_overs_and_leaves_foreign_files(open_archive: Open, tmp_path: Path) -> None:
    first = open_archive()
    store(first, 1, 2)
    first.close()
    folder = tmp_path / "kv"
    path_of(folder, 2).write_bytes(b"short")
    name = path_of(folder, 1)
    old, young = (name.with_name(f"{name.name}.{token}.tmp") for token in ("0" * 16, "1" * 16))
    foreign = [
        folder / "notes.txt",
        folder / "ff",  # a file where a folder could be
        folder / name.name,
        folder / "00" / name.name,
        name.with_name("README"),
        name.with_name(name.name.upper() + "0"),
        name.with_name(f"{name.name}.tmp"),
        name.with_name(name.name[:2] + "0" * 62) / "inside",  # a folder where a block could be
    ]
    for path in (old, young, *foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    link = name.with_name(name.name[:2] + "1" * 62)
    link.symlink_to(folder / "notes.txt")
    past_s = time.time() - 3600
    for path in (old, *foreign):
        os.utime(path, (past_s, past_s))
    second = open_archive(blocks=1)
    assert len(second) == 1
    assert not old.exists()
    assert young.exists(), "another engine may be writing it"
    assert not path_of(folder, 2).exists()
    store(second, 3, 4)
    assert all(path.read_bytes() == b"x" for path in (*foreign, link))


def test_a_full_disk_ends_the_writing_and_never_reaches_the_caller(
    open_archive: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    archive = open_archive()
    store(archive, 1)
    gate.open.clear()
    gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert all(archive.put(key_of(number), block_of(number)) for number in (2, 3, 4))
    gate.open.set()
    archive.flush()
    assert archive.last_error.endswith("no longer written: No space left on device")
    assert not archive.put(key_of(5), block_of(5))
    assert (archive.written, archive.dropped) == (1, 4)
    assert [n for n in range(6) if key_of(n) in archive] == [1]
    assert found(archive, 1, 2) == [1]
    assert [path for path in (tmp_path / "kv").rglob("*") if path.is_file()] == [path_of(tmp_path / "kv", 1)]


def test_a_file_taken_away_before_it_has_its_name_is_dropped_and_the_next_is_written(
    open_archive: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = open_archive()
    monkeypatch.setattr(module, "_write_file", lambda path, header, data: None)
    assert archive.put(key_of(1), block_of(1))
    archive.flush()
    assert (archive.written, archive.dropped, len(archive), archive.last_error) == (0, 1, 0, "")
    monkeypatch.undo()
    store(archive, 1)
    assert found(archive, 1) == [1]


def test_a_full_queue_drops_blocks(open_archive: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    archive = open_archive(queue_bytes=3 * BLOCK_NBYTES)
    assert [archive.put(key_of(number), block_of(number)) for number in range(5)] == [True] * 3 + [False] * 2
    assert archive.put(key_of(2), block_of(2)), "it is in the queue"
    gate.open.set()
    archive.flush()
    assert (archive.written, archive.dropped) == (3, 2)
    store(archive, 4)


def test_closing_writes_what_waits_but_not_for_ever(open_archive: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    archive = open_archive()
    store_later = [key_of(1), key_of(2)]
    for number, key in enumerate(store_later, 1):
        assert archive.put(key, block_of(number))
    assert gate.reached.wait(WAIT_S)
    archive.close()
    assert archive.dropped == 2
    assert not archive.put(key_of(3), block_of(3))
    fetch = archive.fetch([key_of(1)])
    assert (fetch.done, fetch.blocks) == (True, [])
    archive.close()
    gate.open.set()


def test_two_engines_share_a_folder(open_archive: Open, tmp_path: Path) -> None:
    first, second = open_archive(blocks=3), open_archive(blocks=3)
    store(first, 0, 1, 2)
    assert key_of(0) not in second
    assert found(second, 0, 1) == [0, 1], "written since it began"
    assert key_of(0) in second
    store(second, 0, 3, 4)
    assert [n for n in range(5) if path_of(tmp_path / "kv", n).exists()] == [0, 2, 3, 4]
    assert found(first, 0, 1, 2) == [0]
    assert key_of(1) not in first
    store(first, 5, 6)
    assert (first.last_error, second.last_error, first.damaged, second.damaged) == ("", "", 0, 0)


def test_two_engines_that_write_and_evict_the_same_blocks_never_read_a_wrong_one(open_archive: Open) -> None:
    archives = [open_archive(blocks=4), open_archive(blocks=5)]
    rng = np.random.default_rng(0)
    for _ in range(300):
        archive, number = archives[rng.integers(2)], int(rng.integers(12))
        archive.put(key_of(number), block_of(number))
        found(archives[rng.integers(2)], *(int(n) for n in rng.permutation(12)[:3]))
    for archive in archives:
        archive.flush()
        assert (archive.damaged, archive.last_error) == (0, "")


def test_a_folder_that_is_removed_meanwhile_is_an_empty_one(open_archive: Open, tmp_path: Path) -> None:
    archive = open_archive()
    store(archive, 1)
    path_of(tmp_path / "kv", 1).unlink()
    path_of(tmp_path / "kv", 1).parent.rmdir()
    (tmp_path / "kv").rmdir()
    assert found(archive, 1) == []
    store(archive, 1)
    assert found(open_archive(), 1) == [1]


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / below
    with pytest.raises(ConfigError, match=f"the KV archive {folder} cannot be written .*: choose another folder"):
        DiskArchive(folder, BLOCK_NBYTES, 1 << 20)


def test_a_limit_with_no_room_for_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of 179 bytes has no room for one block of 180"):
        DiskArchive(tmp_path, BLOCK_NBYTES, FILE_NBYTES - 1)
