"""Seeded strings of many scripts for checking a tokenizer, and the hash that stands for each encoding.

tests/golden/tokenizer_strings.json maps a model's name to one string of hexadecimal digits: eight for each of
`strings()`, in order, the `encoding_hash` of llama.cpp's ids (no BOS, special tokens taken as plain text).
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

SEED = 20_240_601
COUNT = 3_000
HASH_DIGITS = 8

# Ranges of code points, half-open, one script each.
SCRIPTS: dict[str, list[tuple[int, int]]] = {
    "ascii": [(0x20, 0x7F)],
    "letters": [(0x61, 0x7B), (0x41, 0x5B), (0x61, 0x7B)],
    "latin": [(0x61, 0x7B), (0xC0, 0x180), (0x1E00, 0x1F00)],
    "greek": [(0x391, 0x3A2), (0x3A3, 0x3CF), (0x1F00, 0x1F16)],
    "cyrillic": [(0x410, 0x450), (0x450, 0x482)],
    "armenian": [(0x531, 0x557), (0x561, 0x587)],
    "hebrew": [(0x5D0, 0x5EB), (0x5B0, 0x5BD)],
    "arabic": [(0x621, 0x63B), (0x641, 0x653), (0x660, 0x66A)],
    "devanagari": [(0x904, 0x93A), (0x93E, 0x94E), (0x966, 0x970)],
    "bengali": [(0x985, 0x98D), (0x993, 0x9A9), (0x9BE, 0x9C5)],
    "tamil": [(0xB85, 0xB8B), (0xBAE, 0xBBA), (0xBBE, 0xBC3)],
    "thai": [(0xE01, 0xE3B), (0xE40, 0xE4F)],
    "georgian": [(0x10D0, 0x10FB)],
    "ethiopic": [(0x1200, 0x1249)],
    "hangul": [(0xAC00, 0xD7A4), (0x1100, 0x1113)],
    "kana": [(0x3041, 0x3097), (0x30A1, 0x30FB)],
    "han": [(0x4E00, 0x9FA6), (0x3400, 0x3500), (0x20000, 0x20100)],
    "symbols": [(0x2190, 0x2200), (0x2200, 0x2300), (0x2500, 0x2600), (0x20A0, 0x20C0)],
    "emoji": [(0x1F300, 0x1F5FF), (0x1F600, 0x1F650), (0x1F680, 0x1F6C6), (0x2600, 0x26FF)],
    "mathematical": [(0x1D400, 0x1D455), (0x2070, 0x2072), (0x2080, 0x208F)],
    "private": [(0xE000, 0xE010), (0x10FFF0, 0x10FFFE)],
}
_PIECES: dict[str, list[str]] = json.loads((Path(__file__).parent / "pieces.json").read_text(encoding="utf-8"))
SPACES = _PIECES["spaces"]
JOINED = _PIECES["joined"]
CONTRACTIONS = _PIECES["contractions"]
LOOK_ALIKES = _PIECES["look_alikes"]
CODE = _PIECES["code"]
WORDS = _PIECES["words"]


def strings() -> list[str]:
    """COUNT strings, the same on every machine: every fixed piece alone first, then seeded mixtures."""
    draw = random.Random(SEED)
    fixed = [*SPACES, *JOINED, *CONTRACTIONS, *LOOK_ALIKES, *CODE, *map(chr, range(1, 256)), "", *_prompts()]
    makers: list[Callable[[random.Random], str]] = [
        _script,
        _script,
        _mixed,
        _mixed,
        _spaced,
        _digits,
        _text,
        _code,
        _special,
    ]
    mixtures = [makers[index % len(makers)](draw) for index in range(COUNT - len(fixed))]
    return fixed + mixtures


def encoding_hash(ids: list[int]) -> str:
    """Eight hexadecimal digits: CRC-32 of the ids as little-endian int32."""
    return f"{zlib.crc32(struct.pack(f'<{len(ids)}i', *ids)):08x}"


def _prompts() -> list[str]:
    prompts = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    return [prompt["text"] for prompt in prompts]


def _character(draw: random.Random, script: str) -> str:
    start, stop = draw.choice(SCRIPTS[script])
    return chr(draw.randrange(start, stop))


def _script(draw: random.Random) -> str:
    """Words of one script."""
    script = draw.choice(list(SCRIPTS))
    words = ["".join(_character(draw, script) for _ in range(draw.randint(1, 9))) for _ in range(draw.randint(1, 8))]
    return draw.choice([" ", " ", " ", "", "\n", ", "]).join(words)


def _mixed(draw: random.Random) -> str:
    """Characters of all scripts, with nothing between them."""
    return "".join(_character(draw, draw.choice(list(SCRIPTS))) for _ in range(draw.randint(1, 24)))


def _spaced(draw: random.Random) -> str:
    """Words between runs of white space of all kinds."""
    pieces = []
    for _ in range(draw.randint(1, 7)):
        pieces.append("".join(draw.choice(SPACES) for _ in range(draw.randint(0, 4))))
        pieces.append(draw.choice(WORDS))
    return "".join(pieces) + " " * draw.randint(0, 3) + "\n" * draw.randint(0, 3)


def _digits(draw: random.Random) -> str:
    """Numbers, with the punctuation they come with."""
    pieces = []
    for _ in range(draw.randint(1, 5)):
        pieces.append("".join(draw.choice("0123456789") for _ in range(draw.randint(1, 12))))
        pieces.append(draw.choice([" ", ".", ",", "-", "/", ":", "%", "€", " km", "e+", "x", "٣", "½", "²"]))
    return "".join(pieces)


def _text(draw: random.Random) -> str:
    """A sentence with punctuation and contractions."""
    words = [
        draw.choice(WORDS + CONTRACTIONS) + draw.choice(["", "", "", ",", ".", "!?", "...", "…", "”", ")"])
        for _ in range(draw.randint(2, 25))
    ]
    return " ".join(words)


def _code(draw: random.Random) -> str:
    """Code with indentation."""
    lines = [
        draw.choice(["", "  ", "    ", "\t", "\t\t", " " * 17]) + draw.choice(CODE) for _ in range(draw.randint(1, 4))
    ]
    return draw.choice(["\n", "\r\n", ""]).join(lines)


def _special(draw: random.Random) -> str:
    """Special-token look-alikes, joined emoji and control characters inside text."""
    pieces = [
        draw.choice(
            [
                draw.choice(LOOK_ALIKES),
                draw.choice(JOINED),
                draw.choice(WORDS),
                chr(draw.randrange(1, 32)),
                draw.choice(SPACES),
            ]
        )
        for _ in range(draw.randint(1, 8))
    ]
    return draw.choice(["", " "]).join(pieces)
