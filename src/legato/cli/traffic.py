"""Where arrivals come from: a trace of any layout that is known."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.workload.arrivals import Arrival

_OURS = '"type":"header"'


def arrivals_from(path: Path, speed: float = 1.0) -> Iterable[Arrival]:
    """The requests of a published trace, or of one that `legato serve --trace` wrote. ConfigError, TraceError."""
    if _is_ours(path):
        from legato.explain.arrivals import arrivals_of
        from legato.explain.read import read_trace as read_steps

        return arrivals_of(read_steps(path), speed)
    from legato.workload.trace import read_trace

    return read_trace(path, speed)


def _is_ours(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return _OURS in file.readline(400)
    except OSError:
        return False  # whoever reads it says why
