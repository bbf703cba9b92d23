"""What small chunks cost a prompt, by device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from legato.plots.canvas import BLUE, FAINT, ORANGE, TEAL, VIOLET, canvas, logarithmic


def draw_slowdown(data: dict[str, Any], path: Path) -> None:
    """Time of a prompt in chunks, over that in one pass: a line a device. `data`: of `docs/figures.py collect`."""
    title = f"{data['model']}: a prompt of {data['prompt']:,} tokens in chunks, idealised"
    with canvas(path, 1, title=title, height=3.4) as (axes,):
        for (name, slowdown), colour in zip(data["slowdown"].items(), (BLUE, TEAL, ORANGE, VIOLET), strict=False):
            axes.plot(data["chunks"], slowdown, "o-", color=colour, label=name, markersize=4)
        axes.axhline(1.0, color=FAINT, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        logarithmic(axes.xaxis, base=2)
        logarithmic(axes.yaxis)
        axes.set_title("Times as long as in one pass")
        axes.set_xlabel("tokens a chunk")
        axes.legend()
