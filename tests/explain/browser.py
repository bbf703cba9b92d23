"""A browser without a window: what a page shows, and what it complains of."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The numbers that Blink has for what a page is told by prefers-color-scheme.
SCHEMES = {"dark": 0, "light": 1}
# Counts, after the page's own scripts, how often each colour is on its canvas.
_COUNT = """<script>{
const view = document.getElementById("view"), seen = {};
for (const colour of new Uint32Array(view.getContext("2d").getImageData(0, 0, view.width, view.height).data.buffer))
  seen[colour] = (seen[colour] || 0) + 1;
document.body.dataset.seen = Object.entries(seen).map(entry => entry.join(":")).join(" ");
}</script>"""


@dataclass(frozen=True)
class Shown:
    """`dom`: the page after its scripts ran. `colours`: (red, green, blue) to how many pixels of the canvas have it.

    `corner`: the first pixel of the screenshot. `drawn`: of its bytes, the share that differs from the pixel before.
    `complaints`: lines of the console.
    """

    dom: str
    colours: dict[tuple[int, int, int], int]
    corner: tuple[int, int, int]
    drawn: float
    complaints: list[str]


def show(page: str, scheme: str, folder: Path, fragment: str = "", script: str = "") -> Shown:
    """Opens a page, 1,200 × 900, and runs a script in it. Skips the test where there is no browser."""
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (apt-get install chromium)")
    file, picture = folder / "page.html", folder / f"{scheme}.png"
    file.write_text(page.replace("</body>", f"<script>{{{script}}}</script>{_COUNT}</body>"), encoding="utf-8")
    command = [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,900"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--disable-dev-shm-usage"]
    command += ["--no-first-run", "--disable-extensions", "--disable-background-networking"]
    command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--screenshot={picture}", "--dump-dom"]
    done = subprocess.run([*command, file.as_uri() + fragment], capture_output=True, text=True, check=True, timeout=60)
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen is not None, done.stderr
    entries = (entry.split(":") for entry in seen[1].split())
    colours = {(int(c) & 255, int(c) >> 8 & 255, int(c) >> 16 & 255): int(count) for c, count in entries}
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Shown(done.stdout, colours, *_look(picture.read_bytes()), complaints)


def _look(png: bytes) -> tuple[tuple[int, int, int], float]:
    """The first pixel of a PNG, which no filter changes, and the share of bytes that differ from their neighbours'."""
    at, packed = 8, b""
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        packed += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    rows = zlib.decompress(packed)
    return (rows[1], rows[2], rows[3]), 1 - rows.count(0) / len(rows)
