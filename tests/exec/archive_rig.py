"""Small blocks whose contents follow from a number, and where an archive keeps them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from legato.exec.archive import DiskArchive

BLOCK_NBYTES = 96
FILE_NBYTES = BLOCK_NBYTES + 84
WAIT_S = 20.0


def key_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def block_of(number: int) -> bytes:
    return bytes((number + 7 * i) % 256 for i in range(BLOCK_NBYTES))


def path_of(folder: Path, number: int) -> Path:
    name = key_of(number).hex()
    return folder / name[:2] / name


def store(archive: DiskArchive, *numbers: int) -> None:
    for number in numbers:
        assert archive.put(key_of(number), block_of(number))
        archive.flush()


def found(archive: DiskArchive, *numbers: int) -> list[int]:
    """Which of these a fetch gives, after checking that each is what was put."""
    fetch = archive.fetch([key_of(number) for number in numbers])
    assert fetch.wait(WAIT_S)
    assert fetch.done
    got = list(numbers[: len(fetch.blocks)])
    assert fetch.blocks == [(key_of(number), block_of(number)) for number in got]
    return got
