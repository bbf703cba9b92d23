"""Token ids to text, one token at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of a growing sequence of tokens.

    `token_bytes[i]` are the bytes token i stands for (empty for special tokens, which have no text). The pieces
    returned by `feed`, followed by `flush`, join to exactly `b"".join(bytes).decode("utf-8", "replace")`: a character
    split over tokens appears with its last byte, and bytes that can be no character become U+FFFD, as early as that is
    certain. Cost: under a microsecond a token; state: at most three bytes.
    """

    __slots__ = ("_decode", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = _utf8("replace").decode

    def feed(self, token_id: int) -> str:
        """Text that became certain with this token; often empty in the middle of a character."""
        return self._decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """Text of the bytes still held back, at the end: U+FFFD for an unfinished character, else empty."""
        return self._decode(b"", True)
