"""The figures of the runs, in words for a table."""

from __future__ import annotations

from legato.demo.document import Demo
from legato.demo.figures import figures_of, name_of

COLUMNS = ("worst three gaps", "first token", "streams meanwhile")
_NONE = "–"


def rows_of(demo: Demo) -> list[tuple[str, str, tuple[str, str, str]]]:
    """For each run its name, what that means, and a cell for each of `COLUMNS`; a dash for what did not come."""
    rows = []
    for run in demo.runs:
        found = figures_of(run)
        worst = " · ".join(f"{ms:,.0f}" if ms >= 1 else f"{ms:.1g}" for ms in found.worst_ms)
        cells = (
            f"{worst} ms" if worst else _NONE,
            _NONE if found.ttft_s is None else f"{found.ttft_s:,.2f} s",
            _NONE if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f} tokens/s",
        )
        rows.append((*name_of(run, demo.setup), cells))
    return rows
