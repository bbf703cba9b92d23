"""A simulation as a picture: how long requests waited, and how full the engines were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from legato.plots.canvas import BLUE, ORANGE, RED, TEAL, VIOLET, canvas, logarithmic


def draw_simulation(document: dict[str, Any], path: Path) -> None:
    """Draws what `legato simulate --json` printed."""
    named, curves = document["simulate"], document["curves"]
    title = f"{named['model']} on {named['device']}"
    shares = [n / 100 for n in range(101)]
    objectives = (document["goodput"] or {"objectives": {}})["objectives"]
    with canvas(path, 2, 2, title=title) as (first, between, crowd, memory):
        for axes, name, words, colour in (
            (first, "ttft_ms", "until the first token", BLUE),
            (between, "itl_ms", "between two tokens", TEAL),
        ):
            axes.plot([max(value, 1e-3) for value in curves[name]], shares, color=colour)
            axes.set_xscale("log")
            logarithmic(axes.xaxis)
            axes.set_title(f"Share of {'requests' if name == 'ttft_ms' else 'gaps'} within")
            axes.set_xlabel(f"ms {words}")
            axes.set_ylim(0, 1.02)
            if name in objectives:
                axes.axvline(objectives[name], color=RED, linestyle="--", linewidth=1, label="objective")
                axes.legend()
        seconds, running, waiting, kv = zip(*curves["series"], strict=True)
        per, unit = _unit(seconds[-1])
        at = [second / per for second in seconds]
        crowd.plot(at, running, color=BLUE, label="running")
        crowd.plot(at, waiting, color=ORANGE, label="waiting")
        crowd.set_title("Requests of a replica")
        crowd.set_xlabel(unit)
        crowd.legend()
        memory.fill_between(at, [100 * share for share in kv], color=VIOLET, alpha=0.35, linewidth=0)
        memory.plot(at, [100 * share for share in kv], color=VIOLET)
        memory.set_title("KV cache in use, %")
        memory.set_xlabel(unit)
        memory.set_ylim(0)


def _unit(seconds: float) -> tuple[float, str]:
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")
