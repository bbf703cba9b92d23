"""`open_disk_archive` and `PoolArchive`: one limit for all models of a folder, and nothing foreign is touched."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from legato.errors import ConfigError
from legato.exec.archive import DiskArchive
from legato.exec.host_pool import Bytes, HostPool
from legato.exec.pool_archive import PoolArchive, open_disk_archive

NBYTES = 1000
FILE_NBYTES = NBYTES + 84
MODELS = [bytes([n]) * 32 for n in range(4)]


def key(n: int) -> bytes:
    return bytes([n]) * 32


def filled(folder: Path, root: bytes, blocks: int, max_bytes: int) -> DiskArchive:
    archive = open_disk_archive(folder, root, NBYTES, max_bytes)
    for n in range(blocks):
        archive.put(key(n), bytes([n]) * NBYTES)
    archive.flush()
    archive.close()
    return archive


def kept(folder: Path, root: bytes) -> int:
    return len(list((folder / root.hex()[:16]).glob("??/*")))


def test_models_share_a_limit_and_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    limit = 12 * FILE_NBYTES
    for age, root in enumerate(MODELS[:3]):
        filled(tmp_path, root, 3, limit)
        os.utime(tmp_path / root.hex()[:16], (1000 + age, 1000 + age))
    assert [kept(tmp_path, root) for root in MODELS] == [3, 3, 3, 0], "none makes room before it must"
    last = filled(tmp_path, MODELS[3], 8, limit)
    assert [kept(tmp_path, root) for root in MODELS] == [0, 3, 3, 6], "half is for the one that runs"
    assert last.evicted == 2


def test_what_is_not_an_archives_stays(tmp_path: Path) -> None:
    root = MODELS[0]
    filled(tmp_path, root, 3, 10 * FILE_NBYTES)
    looks_alike = tmp_path / root.hex()[:16]
    (looks_alike / "00" / "thesis.txt").write_text("years of work")
    (looks_alike / "notes").mkdir()
    (tmp_path / "photos").mkdir()
    filled(tmp_path, MODELS[1], 1, FILE_NBYTES)
    assert kept(tmp_path, MODELS[1]) == 1
    assert (looks_alike / "00" / "thesis.txt").read_text() == "years of work"
    assert (looks_alike / "notes").is_dir() and (tmp_path / "photos").is_dir()
    assert not list(looks_alike.glob("0[12]/*")), "its blocks are gone"


def test_a_limit_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no room for one block"):
        open_disk_archive(tmp_path, MODELS[0], NBYTES, NBYTES)


class Blocks:
    """Four blocks of bytes: a `BlockMemory`."""

    block_nbytes = NBYTES

    def __init__(self) -> None:
        self.rows = np.zeros((4, NBYTES), np.uint8)

    def copy_out(self, block: int, into: Bytes) -> None:
        into[:] = self.rows[block]

    def copy_in(self, block: int, source: Bytes) -> None:
        self.rows[block] = source


def test_a_block_goes_to_disk_and_comes_back_by_way_of_host_memory(tmp_path: Path) -> None:
    kv = Blocks()
    host = HostPool(kv, 2)
    archive = PoolArchive(open_disk_archive(tmp_path, MODELS[0], NBYTES, 1 << 20), kv, host)
    for block in range(3):
        kv.rows[block] = block + 1
        archive.save(key(block), block)
        kv.rows[block] = 0
    fetch = archive.fetch([key(0), key(1), key(2)])
    assert fetch.wait(10)
    assert [found for found, _ in fetch.blocks] == [key(0), key(1)], "as many as host memory has room for"
    archive.load(1, fetch.blocks[1][1])
    host.restore(1, 3)
    assert (kv.rows[3] == 2).all()
    archive.close()
