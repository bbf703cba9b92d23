"""Pictures of measurements: pure functions of the JSON that a command prints. Drawn by matplotlib, an extra."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

SUFFIXES = (".svg", ".png")
# Greys and hues of middling lightness, readable on white and on black.
INK, FAINT = "#7b8494", "#8a93a3"
BLUE, ORANGE, TEAL, RED, VIOLET = "#4c8bf5", "#e0902e", "#1a9c8f", "#d9534f", "#9b6dd6"
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "legato",
    "lines.linewidth": 1.6,
}


def check(path: Path) -> None:
    """Raises ConfigError if a picture could not be drawn there, with what to do."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a picture is {' or '.join(SUFFIXES)}, and '{path.name}' is neither")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("drawing needs matplotlib: pip install 'legato-serve[plots]'")


@contextlib.contextmanager
def canvas(path: Path, columns: int, rows: int = 1, *, title: str, height: float = 2.9) -> Iterator[Sequence[Axes]]:
    """Axes to draw into, row by row; saved when that is done. The ground is clear."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.6 * columns if columns > 1 else 7.4, height * rows + 0.4), layout="constrained")
        axes: list[Any] = [figure.add_subplot(rows, columns, n + 1) for n in range(rows * columns)]
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        yield axes
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, transparent=True, dpi=150, metadata=metadata)


def logarithmic(axis: Axis, base: int = 10) -> None:
    """Ticks as plain numbers: at 1, 2 and 5 of each decade, or at powers of two."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(base=base, subs=(1.0, 2.0, 5.0) if base == 10 else (1.0,)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())
