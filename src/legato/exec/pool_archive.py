"""`PoolArchive`: a `DiskArchive` between the KV pool and host memory of one engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from legato.exec.archive import QUEUE_BYTES, DiskArchive, Fetch, archive_files, remove_archive
from legato.exec.host_pool import BlockMemory, HostPool


def open_disk_archive(folder: Path, root: bytes, block_nbytes: int, max_bytes: int) -> DiskArchive:
    """The archive of the model that `root` names, in a sub-folder of its own; `max_bytes` is for all of `folder`.

    It has what it takes already, and half of that at least: those of other models, or of this one with other options,
    make room, the one used longest ago first. Only files of archives are removed, whatever else lies there.
    Raises ConfigError as `DiskArchive`.
    """
    own = folder / root.hex()[:16]
    others = sorted(
        (entry.stat().st_mtime, _nbytes(Path(entry)), Path(entry))
        for entry in (os.scandir(folder) if folder.is_dir() else ())
        if entry.is_dir(follow_symlinks=False) and _is_ours(entry.name) and entry.name != own.name
    )
    taken = sum(nbytes for _, nbytes, _ in others)
    wanted = max(_nbytes(own), max_bytes // 2)
    for _, nbytes, other in others:
        if taken + wanted <= max_bytes:
            break
        remove_archive(other)
        taken -= nbytes
    disk = DiskArchive(own, block_nbytes, max_bytes - taken)
    os.utime(own)
    return disk


def _is_ours(name: str) -> bool:
    return len(name) == 16 and set(name) <= set("0123456789abcdef")


def _nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in archive_files(folder))


class PoolArchive:
    """The engine's `Archive`: blocks of the pool go to disk when they are computed, and come back by way of `host`."""

    def __init__(self, disk: DiskArchive, kv: BlockMemory, host: HostPool) -> None:
        self.disk = disk
        self._kv = kv
        self._host = host
        self._content = np.empty(kv.block_nbytes, np.uint8)

    @property
    def most_nbytes(self) -> int:
        """Bytes of blocks on their way to disk, and of one prompt on its way back, at most."""
        return QUEUE_BYTES + self._host.nbytes

    def __contains__(self, key: object) -> bool:
        return key in self.disk

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        """Begins to read, as many blocks as host memory has room for."""
        return self.disk.fetch(keys[: self._host.slots])

    def load(self, slot: int, content: bytes) -> None:
        """Puts what was fetched into a slot of host memory."""
        self._host.write(slot, content)

    def save(self, key: bytes, block: int) -> None:
        """Copies a block of the pool for the writer. Cost: two copies of a block."""
        self._kv.copy_out(block, self._content)
        self.disk.put(key, self._content)

    def close(self) -> None:
        """Writes what is queued, for seconds at most."""
        self.disk.close()
