"""The picture in a terminal: it fits, and shows what there is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from demo.rig import SETUP, recorded
from legato.demo.run import Run
from legato.demo.scale import scale_of
from legato.demo.terminal import Canvas, Screen, can_draw, draw_text


def console_of(width: int = 100, height: int = 40, **options: object) -> Console:
    asked = {"force_terminal": True, "color_system": "standard", "legacy_windows": False, **options}
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    return Console(file=file, width=width, height=height, _environ={"TERM": "xterm"}, **asked)  # type: ignore[arg-type]


def lines_of(width: int, height: int, waited_s: float = 0.0, runs: list[Run] | None = None) -> list[str]:
    runs = recorded() if runs is None else runs
    canvas = Canvas(width, height, 1.2, scale_of(runs, SETUP.itl_ms))
    return draw_text("title", SETUP, runs, canvas, waited_s).plain.split("\n")


@pytest.mark.parametrize(("width", "height"), [(64, 21), (80, 24), (100, 40), (250, 70)])
def test_the_picture_fits_the_terminal(width: int, height: int) -> None:
    lines = lines_of(width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert sum("worst gap" in line for line in lines) == 3


def test_a_stall_is_as_wide_as_it_lasts_and_the_highest_there_is() -> None:
    lines = lines_of(130, 40)
    canvas = Canvas(130, 40, 1.2, scale_of(recorded(), SETUP.itl_ms))
    top = next(line for line in lines[3:] if "▅" in line or "▆" in line or "▇" in line or "█" in line)
    blocks = sum(letter in "▁▂▃▄▅▆▇█" for letter in top)
    assert blocks == pytest.approx(canvas.columns * 0.607 / 1.2, abs=2)


def test_who_waits_is_shown_waiting() -> None:
    runs = recorded(steps_left=17)
    assert len(runs) == 1
    assert not any("waiting" in line for line in lines_of(100, 40, 0.0, runs))
    assert any("waiting for 0.6 s" in line for line in lines_of(100, 40, 0.6, runs))


def test_nothing_is_drawn_where_it_cannot_be_seen() -> None:
    assert can_draw(console_of())
    assert not can_draw(console_of(width=60))
    assert not can_draw(console_of(height=20))
    assert not can_draw(console_of(force_terminal=False))
    assert not can_draw(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}))


def test_the_screen_draws_at_times_and_leaves_the_whole_picture() -> None:
    console, runs = console_of(), []
    now_s = 0.0

    def clock() -> float:
        return now_s

    whole = recorded()
    with Screen(console, "title", SETUP, runs, scale_of([], SETUP.itl_ms), 0.1, clock) as screen:
        for run in whole:
            runs.append(run)
            for _ in range(10):
                now_s += 0.05
                screen.watch(run)
    console.file.flush()
    written = console.file.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert written.count("title") == pytest.approx(11, abs=3)
    assert "worst gap 607 ms" in written
