"""Plots for the documents: panels one above the other, one time axis, dots and a limit. Plain SVG, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 920, 180, 76, 18, 58, 58
COLOURS = ("#1a9c8f", "#d9534f", "#5b7fd4")
_STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#7b8494}"
    ".title{font-size:15px;font-weight:600}.head{font-weight:600}.grid{stroke:#8a93a3;stroke-opacity:.22;fill:none}"
    ".limit{stroke:#d9534f;stroke-dasharray:6 4;fill:none}.band{fill:#e0a53a;fill-opacity:.18}"
    "path{stroke-width:3.5;stroke-linecap:round;fill:none}.grid,.limit{stroke-width:1.2}"
)


@dataclass(frozen=True, slots=True)
class Series:
    """Dots of one colour."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing. `unit`: written after the ticks of its axis, which begins at 0. `limit`: a dashed line."""

    title: str
    unit: str
    series: Sequence[Series]
    limit: float | None = None
    bands: Sequence[tuple[float, float]] = field(default_factory=tuple)


def draw(title: str, panels: Sequence[Panel], x_unit: str) -> str:
    """The panels as one SVG."""
    x_most = max(max(series.x, default=0.0) for panel in panels for series in panel.series) or 1.0
    parts = [f'<text x="{LEFT}" y="24" class="title">{escape(title)}</text>']
    for n, panel in enumerate(panels):
        parts.append(_panel(panel, TOP + n * (HEIGHT + GAP), x_most))
    bottom = TOP + len(panels) * (HEIGHT + GAP) - GAP
    for tick in _ticks(x_most):
        x = LEFT + tick / x_most * (WIDTH - LEFT - RIGHT)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{tick:,g} {x_unit}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" role="img"'
        f' aria-label="{escape(title, quote=True)}"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _panel(panel: Panel, top: int, x_most: float) -> str:
    y_most = 1.08 * max([panel.limit or 0.0, *(max(series.y, default=0.0) for series in panel.series)]) or 1.0

    def x(value: float) -> float:
        return LEFT + value / x_most * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + HEIGHT * (1 - value / y_most)

    parts = [f'<text x="{LEFT}" y="{top - 10}" class="head">{escape(panel.title)}</text>']
    for begin, end in panel.bands:
        parts.append(
            f'<rect x="{x(begin):.1f}" y="{top}" width="{x(end) - x(begin):.1f}" height="{HEIGHT}" class="band"/>'
        )
    for tick in _ticks(y_most):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,g} {panel.unit}</text>')
    if panel.limit is not None:
        parts.append(f'<path d="M{LEFT} {y(panel.limit):.1f}H{WIDTH - RIGHT}" class="limit"/>')
    legend_x = WIDTH - RIGHT
    for n, series in reversed(list(enumerate(panel.series))):
        dots = "".join(f"M{x(a):.1f} {y(b):.1f}h0" for a, b in zip(series.x, series.y, strict=True))
        parts.append(f'<path d="{dots}" stroke="{COLOURS[n]}" stroke-opacity=".8"/>')
        if series.name:
            parts.append(f'<text x="{legend_x}" y="{top - 10}" text-anchor="end">{escape(series.name)}</text>')
            legend_x -= 7 * len(series.name) + 16
            parts.append(f'<path d="M{legend_x} {top - 14}h0" stroke="{COLOURS[n]}"/>')
            legend_x -= 16
    return "".join(parts)


def _ticks(most: float) -> list[float]:
    decade: float = 10.0 ** math.floor(math.log10(most / 5))
    step = next(decade * m for m in (1, 2, 5, 10) if decade * m >= most / 5 * 0.999)
    return [step * k for k in range(int(most / step + 1e-9) + 1)]
