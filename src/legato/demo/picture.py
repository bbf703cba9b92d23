"""The three runs as one drawing: how long the token that comes next lets its reader wait. SVG on no background."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from legato.demo.document import Demo
from legato.demo.figures import duration, figures_of, gaps_of, name_of
from legato.demo.run import Run
from legato.demo.scale import Scale, scale_of, seconds_between_ticks, tick_name

WIDTH = 880
_LEFT, _RIGHT, _TOP = 64, 16, 84
_PANEL, _BETWEEN, _BOTTOM = 108, 46, 30
_TOUCH_S = 2e-4  # stamps are rounded
_Wait = tuple[float, float, float]  # begin and end in seconds, milliseconds between
# Middling lightness, readable on white and on black.
_STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#7b8494}"
    ".title{font-size:15px;font-weight:600}.name{font-size:13px;font-weight:600}"
    ".grid{stroke:#8a93a3;stroke-opacity:.25;fill:none}"
    ".prompt{fill:#e0a53a;fill-opacity:.22}.kept{fill:#1a9c8f}.late{fill:#d9534f}"
    ".asked{stroke:#7b8494;stroke-dasharray:5 4;stroke-width:1.25;fill:none}"
)


def draw_svg(demo: Demo) -> str:
    """A drawing of its own, of what the runs have; those that did not begin are left out."""
    runs = [run for run in demo.runs if run.answers]
    scale, span_s = scale_of(runs, demo.setup.itl_ms), max((run.now_s for run in runs), default=1.0) or 1.0
    height = _TOP + len(runs) * (_PANEL + _BETWEEN) - _BETWEEN + _BOTTOM
    title = f"{demo.model}: {readers(demo)} while a prompt of {demo.setup.prompt_tokens:,} tokens is read"
    parts = [
        f'<text x="{_LEFT}" y="18" class="title">{escape(title)}</text>',
        _legend(demo),
        *(part for place, run in enumerate(runs) for part in _panel(demo, run, scale, span_s, place)),
        *_seconds(span_s, height),
    ]
    label = escape(f"{title}. {_spoken(demo, runs)}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def readers(demo: Demo) -> str:
    """How many streams, in words."""
    return "a stream" if demo.setup.streams == 1 else f"{demo.setup.streams} streams"


def _spoken(demo: Demo, runs: Iterable[Run]) -> str:
    return "; ".join(f"{name_of(run, demo.setup)[0]}: {_outcome(run)}" for run in runs)


def _outcome(run: Run) -> str:
    found = figures_of(run)
    worst = f"longest wait {duration(found.worst_ms[0])}" if found.worst_ms else "no token came twice"
    return f"{worst} · prompt {'not answered' if found.ttft_s is None else f'answered after {found.ttft_s:.1f} s'}"


def _legend(demo: Demo) -> str:
    asked = duration(demo.setup.itl_ms)
    entries = (
        ('<rect width="14" height="12" class="kept"/>', f"wait for the next token, up to {asked}", 256),
        ('<rect width="14" height="12" class="late"/>', "longer", 74),
        ('<path d="M0 6h16" class="asked"/>', f"{asked}, the gap asked for", 190),
        ('<rect width="14" height="12" class="prompt"/>', "the prompt waits for its first token", 0),
    )
    parts, x = [], _LEFT
    for mark, label, width in entries:
        parts.append(f'<g transform="translate({x} 30)">{mark}<text x="21" y="10">{label}</text></g>')
        x += width
    return "".join(parts)


def _panel(demo: Demo, run: Run, scale: Scale, span_s: float, place: int) -> list[str]:
    top = _TOP + place * (_PANEL + _BETWEEN)
    bottom, (name, means) = top + _PANEL, name_of(run, demo.setup)

    def y(ms: float) -> float:
        return bottom - _PANEL * scale.share(ms)

    parts = [
        f'<text x="{_LEFT}" y="{top - 7}"><tspan class="name">{escape(name)}</tspan> · {escape(means)}</text>',
        f'<text x="{WIDTH - _RIGHT}" y="{top - 7}" text-anchor="end">{_outcome(run)}</text>',
    ]
    if run.sent_s is not None:
        begin, end = _x(run.sent_s, span_s), _x(run.now_s if run.first_s is None else run.first_s, span_s)
        parts.append(f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{_PANEL}" class="prompt"/>')
    for tick in scale.ticks():
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{WIDTH - _RIGHT}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick_name(tick)}</text>')
    waits = [(begin, end, 1e3 * (end - begin)) for begin, end in gaps_of(run)]
    itl_ms = demo.setup.itl_ms
    for name, wanted in (("kept", False), ("late", True)):
        outline = _outline([wait for wait in waits if (wait[2] > itl_ms) is wanted], span_s, bottom, y)
        if outline:
            parts.append(f'<path d="{outline}" class="{name}"/>')
    parts.append(f'<path d="M{_LEFT} {y(itl_ms):.1f}H{WIDTH - _RIGHT}" class="asked"/>')
    parts.append(f'<path d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}" class="grid"/>')
    return parts


def _outline(waits: Iterable[_Wait], span_s: float, bottom: float, y: Callable[[float], float]) -> str:
    """A path around the waits, each as long as it lasted and as high; those that touch have no line between them."""
    path: list[str] = []
    pen_s = -1.0
    for begin_s, end_s, ms in waits:
        if begin_s > pen_s + _TOUCH_S:
            path.append(f"{f'V{bottom:.0f}Z' if path else ''}M{_x(begin_s, span_s):.1f} {bottom:.0f}")
        path.append(f"V{y(ms):.1f}H{_x(end_s, span_s):.1f}")
        pen_s = end_s
    return f"{''.join(path)}V{bottom:.0f}Z" if path else ""


def _seconds(span_s: float, height: int) -> list[str]:
    step_s = seconds_between_ticks(span_s, 10)
    moments_s = [k * step_s for k in range(int(span_s / step_s + 1e-9) + 1)]
    place = f'y="{height - _BOTTOM + 18}" text-anchor="middle"'
    return [f'<text x="{_x(at_s, span_s):.1f}" {place}>{at_s:g} s</text>' for at_s in moments_s]


def _x(at_s: float, span_s: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(max(at_s / span_s, 0.0), 1.0)
