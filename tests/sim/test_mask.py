"""The causal triangle by chunk, as text and as a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from legato.errors import ConfigError
from legato.sim.mask import mask_svg, mask_text


def test_own_keys_and_cached_ones_make_up_the_triangle() -> None:
    lines = [line[10:] for line in mask_text(18, 6).splitlines()[:18]]
    for row, line in enumerate(lines):
        start = row // 6 * 6
        assert line == "▒" * start + "█" * (row - start + 1) + "·" * (17 - row)


def test_chunks_are_named_where_they_begin() -> None:
    lines = mask_text(13, 6).splitlines()
    assert [n for n, line in enumerate(lines) if "chunk " in line[:10]] == [0, 6, 12]


def test_the_picture_has_as_much_ground_as_there_are_pairs() -> None:
    root = ElementTree.fromstring(mask_svg(18, 6))
    space = "{http://www.w3.org/2000/svg}"
    cached = [
        rect for rect in root.iter(f"{space}rect") if rect.get("class") == "cached" and rect.get("height") != "12"
    ]
    cell = int(cached[0].get("width", "0")) // 6
    assert sum(int(r.get("width", "0")) * int(r.get("height", "0")) for r in cached) == 6 * 6 * cell**2 * 3
    assert sum(path.get("class") == "own" for path in root.iter(f"{space}path")) == 3


@pytest.mark.parametrize(("prompt", "chunk", "says"), [(0, 4, "0 tokens"), (10_000, 4, "10000"), (4, 0, "chunk is 0")])
def test_what_cannot_be_drawn_is_refused(prompt: int, chunk: int, says: str) -> None:
    for draw in (mask_text, mask_svg):
        with pytest.raises(ConfigError, match=says):
            draw(prompt, chunk)
