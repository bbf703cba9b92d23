"""Incremental text equals the text of the whole, cut anywhere, valid or not."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from legato.engine.detokenize import Detokenizer
from legato.engine.stop import StopMatcher, TextStream

pieces = st.lists(st.binary(max_size=6), max_size=30)
valid_pieces = st.tuples(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=20))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(pieces)
def test_pieces_join_to_the_decoding_of_the_whole(tokens: list[bytes]) -> None:
    detokenizer = Detokenizer(tokens)
    text = "".join(detokenizer.feed(i) for i in range(len(tokens))) + detokenizer.flush()
    assert text == b"".join(tokens).decode("utf-8", "replace")


@given(valid_pieces)
def test_valid_text_never_shows_a_replacement_character(example: tuple[str, list[int]]) -> None:
    text, places = example
    tokens = cut(text.encode("utf-8", "replace"), places)
    detokenizer = Detokenizer(tokens)
    shown = [detokenizer.feed(i) for i in range(len(tokens))]
    assert "".join(shown) == text.encode("utf-8", "replace").decode()
    assert detokenizer.flush() == ""


def test_an_emoji_in_four_tokens_appears_with_the_last() -> None:
    detokenizer = Detokenizer([bytes([byte]) for byte in "🎻".encode()])
    assert [detokenizer.feed(i) for i in range(4)] == ["", "", "", "🎻"]


def test_half_a_character_at_the_end_is_replaced_by_flush() -> None:
    detokenizer = Detokenizer(["é".encode()[:1]])
    assert (detokenizer.feed(0), detokenizer.flush()) == ("", "\ufffd")


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop to be complete, the longest of those that are complete together."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=0, max_size=4),
)
def test_stops_are_found_as_if_the_text_came_character_by_character(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        assert not any(stop in shown for stop in stops)
    hit = matcher.hit
    shown += matcher.flush()
    assert (shown, hit) == reference_stop("".join(pieces), stops)


def test_what_may_begin_a_stop_is_held_back_and_no_more() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.feed("hello <") == "hello "
    assert matcher.feed("/e") == ""
    assert matcher.feed("x ") == "</ex "
    assert matcher.feed("</en") == ""
    assert matcher.feed("d> never") == ""
    assert matcher.hit == "</end>"
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""


def test_stops_do_not_count_in_the_first_min_tokens() -> None:
    stream = TextStream([b"x", b"y"], ["x"], min_tokens=2)
    assert [stream.feed(0), stream.feed(0), stream.feed(1), stream.feed(0)] == ["x", "x", "y", ""]
    assert stream.stop_hit == "x"


def test_the_end_of_the_sequence_gives_back_what_was_held() -> None:
    stream = TextStream([b"a<", b"\xc3"], ["<b>"])
    assert stream.feed(0) == "a"
    assert stream.feed(1) == ""
    assert stream.finish() == "<\ufffd"
    assert stream.finish() == ""
