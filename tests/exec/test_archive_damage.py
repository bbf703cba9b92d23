"""Whatever happens to the files of an archive, no wrong block comes out of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exec.archive_rig import BLOCK_NBYTES, FILE_NBYTES, block_of, found, key_of, path_of, store
from legato.exec.archive import DiskArchive


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[DiskArchive]:
    archive = DiskArchive(tmp_path / "kv", BLOCK_NBYTES, 100 * FILE_NBYTES)
    yield archive
    archive.close()


def test_a_file_with_any_one_bit_flipped_is_a_miss_and_removed(archive: DiskArchive, tmp_path: Path) -> None:
    store(archive, 1)
    path = path_of(tmp_path / "kv", 1)
    good = path.read_bytes()
    assert len(good) == FILE_NBYTES
    for bit in range(8 * FILE_NBYTES):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert found(archive, 1) == [], f"bit {bit}"
        assert not path.exists()
        assert archive.damaged == bit + 1
    assert key_of(1) not in archive
    store(archive, 1)
    assert found(archive, 1) == [1]


@given(size=st.integers(0, FILE_NBYTES - 1), tail=st.binary(max_size=9))
@example(size=0, tail=b"")
@settings(max_examples=100, deadline=None)
def test_a_file_of_any_other_length_is_a_miss_and_removed(size: int, tail: bytes) -> None:
    """Cut short, empty, longer, or of the right length with another end."""
    with tempfile.TemporaryDirectory() as folder:
        archive = DiskArchive(Path(folder), BLOCK_NBYTES, 9 * FILE_NBYTES)
        store(archive, 1, 2)
        path = path_of(Path(folder), 1)
        good = path.read_bytes()
        for bad in (good[:size], good[:size] + tail, good[:size] + bytes(FILE_NBYTES - size), good + tail):
            path.write_bytes(bad)
            damaged = archive.damaged
            assert found(archive, 1, 2) == ([1, 2] if bad == good else [])
            assert archive.damaged == damaged + (bad != good)
            assert path.exists() == (bad == good)
        archive.close()


@given(st.binary(min_size=FILE_NBYTES, max_size=FILE_NBYTES))
@settings(max_examples=50, deadline=None)
def test_garbage_is_a_miss_and_removed(garbage: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = path_of(Path(folder), 1)
        path.parent.mkdir()
        path.write_bytes(garbage)
        archive = DiskArchive(Path(folder), BLOCK_NBYTES, 9 * FILE_NBYTES)
        assert len(archive) == 1
        assert found(archive, 1) == []
        assert (archive.damaged, len(archive), path.exists()) == (1, 0, False)
        archive.close()


def test_the_file_of_another_key_is_a_miss(archive: DiskArchive, tmp_path: Path) -> None:
    store(archive, 1, 2)
    os.replace(path_of(tmp_path / "kv", 1), path_of(tmp_path / "kv", 2))
    assert found(archive, 2) == []
    assert archive.damaged == 1
    assert found(archive, 1) == []
    assert (archive.damaged, len(archive)) == (1, 0), "a file that has vanished is a miss, and not damage"


def test_a_block_of_another_size_under_a_right_checksum_is_a_miss(archive: DiskArchive, tmp_path: Path) -> None:
    other = DiskArchive(tmp_path / "other", BLOCK_NBYTES + 1, 9 * FILE_NBYTES)
    assert other.put(key_of(1), block_of(1) + b"x")
    other.close()
    store(archive, 1)
    os.replace(path_of(tmp_path / "other", 1), path_of(tmp_path / "kv", 1))
    assert found(archive, 1) == []
    assert archive.damaged == 1


class Archive(RuleBasedStateMachine):
    """Whatever happens to the files: what is found is right, what nobody spoiled is found, the folder is bounded."""

    numbers = st.integers(0, 7)
    limit = 5

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.folder = Path(self.root.name)
        self.order: list[int] = []  # of the blocks on disk, least recently used first
        self.spoiled: set[int] = set()
        self.open()

    def open(self) -> None:
        self.archive = DiskArchive(self.folder, BLOCK_NBYTES, self.limit * FILE_NBYTES)

    @rule(number=numbers)
    def put(self, number: int) -> None:
        store(self.archive, number)
        if number in self.order:
            self.order.remove(number)
        self.order = [*self.order, number][-self.limit :]
        self.spoiled &= set(self.order)

    @rule(numbers=st.lists(numbers, unique=True))
    def fetch(self, numbers: list[int]) -> None:
        wanted = []
        for number in numbers:
            if number in self.spoiled or number not in self.order:
                self.spoiled.discard(number)
                self.order = [n for n in self.order if n != number]
                break
            wanted.append(number)
        assert found(self.archive, *numbers) == wanted
        self.order = [n for n in self.order if n not in wanted] + wanted[::-1]

    @precondition(lambda self: self.order)
    @rule(choice=st.integers(0, 7), at=st.integers(0, FILE_NBYTES - 1), mask=st.integers(1, 255))
    def damage(self, choice: int, at: int, mask: int) -> None:
        number = self.order[choice % len(self.order)]
        if number not in self.spoiled:
            path = path_of(self.folder, number)
            stat, data = path.stat(), bytearray(path.read_bytes())
            data[at] ^= mask
            path.write_bytes(data)
            os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
            self.spoiled.add(number)

    @rule()
    def restart(self) -> None:
        """The order on disk is that of reads and writes: putting a block that is there touches no file."""
        self.archive.close()
        on_disk = [number for number in self.order if path_of(self.folder, number).exists()]
        assert sorted(on_disk) == sorted(self.order)
        self.order.sort(key=lambda number: path_of(self.folder, number).stat().st_mtime_ns)
        self.open()

    @invariant()
    def the_folder_is_bounded_and_known(self) -> None:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        assert len(files) == len(self.archive) == len(self.order) <= self.limit
        assert all(key_of(number) in self.archive for number in self.order)

    def teardown(self) -> None:
        self.archive.close()
        self.root.cleanup()


TestArchive = Archive.TestCase
TestArchive.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
