"""SentencePiece's byte-pair encoding by scores, as in GGUF files of Llama 2, Mistral and Gemma (model type "llama").

Written here, not built on `tokenizers`, for the time it takes to load: deriving the merges of Gemma's 262,144 pieces
(513,511 of them) and giving them to `tokenizers.models.BPE` took 3.5 s of CPU, against 0.3 s for the tables below. The
encoding is llama.cpp's `llm_tokenizer_spm`: of all neighbours whose union is a piece, join the pair with the highest
score, leftmost first, until none is left; what is then no piece becomes bytes.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence

SPACE = "\u2581"  # ▁, which pieces have for a space

_CACHED_WORDS = 1 << 16
_CACHED_WORD_CHARACTERS = 24
_MAX_JOINING = 8


class SentencePieceEncoder:
    """Text to ids. `scores`: of the pieces that merging may form. `byte_ids[b]`: the piece of byte b, or None.

    Cost: a dictionary look-up for a word seen before, else a few µs a character.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Mapping[str, float],
        byte_ids: Sequence[int | None],
        unknown_id: int,
        *,
        add_space_prefix: bool,
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._add_space_prefix = add_space_prefix
        self._words = _word_pattern(scores)
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of `text`, which holds no special token. `after_special`: it starts the text, or follows one."""
        if not text:
            return []
        text = text.replace(" ", SPACE)
        if self._add_space_prefix and after_special:
            text = SPACE + text
        if self._words is None:
            return list(self._encode_word(text))
        ids: list[int] = []
        cache = self._cache
        for word in self._words.findall(text):
            known = cache.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(word) <= _CACHED_WORD_CHARACTERS:
                    if len(cache) >= _CACHED_WORDS:
                        cache.clear()
                    cache[word] = known
            ids += known
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if (whole := self._ids.get(word)) is not None and len(word) == 1:
            return (whole,)
        ids: list[int] = []
        for piece in self._merge(word):
            known = self._ids.get(piece)
            if known is not None:
                ids.append(known)
            else:
                ids += self._bytes_of(piece)
        return tuple(ids)

    def _bytes_of(self, piece: str) -> Iterable[int]:
        for byte in piece.encode():
            known = self._byte_ids[byte]
            yield self._unknown_id if known is None else known

    def _merge(self, word: str) -> list[str]:
        """Pieces of `word`. `pieces[i]` starts at character i; "" once it is part of a piece further left."""
        scores = self._scores
        pieces = list(word)
        size = len(pieces)
        before = list(range(-1, size - 1))
        after = list(range(1, size + 1))
        queue: list[tuple[float, int, int]] = []  # (-score, left, length of the union): best first, then leftmost
        for left in range(size - 1):
            score = scores.get(pieces[left] + pieces[left + 1])
            if score is not None:
                queue.append((-score, left, 2))
        heapq.heapify(queue)
        while queue:
            _, left, length = heapq.heappop(queue)
            right = after[left]
            if right == size or not pieces[left] or len(pieces[left]) + len(pieces[right]) != length:
                continue  # one of the two has been joined to another since
            joined = pieces[left] + pieces[right]
            pieces[left], pieces[right] = joined, ""
            following = after[left] = after[right]
            if following < size:
                before[following] = left
                score = scores.get(joined + pieces[following])
                if score is not None:
                    heapq.heappush(queue, (-score, left, len(joined) + len(pieces[following])))
            preceding = before[left]
            if preceding >= 0:
                score = scores.get(pieces[preceding] + joined)
                if score is not None:
                    heapq.heappush(queue, (-score, preceding, len(pieces[preceding]) + len(joined)))
        return [piece for piece in pieces if piece]


def _word_pattern(pieces: Iterable[str]) -> re.Pattern[str] | None:
    """Words: spaces, then other characters. A merge can cross from one to the next only where some piece has a space
    after another character (Gemma has one, ">▁</"); words are cut elsewhere, so each can be encoded, and
    remembered, by itself. None if there are many such characters."""
    joining = set()
    for piece in pieces:
        inner = piece.lstrip(SPACE)
        if SPACE in inner:
            joining |= {inner[at - 1] for at in range(1, len(inner)) if inner[at] == SPACE}
    if len(joining) > _MAX_JOINING:
        return None
    more = f"(?:(?<=[{re.escape(''.join(sorted(joining)))}]){SPACE}+[^{SPACE}]*)*" if joining else ""
    return re.compile(f"{SPACE}*[^{SPACE}]+{more}|{SPACE}+")


class SpecialTokens:
    """Finds special tokens in a text: leftmost, then longest. `ids`: of each token's text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: number for text, number in ids.items() if text}
        # A first filter by two characters: an alternation of Gemma's 6,400 tokens would be tried at every "<".
        starts = {text[:2] for text in self._ids}
        self._pattern = re.compile("|".join(map(re.escape, sorted(starts, key=len, reverse=True)))) if starts else None
        self._lengths: dict[str, list[int]] = {}
        for length in sorted({len(text) for text in self._ids}, reverse=True):
            for start in {text[:2] for text in self._ids if len(text) == length}:
                self._lengths.setdefault(start, []).append(length)

    def split(self, text: str) -> list[str | int]:
        """`text` as strings without special tokens, and the ids of those between them."""
        if self._pattern is None:
            return [text]
        parts: list[str | int] = []
        start = at = 0
        while (match := self._pattern.search(text, at)) is not None:
            found = self._longest_at(text, match.start())
            if found is None:
                at = match.start() + 1
                continue
            if match.start() > start:
                parts.append(text[start : match.start()])
            parts.append(self._ids[found])
            start = at = match.start() + len(found)
        if start < len(text):
            parts.append(text[start:])
        return parts

    def _longest_at(self, text: str, at: int) -> str | None:
        """The longest token at `at`: among those of the same two first characters, then those of one character."""
        for start in (text[at : at + 2], text[at]):
            for length in self._lengths.get(start, ()):
                if (candidate := text[at : at + length]) in self._ids:
                    return candidate
        return None
