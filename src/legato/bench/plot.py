"""A run as a picture: when each token came, and how long its reader had waited for it. SVG, or one HTML file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 920, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 18, 82, 40
# A linear axis as long as the longest gap leaves room to tell the usual ones apart.
_LOG_RATIO = 8.0
# Dots on one half pixel are one dot to the eye; a minute of 64 streams is 200,000 tokens.
_GRID = 2.0
_TOLD_DOTS = 150
# Greys and hues of middling lightness, readable on white and on black.
_STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#7b8494}"
    ".title{font-size:15px;font-weight:600}.grid{stroke:#8a93a3;stroke-opacity:.22;fill:none}"
    ".long{fill:#e0a53a;fill-opacity:.2}.edge{stroke:#e0a53a;stroke-opacity:.75;stroke-width:1.5}"
    ".budget{stroke:#d9534f;stroke-dasharray:6 4;stroke-width:1.25}"
    ".dots{fill:none;stroke:#1a9c8f;stroke-width:3;stroke-linecap:round;stroke-opacity:.75}"
    ".late{fill:#d9534f;fill-opacity:.7}"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn. Columns of tokens: `at_s` from the start of the measurement, `gap_ms` before each.

    `spans`: of each long prompt, when it was sent, when its first token came, and its tokens.
    """

    title: str
    subtitle: str
    duration_s: float
    budget_ms: float
    at_s: Sequence[float]
    gap_ms: Sequence[float]
    spans: Sequence[tuple[float, float, int]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, to a millisecond and a tenth of one; `Picture(**…)` of it draws the same."""
        found = dataclasses.asdict(self)
        found["at_s"] = [round(at_s, 3) for at_s in self.at_s]
        found["gap_ms"] = [round(ms, 1) for ms in self.gap_ms]
        return found


class _Axis:
    """Milliseconds to pixels, linear from nought or logarithmic."""

    def __init__(self, gaps_ms: Sequence[float], budget_ms: float) -> None:
        ordered = sorted(gaps_ms) or [budget_ms]
        median, top = ordered[len(ordered) // 2], max(ordered[-1], 1.25 * budget_ms)
        self.is_log = top > _LOG_RATIO * max(median, 1.0)
        low = max(min(ordered[len(ordered) // 100], median / 2, budget_ms / 2), 0.5)
        self._low = 0.0 if not self.is_log else math.log10(low)
        self._high = math.log10(1.3 * top) if self.is_log else 1.08 * top

    def y(self, ms: float) -> float:
        """From the top of the picture; what is below the axis lies on it."""
        value = max(math.log10(max(ms, 1e-3)), self._low) if self.is_log else ms
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - (value - self._low) / (self._high - self._low))

    def ticks(self) -> list[float]:
        """Round values: about five, or 1, 2 and 5 of each decade."""
        if not self.is_log:
            step = _round_step(self._high / 5)
            return [step * k for k in range(int(self._high / step) + 1)]
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        steps = (1, 2, 5) if self._high - self._low < 3 else (1,)
        ticks = [m * 10.0**decade for decade in decades for m in steps]
        return [tick for tick in ticks if self._low <= math.log10(tick) <= self._high]


def draw_svg(picture: Picture) -> str:
    """A drawing of its own, on no background. Late tokens and long prompts say their figures when pointed at."""
    axis = _Axis(picture.gap_ms, picture.budget_ms)
    parts = [
        f'<text x="{_LEFT}" y="22" class="title">{escape(picture.title)}</text>',
        f'<text x="{_LEFT}" y="41">{escape(picture.subtitle)}</text>',
        _legend(picture),
        *_spans(picture),
        *_grid(picture, axis),
        *_dots(picture, axis),
        f'<path d="M{_LEFT} {axis.y(picture.budget_ms):.1f}H{WIDTH - _RIGHT}" class="budget"/>',
    ]
    label = escape(f"{picture.title}. {picture.subtitle}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def draw_html(picture: Picture, rows: Iterable[tuple[str, str]], note: str) -> str:
    """One file: the drawing, a table of `rows` (name, figure), and a note. Needs nothing from the network."""
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    style = (
        ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;"
        "max-width:60rem;margin:2rem auto;padding:0 1rem}table{border-collapse:collapse;margin:1.5rem 0}"
        "th,td{text-align:left;padding:.3rem 1.5rem .3rem 0;border-bottom:1px solid #8884;vertical-align:top}"
        "th{font-weight:400;opacity:.7;white-space:nowrap}td{font-variant-numeric:tabular-nums}p{opacity:.7}"
        "svg{width:100%;height:auto}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(picture.title)}</title><style>{style}</style></head><body>\n"
        f"{draw_svg(picture)}<table>{table}</table>\n<p>{escape(note)}</p></body></html>\n"
    )


def _x(picture: Picture, at_s: float) -> float:
    share = min(max(at_s / picture.duration_s, 0.0), 1.0)
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _legend(picture: Picture) -> str:
    y = _TOP - 21
    entries = (
        ('<path d="M7 6h0" class="dots"/>', "a token", 80),
        ('<g class="late"><circle cx="7" cy="6" r="2.5"/></g>', "a late one", 94),
        ('<path d="M0 6h16" class="budget"/>', f"budget {_duration(picture.budget_ms)}", 130),
        ('<rect width="14" height="12" class="long"/>', "a long prompt waits for its first token", 0),
    )
    parts, x = [], _LEFT
    for mark, label, width in entries:
        parts.append(f'<g transform="translate({x} {y})">{mark}<text x="22" y="10">{label}</text></g>')
        x += width
    return "".join(parts)


def _spans(picture: Picture) -> list[str]:
    parts = []
    for sent_s, first_s, tokens in picture.spans:
        begin, end = _x(picture, sent_s), _x(picture, first_s)
        told = f"{tokens:,} tokens, sent at {sent_s:.1f} s, first token {first_s - sent_s:.2f} s later"
        parts.append(
            f'<rect x="{begin:.1f}" y="{_TOP}" width="{max(end - begin, 1):.1f}" height="{HEIGHT - _TOP - _BOTTOM}"'
            f' class="long"><title>{told}</title></rect>'
            f'<path d="M{begin:.1f} {_TOP}V{HEIGHT - _BOTTOM}" class="edge"/>'
        )
    return parts


def _grid(picture: Picture, axis: _Axis) -> list[str]:
    parts = []
    for tick in axis.ticks():
        y = axis.y(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_duration(tick)}</text>')
    step = _round_step(picture.duration_s / 8)
    for k in range(int(picture.duration_s / step + 1e-9) + 1):
        x = _x(picture, k * step)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 19}" text-anchor="middle">{k * step:g} s</text>')
    return parts


def _dots(picture: Picture, axis: _Axis) -> list[str]:
    """On-time tokens as one path; late ones as circles, of which the latest say what they are."""
    usual: dict[tuple[int, int], None] = {}
    late: dict[tuple[int, int], tuple[float, float]] = {}
    for at_s, gap_ms in zip(picture.at_s, picture.gap_ms, strict=True):
        place = (round(_GRID * _x(picture, at_s)), round(_GRID * axis.y(gap_ms)))
        if gap_ms > picture.budget_ms:
            late[place] = (at_s, gap_ms)
        else:
            usual[place] = None
    told = set(sorted(late, key=lambda place: late[place][1], reverse=True)[:_TOLD_DOTS])
    circles = []
    for place, (at_s, gap_ms) in late.items():
        title = f"<title>{_duration(gap_ms)}, at {at_s:.2f} s</title>" if place in told else ""
        circles.append(f'<circle cx="{place[0] / _GRID:g}" cy="{place[1] / _GRID:g}" r="2.2">{title}</circle>')
    dots = "".join(f"M{x / _GRID:g} {y / _GRID:g}h0" for x, y in usual)
    return [f'<path d="{dots}" class="dots"/>' if dots else "", f'<g class="late">{"".join(circles)}</g>']


def _duration(ms: float) -> str:
    return f"{ms / 1e3:g} s" if ms >= 1000 and ms % 100 == 0 else f"{ms:,.0f} ms" if ms >= 1 else f"{ms:g} ms"


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    decade: float = 10.0 ** math.floor(math.log10(rough))
    return next(decade * m for m in (1, 2, 5, 10) if decade * m >= rough * 0.999)
