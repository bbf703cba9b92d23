"""What is drawn and told of a demo is made of its JSON, and is all there."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from demo.rig import SETUP, recorded
from legato.demo.document import Demo
from legato.demo.page import draw_html
from legato.demo.picture import draw_svg
from legato.demo.run import Run

SVG = "{http://www.w3.org/2000/svg}"


@cache
def demo(steps_left: int | None = None) -> Demo:
    runs = tuple(recorded(steps_left=steps_left))
    return Demo("a <model> & more", "A CPU", 2, 0.31, "2026-01-01", "0.1.0", "legato demo --streams 4", SETUP, runs)


def test_json_has_all_that_the_pictures_are_made_of() -> None:
    document = json.loads(json.dumps(demo().to_dict()))
    again = Demo.from_dict(document)
    assert again.to_dict() == document
    assert draw_svg(again) == draw_svg(Demo.from_dict(again.to_dict()))
    assert again.setup == SETUP and again.is_complete


def test_json_names_its_fields() -> None:
    document = demo().to_dict()
    assert set(document) == {
        *("demo", "model", "machine", "cores", "steal_share", "date", "legato", "command"),
        *("setup", "complete", "summary", "runs"),
    }
    for run in document["runs"]:
        assert set(run) == {
            *("method", "figures", "prompt_sent_s", "prompt_first_token_s", "end_s"),
            *("prompt_steps", "cached_tokens", "late_tokens", "token_s"),
        }
        assert set(run["figures"]) == {"worst_gaps_ms", "usual_gap_ms", "ttft_s", "stream_tokens_per_s"}


@pytest.mark.parametrize("change", [{"demo": 2}, {"runs": [{"method": "magic"}]}, {"setup": {"streams": 4}}])
def test_what_is_no_demo_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Demo.from_dict({**demo().to_dict(), **change})


def test_the_drawing_is_xml_within_its_frame_and_has_three_panels_of_one_scale() -> None:
    root = ET.fromstring(draw_svg(demo()))
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    late = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.get("class") == "late"]
    kept = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.get("class") == "kept"]
    assert len(kept) == 3
    assert len(late) == 2, "of one pass and of the fixed budget; milliseconds are kept"
    for shape in root.iter():
        for name, size in (("x", width), ("y", height)):
            assert 0 <= float(shape.get(name, 0)) <= size
    text = "".join(root.itertext())
    for words in ("a <model> & more", "Chunking off", "100 tokens a step", "longest wait 607 ms", "100 ms"):
        assert words in text


@pytest.mark.parametrize("steps_left", [None, 40, 3, 0])
def test_the_page_stands_alone_and_has_every_figure(steps_left: int | None) -> None:
    page = draw_html(demo(steps_left))
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert not any(word in page for word in ("<script", "<link", "src=", "url(", "@import"))
    assert "legato demo --streams 4" in page and "A CPU, 2 cores" in page and "&lt;model&gt; &amp; more" in page
    assert "Others had 31 % of this machine" in page
    assert ("Interrupted" in page) is (steps_left is not None)
    if steps_left is None:
        for words in ("607 · 7 · 7 ms", "103 · 103 · 103 ms", "30 · 30 · 30 ms", "0.61 s", "0.65 s"):
            assert words in page


def test_a_run_without_a_token_is_drawn_too() -> None:
    empty = Demo("m", "c", 1, None, "d", "v", "legato demo", SETUP, (Run("one pass"),))
    ET.fromstring(draw_svg(empty))
    assert "nothing to compare" in draw_html(empty)


def test_the_picture_of_the_readme_is_made_of_its_data() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    found = Demo.from_dict(json.loads((docs / "data" / "demo.json").read_text(encoding="utf-8")))
    assert (docs / "images" / "demo.svg").read_text(encoding="utf-8") == draw_svg(found)
