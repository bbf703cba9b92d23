"""`TraceWriter`: a trace on disk that never grows beyond its limit and always holds the newest steps."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec

from legato.errors import ConfigError
from legato.explain.record import Asked, Ended, Event, Fitted, Header, Line, Stepped, encode_line

LEAST_BYTES = 1 << 20
_HEAD = b'{"type":"header",'


class TraceWriter:
    """Writes lines to `path`. When that has half of `limit_bytes`, it becomes `path`.1, in place of the one before.

    Each file begins with the header and with the requests that are open then, so it can be read by itself. A line is
    with the operating system when `write` returns: a crash of the server loses none.
    """

    def __init__(self, path: Path, header: Header, limit_bytes: int) -> None:
        """ConfigError for a limit below 1 MiB, and where the file cannot be written or is no trace."""
        require_room(path, limit_bytes)
        self._path = path
        self._half = limit_bytes // 2
        self._header = header
        self._open: dict[int, Asked] = {}
        self._generated: Counter[int] = Counter()
        self._fd, self._size = -1, 0
        try:
            older_path(path).unlink(missing_ok=True)
            self._begin()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, line: Event) -> None:
        """Appends a line. OSError if the disk is full, say."""
        if isinstance(line, Asked):
            self._open[line.id] = line
        self._append(line)
        # A file that begins with this line begins with what was true before it.
        if isinstance(line, Stepped):
            sampled = (i for i, sample in zip(line.ids, line.samples, strict=True) if sample and i in self._open)
            self._generated.update(sampled)
        elif isinstance(line, Ended):
            self._open.pop(line.id, None)
            self._generated.pop(line.id, None)
        elif isinstance(line, Fitted):
            self._header = msgspec.structs.replace(self._header, cost=line.cost)

    def generated(self, request_id: int) -> int:
        """Tokens that came for a request that is open."""
        return self._generated[request_id]

    def close(self) -> None:
        """Nothing is written after this."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: Line) -> None:
        data = encode_line(line)
        if self._size + len(data) > self._half:
            os.replace(self._path, older_path(self._path))
            self.close()
            self._begin()
            if isinstance(line, Asked):
                return  # among those that are open
            if self._size + len(data) > self._half:
                return  # longer than a file may be
        self._put(data)

    def _begin(self) -> None:
        """A new file: the header, and as much of the open requests as a quarter of the limit holds."""
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._put(encode_line(self._header))
        still = [msgspec.structs.replace(line, generated=self._generated[i]) for i, line in self._open.items()]
        lines = [encode_line(line) for line in still]
        if sum(map(len, lines)) > self._half // 2:
            lines = [encode_line(msgspec.structs.replace(line, blocks=[])) for line in still]
        for data in lines:
            if self._size + len(data) <= self._half // 2:
                self._put(data)

    def _put(self, data: bytes) -> None:
        self._size += len(data)
        while data:
            data = data[os.write(self._fd, data) :]


def older_path(path: Path) -> Path:
    """Where the lines before those in `path` are."""
    return path.with_name(path.name + ".1")


def require_room(path: Path, limit_bytes: int) -> None:
    """ConfigError for a limit below 1 MiB, and where a trace cannot be written or would replace what is none."""
    if limit_bytes < LEAST_BYTES:
        raise ConfigError(f"trace_size is {limit_bytes} bytes; 1MiB is the least that holds something to explain")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    for old in (path, older_path(path)):
        if not old.exists():
            continue
        try:
            with old.open("rb") as file:
                begins = file.read(len(_HEAD))
        except OSError as error:
            raise ConfigError(f"{old} cannot be written: {error.strerror}") from error
        if begins and begins != _HEAD:
            raise ConfigError(f"{old} exists and is no trace; it would be lost: choose another name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: Permission denied")
