"""The page stands alone, says why, and shows it: looked at in a real browser."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path

import msgspec
import pytest

from explain.browser import show
from explain.rig import Rig
from legato.explain.attribute import Explanation, explain
from legato.explain.page import draw_page
from legato.explain.read import Trace
from legato.explain.record import Ended, Header, Stepped
from legato.explain.sentence import Teller


@pytest.fixture(scope="module")
def found() -> Explanation:
    rig = Rig(itl_s=0.08)
    for request_id in range(1, 6):
        rig.ask(request_id, 20, 40)
    rig.step(6)
    rig.ask(9, 700, 10)
    rig.step(14)
    rig.machine.slowdown = 6.0
    rig.step()
    rig.machine.slowdown = 1.0
    rig.finish()
    return rig.explain(0.05)


def test_it_asks_nothing_of_the_network_and_has_the_sentences_without_a_script(found: Explanation) -> None:
    page = draw_page(found)
    for word in ("http:", "https:", "//", "src=", "@import", "url(", "<link"):
        assert word not in re.sub(r"  // .*", "", page), word
    assert found.late
    for gap, _ in found.worst(3):
        assert html.escape(Teller(found).sentence(gap)) in page
    assert not re.search(r"\[\[[A-Z]+\]\]", page)


def test_a_name_cannot_break_out_of_the_page(found: Explanation) -> None:
    header = msgspec.structs.replace(found.trace.header, model="</script><b>[[ROWS]]")
    ends = {1: Ended(1, "</script><script>", 40, 1000.0)}
    trace = Trace(header, found.trace.requests, ends, found.trace.steps, "", found.trace._costs)
    page = draw_page(explain(trace, 0.05))
    assert "<b>[[" not in page
    assert page.count("</script>") == 2


def test_its_numbers_are_those_of_the_trace(found: Explanation) -> None:
    page = draw_page(found)
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    data = json.loads(block[1])
    steps = data["steps"]
    assert {len(column) for column in steps.values()} == {len(found.trace.steps)}
    for i, took_ms in enumerate(steps["d"]):
        parts = sum(steps[kind][i] for kind in ("decodes", "sampling", "chunks", "planning", "noise"))
        assert parts == pytest.approx(took_ms, abs=0.03)
    assert [lane["id"] for lane in data["lanes"]] == [1, 2, 3, 4, 5, 9]
    assert sum(rows for _, _, rows in data["lanes"][5]["chunks"]) == 700
    assert sum(gap["late"] for gap in data["gaps"]) == len(found.late)


def test_ten_thousand_steps_are_a_page_of_a_few_megabytes(found: Explanation) -> None:
    header, plain = found.trace.header, found.trace.steps[4]
    assert isinstance(header, Header)
    trace = Trace(header, dict(found.trace.requests), {}, [])
    trace.take(header)
    for n in range(10_000):
        at_s = 100.0 + 0.01 * n
        step: Stepped = msgspec.structs.replace(plain, step=n, started_s=at_s, step_s=0.009, dispatched_s=at_s + 0.01)
        trace.take(step)
    begin_s = time.perf_counter()
    page = draw_page(explain(trace, 0.05))
    assert len(page) < 3_000_000
    assert time.perf_counter() - begin_s < 8.0


# What a reader does, and where that has led: how much time is seen, which gap is told of, what the pointer says.
PLAY = """
const view_ = document.getElementById("view"), key = key => view_.dispatchEvent(new KeyboardEvent("keydown", {key}));
const span = () => view.b - view.a, told = () => document.querySelector("#why b").textContent, seen = [span(), told()];
view_.dispatchEvent(new WheelEvent("wheel", {deltaY: -400, clientX: 600, clientY: 200})); seen.push(span());
key("-"); key("-"); key("-"); seen.push(span());
key("0"); seen.push(span()); key("n"); seen.push(told(), span());
document.querySelector("tr[data-gap='2']").click(); seen.push(told());
for (const named of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "p", "+", "0"]) key(named);
draw(); const at = view_.getBoundingClientRect();
for (let y = 0; y < at.height; y += 6) for (let x_ = 0; x_ < at.width; x_ += 40)
  view_.dispatchEvent(new PointerEvent("pointermove", {clientX: at.left + x_, clientY: at.top + y}));
const clientX = at.left + x(steps.t[8] + 1), clientY = at.top + barsEnd - 3;
view_.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY}));
document.body.dataset.played = JSON.stringify([...seen, document.getElementById("tip").textContent]);
"""


def test_it_can_be_zoomed_walked_and_pointed_at(found: Explanation, tmp_path: Path) -> None:
    shown = show(draw_page(found), "light", tmp_path, script=PLAY)
    assert shown.complaints == []
    played = re.search(r'data-played="([^"]*)"', shown.dom)
    assert played is not None
    whole, first, nearer, farther, again, after, close, clicked, tip = json.loads(html.unescape(played[1]))
    assert nearer < 0.7 * whole < farther
    assert again == pytest.approx(whole)
    told = [Teller(found).sentence(gap) for gap, _ in found.worst(40)]
    assert (first, clicked) == (told[0], told[2])
    assert close < whole / 2, "the next gap is looked at from near"
    following = min(gap.ends_s for gap in found.late if gap.ends_s > found.worst(1)[0][0].ends_s + 1e-6)
    assert after in {Teller(found).sentence(gap) for gap in found.late if gap.ends_s == following}
    assert tip.startswith("step 8: ") and "chunks" in tip and "allowed" in tip


def test_a_browser_shows_it_in_dark_and_in_light_and_has_nothing_to_complain_of(
    found: Explanation, tmp_path: Path
) -> None:
    page, said = draw_page(found), Teller(found).sentence(found.worst(1)[0][0])
    grounds = {"dark": (20, 23, 28), "light": (255, 255, 255)}
    chunks = {"dark": (230, 176, 76), "light": (224, 165, 58)}
    for scheme, fragment in (("dark", ""), ("light", "#gap-1")):
        shown = show(page, scheme, tmp_path, fragment)
        assert shown.complaints == []
        assert html.escape(said, quote=False) in shown.dom
        assert '<div id="stack"' in shown.dom, "the script has told of a gap"
        assert (shown.corner, shown.drawn > 0.02) == (grounds[scheme], True)
        total = sum(shown.colours.values())
        assert shown.colours[grounds[scheme]] < 0.95 * total, "the canvas is not blank"
        assert shown.colours[chunks[scheme]] > 500, "chunks are drawn"
        assert len(shown.colours) > 50
