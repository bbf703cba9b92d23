"""Merging by scores, against the same rule written the slow and obvious way."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from legato.models.sentencepiece import SPACE, SentencePieceEncoder, SpecialTokens

LETTERS = "ab" + SPACE
BYTES: list[int | None] = [1000 + byte for byte in range(256)]


def oracle(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """Joins the best neighbours (leftmost of equals) until no union of neighbours is a piece."""
    pieces = list(text)
    while True:
        unions = [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not unions:
            break
        at = -max(unions)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [1000 + byte for byte in piece.encode()]
    return found


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text(LETTERS, min_size=1, max_size=5), unique=True, max_size=25),
    ranks=st.permutations(range(25)),
    text=st.text("ab cé", max_size=40),
    prefix=st.booleans(),
)
@example(pieces=["a" + SPACE, SPACE + "a", "aa"], ranks=list(range(25)), text="a a aa a", prefix=False)
def test_merging_equals_the_obvious_way(pieces: list[str], ranks: list[int], text: str, prefix: bool) -> None:
    scores = {piece: -float(rank) for piece, rank in zip(pieces, ranks, strict=False)}
    ids = {piece: number for number, piece in enumerate(pieces)}
    encoder = SentencePieceEncoder(ids, scores, BYTES, 0, add_space_prefix=prefix)
    expected = oracle((SPACE if prefix and text else "") + text.replace(" ", SPACE), scores, ids)
    assert encoder.encode(text, after_special=True) == expected
    assert encoder.encode(text, after_special=True) == expected, "the second time from the cache"


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab ", max_size=60))
def test_equal_scores_join_leftmost_first(text: str) -> None:
    scores = dict.fromkeys(["ab", "ba", "aa", "aba"], 0.0)
    ids = {piece: number for number, piece in enumerate(["a", "b", SPACE, *scores])}
    encoder = SentencePieceEncoder(ids, scores, BYTES, 0, add_space_prefix=False)
    assert encoder.encode(text, after_special=True) == oracle(text.replace(" ", SPACE), scores, ids)


def test_the_space_prefix_is_for_starts_only() -> None:
    ids = {SPACE: 0, "a": 1, SPACE + "a": 2}
    encoder = SentencePieceEncoder(ids, {SPACE + "a": 1.0}, BYTES, 0, add_space_prefix=True)
    assert encoder.encode("a", after_special=True) == [2]
    assert encoder.encode("a", after_special=False) == [1]
    assert encoder.encode("", after_special=True) == []


def test_a_byte_without_a_piece_is_unknown() -> None:
    encoder = SentencePieceEncoder({"a": 1}, {}, [None] * 256, 7, add_space_prefix=False)
    assert encoder.encode("aé", after_special=True) == [1, 7, 7]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.text("<>ab", min_size=1, max_size=4), unique=True, max_size=8), text=st.text("<>ab", max_size=30)
)
def test_special_tokens_are_found_leftmost_then_longest(tokens: list[str], text: str) -> None:
    ids = {token: number for number, token in enumerate(tokens)}
    expected: list[str | int] = []
    at = start = 0
    while at < len(text):
        here = [token for token in tokens if text.startswith(token, at)]
        if not here:
            at += 1
            continue
        if at > start:
            expected.append(text[start:at])
        longest = max(here, key=len)
        expected.append(ids[longest])
        at = start = at + len(longest)
    if start < len(text):
        expected.append(text[start:])
    assert [part for part in SpecialTokens(ids).split(text) if part != ""] == expected
