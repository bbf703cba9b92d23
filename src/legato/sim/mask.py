"""The causal triangle of a prompt, cut into chunks: which keys a query's own chunk brings, and which the cache has."""

from __future__ import annotations

from collections.abc import Iterator

from legato.errors import ConfigError

MOST_TEXT, MOST_SVG = 120, 512
_OWN, _CACHED, _NONE = "█", "▒", "·"
_CELL, _LEFT, _TOP, _LEGEND = 14, 64, 40, 400


def chunks(prompt: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each."""
    for start in range(0, prompt, chunk):
        yield start, min(start + chunk, prompt)


def mask_text(prompt: int, chunk: int) -> str:
    """One line a query, one character a key. Raises ConfigError for more than fit on a screen."""
    _check(prompt, chunk, MOST_TEXT)
    lines = []
    for number, (start, stop) in enumerate(chunks(prompt, chunk), 1):
        for row in range(start, stop):
            name = f"chunk {number}" if row == start else ""
            cells = _CACHED * start + _OWN * (row - start + 1) + _NONE * (prompt - row - 1)
            lines.append(f"{name:>9} {cells}")
    lines.append("")
    lines.append(f"{'':>9} {_OWN} computed in the chunk   {_CACHED} read back from the cache   {_NONE} comes later")
    return "\n".join(lines)


def mask_svg(prompt: int, chunk: int) -> str:
    """The same as a picture that stands alone, readable on light and dark ground."""
    _check(prompt, chunk, MOST_SVG)
    cell = max(2, min(_CELL, 720 // prompt))
    size = cell * prompt
    width, height = max(_LEFT + size + 16, _LEGEND), _TOP + size + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' aria-label="A prompt of {prompt} tokens in chunks of {chunk}: keys that each query reads">',
        "<style>text{font:12px system-ui,sans-serif;fill:#444}.own{fill:#2f6fde}.cached{fill:#e08a2e}"
        ".cut{stroke:#888;stroke-dasharray:3 3}@media(prefers-color-scheme:dark){text{fill:#ccc}}</style>",
        f'<text x="{_LEFT}" y="{_TOP - 12}">keys →</text>',
    ]
    for number, (start, stop) in enumerate(chunks(prompt, chunk), 1):
        top = _TOP + start * cell
        if start:
            parts.append(f'<rect class="cached" x="{_LEFT}" y="{top}" width="{start * cell}"'
                         f' height="{(stop - start) * cell}"/>')  # fmt: skip
            parts.append(f'<path class="cut" d="M{_LEFT} {top}H{_LEFT + size}"/>')
        left = _LEFT + start * cell
        steps = "".join(f"h{cell}v{cell}" for _ in range(stop - start))
        parts.append(f'<path class="own" d="M{left} {top}{steps}H{left}Z"/>')
        if (stop - start) * cell >= 12:
            parts.append(f'<text x="{_LEFT - 8}" y="{top + (stop - start) * cell / 2 + 4}" text-anchor="end">'
                         f"chunk {number}</text>")  # fmt: skip
    below = _TOP + size + 24
    for left, kind, words in ((_LEFT, "own", "computed in the chunk"), (_LEFT + 170, "cached", "read from the cache")):
        parts.append(f'<rect class="{kind}" x="{left}" y="{below - 10}" width="12" height="12"/>')
        parts.append(f'<text x="{left + 18}" y="{below}">{words}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _check(prompt: int, chunk: int, most: int) -> None:
    if chunk < 1:
        raise ConfigError(f"chunk is {chunk}; a prompt would never be computed: 1 is the least")
    if not 1 <= prompt <= most:
        raise ConfigError(f"a mask of {prompt} tokens cannot be drawn; give --prompt from 1 to {most}")
