"""KV blocks on disk: a cache that outlives the process. Nothing it does can fail a request."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import secrets
import struct
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from legato.errors import ConfigError

KEY_BYTES = 32
QUEUE_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 3.0

# Magic, version, payload bytes, key, sha256 of key and payload: every bit of a file is checked when it is read.
_HEADER = struct.Struct("<8sIQ32s32s")
_MAGIC, _VERSION = b"LEGATOKV", 1
_BLOCK_NAME = re.compile(r"[0-9a-f]{64}")
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
# A younger one may be another engine's, which needs milliseconds.
_LEFT_OVER_AFTER_S = 60.0


class Fetch:
    """Blocks on their way from disk to memory."""

    __slots__ = ("_finished", "blocks", "keys")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = tuple(keys)
        self.blocks: list[tuple[bytes, bytes]] = []
        """(key, payload) of the first of `keys`, verified, up to the first that is missing. Grows until `done`."""
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether all is read that will be."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until `done`, or for `timeout_s` seconds. Returns `done`."""
        return self._finished.wait(timeout_s)

    def finish(self) -> None:
        """Called by the archive."""
        self._finished.set()


class DiskArchive:
    """KV blocks in a folder, found again after a restart by the 32 bytes of their keys.

    A key must tell all that the block's bytes depend on: model, layout, kernels, tokens. One folder holds blocks of one
    size, at most `max_bytes` of files; the least recently used go first. Two engines may share it; each then counts
    what it has seen, so that together they may take twice `max_bytes`.

    All methods are quick and may be called from any thread: one thread writes and one reads, without the GIL for
    nearly all of their time. Files are not synced: one that a power cut spoils is found by its checksum, which guards
    against damage and not against malice. What a block says of its prompt is as secret as the prompt: a folder made
    here is its user's alone.
    """

    def __init__(self, folder: Path, block_nbytes: int, max_bytes: int, *, queue_bytes: int = QUEUE_BYTES) -> None:
        """Reads names and sizes of what is there (0.5 s for 100,000 blocks) and removes what is beyond repair.

        ConfigError if the folder cannot be made or written, or not one block fits in `max_bytes`.
        """
        self._folder = folder
        self._block_nbytes = block_nbytes
        self._file_nbytes = _HEADER.size + block_nbytes
        self._max_bytes = max_bytes
        self._queue_blocks = max(1, queue_bytes // block_nbytes)
        self._token = secrets.token_hex(8)
        if max_bytes < self._file_nbytes:
            raise ConfigError(
                f"a KV archive of {max_bytes:,} bytes has no room for one block of {self._file_nbytes:,}: give it more"
            )
        self.written = 0
        """Blocks written to disk."""
        self.read = 0
        """Blocks read and verified, or taken from the queue of the writer."""
        self.damaged = 0
        """Files removed because they were not what was written."""
        self.dropped = 0
        """Blocks not kept: the queue was full, the disk was, or the end came first."""
        self.evicted = 0
        """Files removed to make room."""
        self.last_error = ""
        """Why nothing is written any more, if so."""
        # Guards the counters and all below.
        self._changed = threading.Condition()
        self._index: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._pending: dict[bytes, bytes] = {}  # in order of arrival; a block stays until it is on disk
        self._closing = False
        try:
            _make_folder(folder)
            with tempfile.TemporaryFile(dir=folder):
                pass
            self._index.update(self._scan())
        except OSError as error:
            raise ConfigError(
                f"the KV archive {folder} cannot be written ({error.strerror}): choose another folder"
            ) from error
        self._make_room(0)
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_blocks, name="kv-archive-writer", daemon=True)
        self._reader = threading.Thread(target=self._read_blocks, name="kv-archive-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def __contains__(self, key: object) -> bool:
        """Whether a fetch would probably find the block: it is known to be on disk, or about to be."""
        with self._changed:
            return key in self._index or key in self._pending

    def __len__(self) -> int:
        """Blocks known to be on disk."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of their files."""
        return len(self._index) * self._file_nbytes

    def put(self, key: bytes, data: bytes | NDArray[np.uint8]) -> bool:
        """Whether the block is there or will be written soon. An array is copied, so that its memory can be reused.

        False if the queue is full or nothing is written any more: it is a cache. Cost: that copy.
        """
        assert len(key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes, got {len(key)}"
        nbytes = len(data) if isinstance(data, bytes) else data.nbytes
        assert nbytes == self._block_nbytes, f"a block has {self._block_nbytes} bytes, got {nbytes}"
        with self._changed:
            if key in self._index:
                self._index.move_to_end(key)
                return True
            if key in self._pending:
                return True
            if len(self._pending) >= self._queue_blocks or self._closing or self.last_error:
                self.dropped += 1
                return False
            self._pending[key] = data if isinstance(data, bytes) else data.tobytes()
            self._changed.notify_all()
            return True

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        """Begins to read these blocks, in order, until the first that is not there. Fetches are served in turn.

        A file that is not to the bit what was written is removed, and a miss. Blocks that another engine has written
        since this one began are found too.
        """
        fetch = Fetch(keys)
        with self._changed:
            if self._closing or not fetch.keys:
                fetch.finish()
            else:
                self._fetches.put(fetch)
        return fetch

    def flush(self) -> None:
        """Waits until everything put is on disk or given up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def close(self) -> None:
        """Writes what is queued, for three seconds at most, and ends the threads. Fetches end where they are."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with self._changed:
            if not self._closing:
                self._closing = True
                self._fetches.put(None)
                self._changed.notify_all()
        self._writer.join(CLOSE_TIMEOUT_S)
        with self._changed:
            self._drop_pending()
        self._reader.join(max(0.0, deadline - time.monotonic()))

    def _path(self, key: bytes) -> Path:
        return self._folder / key[:1].hex() / key.hex()

    def _scan(self) -> dict[bytes, None]:
        """Keys of the files of the right size, oldest first. Removes the others that are ours; leaves foreign files."""
        found = []
        stale_s = time.time() - _LEFT_OVER_AFTER_S
        for first in range(256):
            prefix = f"{first:02x}"
            try:
                entries = os.scandir(self._folder / prefix)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with entries:
                for entry in entries:
                    block = _BLOCK_NAME.fullmatch(entry.name) is not None
                    if not entry.name.startswith(prefix) or not (block or _TEMPORARY_NAME.fullmatch(entry.name)):
                        continue
                    try:
                        stat = entry.stat(follow_symlinks=False)
                        if not entry.is_file(follow_symlinks=False):
                            continue
                    except FileNotFoundError:  # another engine has just removed it
                        continue
                    if block and stat.st_size == self._file_nbytes:
                        found.append((stat.st_mtime_ns, bytes.fromhex(entry.name)))
                    elif block or stat.st_mtime < stale_s:
                        _remove(entry.path)
        return dict.fromkeys(key for _, key in sorted(found))

    def _make_room(self, nbytes: int) -> None:
        """Removes the least recently used files until `nbytes` more fit."""
        while True:
            with self._changed:
                if not self._index or self.nbytes + nbytes <= self._max_bytes:
                    return
                key, _ = self._index.popitem(last=False)
                self.evicted += 1
            _remove(self._path(key))

    def _write_blocks(self) -> None:
        """The writer: one block after the other until the archive closes or the disk refuses one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                key, data = next(iter(self._pending.items()))
            try:
                self._make_room(self._file_nbytes)
                stored = self._store(key, data)
            except OSError as error:
                with self._changed:
                    self.last_error = f"the KV archive {self._folder} is no longer written: {error.strerror or error}"
                    self._drop_pending()
                return
            with self._changed:
                if stored:
                    self.written += 1
                    self._index[key] = None
                else:
                    self.dropped += 1
                self._pending.pop(key, None)
                self._changed.notify_all()

    def _store(self, key: bytes, data: bytes) -> bool:
        """Whether the file is there, whole: under another name until then. False if somebody took it away."""
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{self._token}.tmp")
        header = _HEADER.pack(_MAGIC, _VERSION, len(data), key, _digest(key, data))
        if not path.parent.is_dir():
            _make_folder(self._folder)
            path.parent.mkdir(exist_ok=True)
        try:
            _write_file(temporary, header, data)
            _touch(temporary)
            os.replace(temporary, path)
        except FileNotFoundError:
            return False
        except OSError:
            _remove(temporary)
            raise
        return True

    def _drop_pending(self) -> None:
        """With the lock held."""
        self.dropped += len(self._pending)
        self._pending.clear()
        self._changed.notify_all()

    def _read_blocks(self) -> None:
        """The reader: one fetch after the other until the archive closes."""
        while (fetch := self._fetches.get()) is not None:
            try:
                for key in fetch.keys:
                    data = None if self._closing else self._load(key)
                    if data is None:
                        break
                    fetch.blocks.append((key, data))
                self._mark_used([key for key, _ in fetch.blocks])
            finally:
                fetch.finish()

    def _load(self, key: bytes) -> bytes | None:
        """The block, from the writer's queue or verified from its file; None if it is in neither."""
        with self._changed:
            data = self._pending.get(key)
        sound = True
        if data is None:
            try:
                data = _read_file(self._path(key), key, self._block_nbytes)
                sound = data is not None
            except (OSError, MemoryError):  # gone, or not to be read now: not proof of damage
                pass
            if not sound:
                _remove(self._path(key))
        with self._changed:
            if data is None:
                self._index.pop(key, None)
                self.damaged += not sound
            else:
                self.read += 1
        return data

    def _mark_used(self, keys: Sequence[bytes]) -> None:
        """The last of a prefix first: without its first blocks the others are of no use, so these are to go last."""
        for key in reversed(keys):
            try:
                _touch(self._path(key))
            except OSError:  # gone by now, or still in the writer's queue
                continue
            with self._changed:
                self._index[key] = None
                self._index.move_to_end(key)


def archive_files(folder: Path) -> list[Path]:
    """The files of an archive in `folder`, blocks and left-over temporary ones; foreign files are none."""
    ours = (_BLOCK_NAME, _TEMPORARY_NAME)
    return [path for path in folder.glob("??/*") if any(name.fullmatch(path.name) for name in ours) and path.is_file()]


def remove_archive(folder: Path) -> None:
    """Removes the archive in `folder`, and folders that are empty then. What cannot be removed stays."""
    parents = set()
    for path in archive_files(folder):
        _remove(path)
        parents.add(path.parent)
    for parent in (*parents, folder):
        with contextlib.suppress(OSError):
            parent.rmdir()


def _digest(key: bytes, data: bytes) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(data)
    return digest.digest()


def _write_file(path: Path, header: bytes, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(header)
        file.write(data)


def _read_file(path: Path, key: bytes, nbytes: int) -> bytes | None:
    """The payload, or None if any bit of the file is not as written. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != _HEADER.size + nbytes:
            return None
        header = file.read(_HEADER.size)
        data = file.read(nbytes)
    if header != _HEADER.pack(_MAGIC, _VERSION, nbytes, key, _digest(key, data)):
        return None
    return data


def _touch(path: Path) -> None:
    """The time of last use, exact: what the system notes by itself may be a tick of 4 ms old."""
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _remove(path: Path | str) -> None:
    """A file that cannot be removed, or is gone already, is no concern of a cache."""
    with contextlib.suppress(OSError):
        os.unlink(path)
