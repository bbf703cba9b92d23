"""The three runs in a terminal: drawn while they go, and whole afterwards."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from legato.demo.figures import duration, figures_of, gaps_of, name_of
from legato.demo.run import METHODS, Clock, Run, Setup
from legato.demo.scale import Scale, seconds_between_ticks, tick_name

LEAST_WIDTH, LEAST_HEIGHT = 64, 21
_LABELS = 8  # columns left of a panel
_MOST_ROWS = 10
_BLOCKS = " ▁▂▃▄▅▆▇█"
_KEPT, _LATE, _ASKED, _PROMPT, _DIM = "cyan", "red", "yellow", "yellow", "dim"
# Drawn so often between steps; and by a thread, while a step takes longer than the second.
_EVERY_S, _LONG_S = 0.25, 0.3
# What a terminal takes to show a picture, it takes from the same cores: the next step would be longer by it.
_SETTLE_S = 0.03


@dataclass(frozen=True, slots=True)
class Canvas:
    """Columns and lines there are, and what they stand for, the same in all panels."""

    width: int
    height: int
    span_s: float
    scale: Scale

    @property
    def columns(self) -> int:
        """Of a panel."""
        return self.width - _LABELS - 2

    @property
    def rows(self) -> int:
        """Of a panel: a third of what is left beside names, axes and the legend."""
        return min(max((self.height - 10) // 3, 1), _MOST_ROWS)

    def column(self, at_s: float) -> int:
        """Where a moment is; what comes later is at the edge."""
        return min(max(int(self.columns * at_s / self.span_s), 0), self.columns - 1)


def can_draw(console: Console) -> bool:
    """Whether there is a terminal that shows the picture: large enough, able to move back, with block characters."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not console.legacy_windows
        and console.encoding.startswith("utf")
        and console.width >= LEAST_WIDTH
        and console.height >= LEAST_HEIGHT
    )


def draw_text(title: str, setup: Setup, runs: Sequence[Run], canvas: Canvas, waited_s: float = 0.0) -> Text:
    """All panels, those of runs to come empty. `waited_s`: for how long the last run has had no token."""
    lines = [Text(title, style="bold", no_wrap=True), _legend(setup)]
    for place, method in enumerate(METHODS):
        run = runs[place] if place < len(runs) else Run(method)
        lines += _panel(setup, run, canvas, waited_s if place == len(runs) - 1 else 0.0)
    lines.append(_seconds(canvas))
    for line in lines:
        line.truncate(canvas.width)
    return Text("\n").join(lines)


