"""Where Legato keeps what it fetched and derived: $LEGATO_HOME, else the XDG cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from legato.errors import ModelError


def legato_home(environment: Mapping[str, str] | None = None) -> Path:
    """$LEGATO_HOME, else $XDG_CACHE_HOME/legato, else ~/.cache/legato. Creates nothing."""
    env = os.environ if environment is None else environment
    if home := env.get("LEGATO_HOME"):
        return Path(home).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "legato"


@contextlib.contextmanager
def exclusive(path: Path, when_busy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds a lock file, waiting for other processes; calls `when_busy` once if it has to wait.

    The lock is the kernel's: it goes when the process does, however that ends.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise ModelError(
            f"cannot write to {path.parent}: {error.strerror}; set LEGATO_HOME to a folder you own"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_busy()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
