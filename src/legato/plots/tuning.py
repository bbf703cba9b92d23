"""A sweep of budgets as a picture: the knee, throughput, the least chunk that is worth it, and the steps of tiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.plots.canvas import BLUE, FAINT, ORANGE, RED, TEAL, canvas, logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_tuning(document: dict[str, Any], path: Path) -> None:
    """Draws what `legato tune --json` printed."""
    with canvas(path, 2, 2, title=f"{document['model']} on {document['device']}") as (knee, rate, share, steps):
        _draw_knee(knee, document)
        _draw_rate(rate, document["points"])
        _draw_share(share, document["efficiency"])
        _draw_steps(steps, document["efficiency"])


def _draw_knee(axes: Axes, document: dict[str, Any]) -> None:
    in_tokens = [p for p in document["points"] if p["budget_ms"] is None]
    timed = [p for p in document["points"] if p["budget_ms"] is not None]
    front = sorted(in_tokens, key=lambda p: p["tokens"])
    axes.plot(*_places(front), "o-", color=BLUE, label="tokens a step")
    for n, point in enumerate(front):
        axes.annotate(f"{point['tokens']:,}", (point["itl_p99_ms"], point["ttft_ms"]), textcoords="offset points",
                      xytext=(4, 7 if n % 2 else -13), fontsize=8)  # fmt: skip
    if timed:
        axes.plot(
            [p["itl_p99_ms"] for p in timed], [p["ttft_ms"] for p in timed], "D", color=TEAL, label="milliseconds"
        )
        for point in timed:
            axes.annotate(f"{point['budget_ms']:g} ms", (point["itl_p99_ms"], point["ttft_ms"]),
                          textcoords="offset points", xytext=(6, -11), fontsize=8, color=TEAL)  # fmt: skip
    chosen = document["advice"]["knee"]
    axes.plot(
        [chosen["itl_p99_ms"]], [chosen["ttft_ms"]], "o", markersize=13, fillstyle="none", color=RED, label="knee"
    )
    axes.set_title("First token of a long prompt, ms")
    axes.set_xlabel("ms between tokens of the streams beside it, p99")
    axes.set_xscale("log")
    logarithmic(axes.xaxis)
    axes.margins(x=0.15)
    axes.set_ylim(0, 1.15 * max(p["ttft_ms"] for p in document["points"]))
    axes.legend()


def _places(points: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [p["itl_p99_ms"] for p in points], [p["ttft_ms"] for p in points]


def _draw_rate(axes: Axes, points: list[dict[str, Any]]) -> None:
    in_tokens = sorted((p for p in points if p["budget_ms"] is None), key=lambda p: p["tokens"])
    sizes = [p["tokens"] for p in in_tokens]
    axes.plot(sizes, [p["output_tokens_per_s"] for p in in_tokens], "o-", color=BLUE, label="tokens a second, streams")
    timed = [p for p in points if p["budget_ms"] is not None]
    for point in timed:
        axes.axhline(point["output_tokens_per_s"], color=TEAL, linestyle="--", label=f"{point['budget_ms']:g} ms")
    axes.set_title("Throughput")
    axes.set_xlabel("tokens a step, at most")
    axes.set_ylim(0, 1.15 * max(p["output_tokens_per_s"] for p in points))
    axes.legend(loc="lower right")


def _draw_share(axes: Axes, efficiency: dict[str, Any]) -> None:
    rates = {int(rows): value for rows, value in efficiency["tokens_per_s"].items()}
    ladder, best = efficiency["ladder"], efficiency["best_tokens_per_s"]
    axes.plot(ladder, [100 * rates[rows] / best for rows in ladder], "o-", color=BLUE, markersize=3)
    axes.set_xscale("log", base=2)
    logarithmic(axes.xaxis, base=2)
    for share, rows in efficiency["least_rows"].items():
        percent = 100 * float(share)
        axes.axhline(percent, color=FAINT, linewidth=0.8, linestyle=":")
        if rows is not None:
            axes.plot([rows], [100 * rates[rows] / best], "o", color=ORANGE)
            axes.annotate(f"{percent:.0f} % from {rows:,} on", (rows, percent), textcoords="offset points",
                          xytext=(14, -13))  # fmt: skip
    axes.set_title("Speed of a prompt in chunks, % of the best")
    axes.set_xlabel("tokens a chunk")
    axes.set_ylim(0, 104)


def _draw_steps(axes: Axes, efficiency: dict[str, Any]) -> None:
    """Time around multiples of blocks, a row more or less, over the mean of its group."""
    rates = {int(rows): value for rows, value in efficiency["tokens_per_s"].items()}
    for middle, colour in zip(efficiency["around"], (BLUE, ORANGE, TEAL, RED), strict=False):
        near = [n for n in sorted(rates) if abs(n - middle) <= efficiency["near"]]
        seconds = [n / rates[n] for n in near]
        mean = sum(seconds) / len(seconds)
        axes.plot([n - middle for n in near], [100 * (s / mean - 1) for s in seconds], "o-", color=colour,
                  label=f"around {middle:,}")  # fmt: skip
    axes.set_title("Steps of tiles: % above the mean of each group")
    axes.set_xlabel("rows more")
    axes.locator_params(axis="x", integer=True)
    axes.legend()
