"""What a KV block depends on besides its tokens: the file, the kernels and every option that changes a bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from legato import _native

CHUNK_BYTES = 8 << 20
_WEIGHTS = (".gguf", ".safetensors", ".json")


def model_fingerprint(path: Path, options: dict[str, str], progress: Callable[[int, int], None] | None = None) -> bytes:
    """32 bytes that differ whenever the same tokens could give other keys and values on this machine.

    The content of the model's files and of the kernels, their instruction set, and `options`. Nothing is taken from
    names or dates. Cost: reads the files once, about a second a gigabyte. `progress(done, total)`: bytes.
    """
    digest = hashlib.sha256(b"legato kv 1")
    files = _files(path)
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        for chunk in _chunks(file):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    for chunk in _chunks(Path(_native.__file__)):
        digest.update(chunk)
    for name, value in sorted({**options, "isa": _native.isa()}.items()):
        digest.update(f"{name}={value}\n".encode())
    return digest.digest()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            yield chunk