class Screen:
    """`with Screen(…) as screen:` and `screen.watch` after each step. `runs`: what is filled meanwhile."""

    def __init__(
        self, console: Console, title: str, setup: Setup, runs: Sequence[Run], scale: Scale, span_s: float, clock: Clock
    ) -> None:
        """`scale`, `span_s`: what is expected; they grow if more comes."""
        self._console = console
        self._title = title
        self._setup = setup
        self._runs = runs
        self._scale = scale
        self._span_s = span_s
        self._clock = clock
        self._stepped_s = self._drawn_s = clock()
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw_stalls, daemon=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._draw(0.0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._draw(0.0)
        self._live.stop()

    def watch(self, run: Run) -> None:
        """Draws, now and then."""
        now_s = self._clock()
        if now_s - self._drawn_s > _EVERY_S:
            self._draw(0.0)
            self._over.wait(_SETTLE_S)
            now_s = self._clock()
        self._stepped_s = now_s

    def _draw_stalls(self) -> None:
        """Nobody watches while a step computes: where one is long, its reader is to be seen waiting."""
        while not self._over.wait(_EVERY_S):
            waited_s = self._clock() - self._stepped_s
            if waited_s > _LONG_S:
                self._draw(waited_s)

    def _draw(self, waited_s: float) -> None:
        last = self._runs[-1] if self._runs else None
        now_s = 0.0 if last is None else last.now_s + waited_s
        if now_s > self._span_s:
            self._span_s = 1.2 * now_s
        longest_ms = 1e3 * max(waited_s, *(end - begin for run in self._runs for begin, end in gaps_of(run)[-1:]), 0.0)
        if longest_ms > self._scale.high_ms:
            self._scale = Scale(self._scale.low_ms, 1.25 * longest_ms)
        canvas = Canvas(self._console.width, self._console.height, self._span_s, self._scale)
        self._live.update(draw_text(self._title, self._setup, self._runs, canvas, waited_s), refresh=True)
        self._drawn_s = self._clock()


def _legend(setup: Setup) -> Text:
    asked = duration(setup.itl_ms)
    return Text.assemble(
        ("█", _KEPT), " wait for the next token ", ("█", _LATE), f" longer than {asked} ",
        ("╌╌", _ASKED), " asked for ", ("━━", _PROMPT), " prompt waits",
        style=_DIM, no_wrap=True,
    )  # fmt: skip


def _panel(setup: Setup, run: Run, canvas: Canvas, waited_s: float) -> list[Text]:
    heights = _heights(run, canvas, waited_s)
    asked = canvas.scale.share(setup.itl_ms)
    asked_row = min(int(asked * canvas.rows), canvas.rows - 1)
    labels = {min(int(canvas.scale.share(ms) * canvas.rows), canvas.rows - 1): ms for ms in canvas.scale.ticks()}
    lines = [_heading(setup, run, canvas, waited_s)]
    for row in reversed(range(canvas.rows)):
        line = Text(f"{tick_name(labels[row]) if row in labels else '':>{_LABELS}} ", style=_DIM, no_wrap=True)
        cells = [_cell(share, share > asked, row, canvas.rows, row == asked_row) for share in heights]
        for style, alike in itertools.groupby(cells, key=lambda cell: cell[1]):
            line.append("".join(block for block, _ in alike), style)
        lines.append(line)
    return [*lines, _axis(run, canvas, waited_s)]


def _cell(share: float, is_late: bool, row: int, rows: int, is_asked: bool) -> tuple[str, str | None]:
    """A block as high as the wait is within this row, and its style; what there is of a wait is to be seen."""
    eighths = min(max(round(8 * (share * rows - row)), 1 if row == 0 and share > 0 else 0), 8)
    if eighths:
        return _BLOCKS[eighths], _LATE if is_late else _KEPT
    return ("╌", _ASKED) if is_asked else (" ", None)


def _heights(run: Run, canvas: Canvas, waited_s: float) -> list[float]:
    """For each column the longest wait that goes on in it, as a share of the height; 0 where nobody waits."""
    longest_ms = [0.0] * canvas.columns
    waits = gaps_of(run)
    if waited_s and run.answers:
        waits = [*waits, (run.now_s, run.now_s + waited_s)]
    for begin_s, end_s in waits:
        ms = 1e3 * (end_s - begin_s)
        for column in range(canvas.column(begin_s), canvas.column(end_s - 1e-9) + 1):
            longest_ms[column] = max(longest_ms[column], ms)
    return [canvas.scale.share(ms) if ms else 0.0 for ms in longest_ms]


def _heading(setup: Setup, run: Run, canvas: Canvas, waited_s: float) -> Text:
    name, means = name_of(run, setup)
    left = Text.assemble((name, "bold"), (f"  {means}", _DIM), no_wrap=True)
    found = figures_of(run)
    if waited_s > 1e-3 * setup.itl_ms:
        right = Text(f"waiting for {waited_s:.1f} s …", style=f"bold {_LATE}")
    elif not found.worst_ms:
        right = Text()
    else:
        worst_ms = found.worst_ms[0]
        answered = "" if found.ttft_s is None else f" · first token {found.ttft_s:.1f} s"
        style = _LATE if worst_ms > setup.itl_ms else _KEPT
        right = Text.assemble((f"worst gap {duration(worst_ms)}", f"bold {style}"), answered)
    left.pad_right(max(canvas.width - 1 - left.cell_len - right.cell_len, 1))
    return left.append_text(right)


def _axis(run: Run, canvas: Canvas, waited_s: float) -> Text:
    line = Text(" " * (_LABELS + 1), no_wrap=True)
    if run.sent_s is None:
        return line.append("─" * canvas.columns, _DIM)
    begin = canvas.column(run.sent_s)
    end = canvas.column(run.now_s + waited_s if run.first_s is None else run.first_s) + 1
    line.append("─" * begin, _DIM)
    line.append("━" * (end - begin), _PROMPT)
    return line.append("─" * (canvas.columns - end), _DIM)


def _seconds(canvas: Canvas) -> Text:
    step_s = seconds_between_ticks(canvas.span_s, canvas.columns // 8)
    cells = [" "] * canvas.width
    for k in range(int(canvas.span_s / step_s + 1e-9) + 1):
        name = f"{k * step_s:g} s"
        at = _LABELS + 1 + int(canvas.columns * k * step_s / canvas.span_s)
        if at + len(name) < canvas.width:
            cells[at : at + len(name)] = name
    return Text("".join(cells), style=_DIM, no_wrap=True)
