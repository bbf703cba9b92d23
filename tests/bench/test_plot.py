"""The picture: well-formed, complete, readable in any scale."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from random import Random

import pytest

from legato.bench.plot import Picture, draw_html, draw_svg

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = Picture(
    title="a model <& its streams>",
    subtitle="p50 50 ms",
    duration_s=10.0,
    budget_ms=100.0,
    at_s=[1.0, 2.0, 3.0, 4.0, 12.0],
    gap_ms=[50.0, 60.0, 0.0, 640.0, 101.0],
    spans=[(1.5, 2.5, 4000), (8.0, 14.0, 4000)],
)


def test_the_drawing_is_xml_and_shows_late_tokens_prompts_and_the_budget() -> None:
    root = ET.fromstring(draw_svg(PICTURE))
    circles = root.findall(f"{SVG}g[@class='late']/{SVG}circle")
    assert [circle.findtext(f"{SVG}title") for circle in circles] == ["640 ms, at 4.00 s", "101 ms, at 12.00 s"]
    dots = next(path.attrib["d"] for path in root.findall(f"{SVG}path") if path.get("class") == "dots")
    assert dots.count("M") == 3
    longs = root.findall(f"{SVG}rect")
    assert longs[0].findtext(f"{SVG}title") == "4,000 tokens, sent at 1.5 s, first token 1.00 s later"
    assert "budget 100 ms" in "".join(root.itertext())
    assert "a model <& its streams>" in "".join(root.itertext())


@pytest.mark.parametrize("longest_ms", [101.0, 900.0, 20_000.0])
def test_everything_lies_within_the_drawing(longest_ms: float) -> None:
    random = Random(1)
    gaps = [random.uniform(5, 60) for _ in range(2000)] + [0.0, longest_ms]
    picture = replace(PICTURE, at_s=[random.uniform(0, 10) for _ in gaps], gap_ms=gaps)
    root = ET.fromstring(draw_svg(picture))
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    dots = next(path.attrib["d"] for path in root.findall(f"{SVG}path") if path.get("class") == "dots")
    for dot in dots.split("M")[1:]:
        x, y = (float(number) for number in dot.removesuffix("h0").split())
        assert 60 < x < width and 60 < y <= height - 40
    for shape in root.iter():
        for name, size in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(shape.get(name, 0)) <= size


def test_a_minute_of_many_streams_stays_a_small_file() -> None:
    random = Random(1)
    count = 64 * 50 * 60
    picture = replace(
        PICTURE,
        duration_s=60.0,
        at_s=[random.uniform(0, 60) for _ in range(count)],
        gap_ms=[random.gauss(20, 2) for _ in range(count)],
    )
    assert len(draw_svg(picture)) < 1_500_000


def test_the_page_is_one_file_that_asks_the_network_for_nothing() -> None:
    page = draw_html(PICTURE, [("ITL", "p50 < 50 ms")], "measured & noted")
    assert "p50 &lt; 50 ms" in page and "measured &amp; noted" in page and "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert "<script" not in page


def test_nothing_measured_is_drawn_too() -> None:
    ET.fromstring(draw_svg(replace(PICTURE, at_s=[], gap_ms=[], spans=[])))
