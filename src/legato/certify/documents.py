"""Made-up texts: token ids that depend on the document and the position alone."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_TAIL, _HEAD = 1 << 20, 1 << 21  # documents beyond any real one, for single tokens


def document_tokens(
    document: int, length: int, *, vocab: int, first_token: int | None, head: int = 0, tail: int = 0
) -> tuple[int, ...]:
    """`length` token ids below `vocab`; a longer text of the same document begins with the same ones.

    `first_token`: what sequences of the model begin with. `head`, `tail`: unless 0, another token stands at the
    beginning (after `first_token`), or at the end.
    """
    tokens = [_token(document, position, vocab) for position in range(length)]
    beginning = 0 if first_token is None else 1
    if first_token is not None:
        tokens[0] = first_token
    if head and beginning < length:
        tokens[beginning] = _other(tokens[beginning], _HEAD + head, vocab)
    if tail:
        tokens[-1] = _other(tokens[-1], _TAIL + tail, vocab)
    return tuple(tokens)


def _token(document: int, position: int, vocab: int) -> int:
    """Evenly spread in the logarithm from 200 on: a vocabulary's early merges are its common words."""
    least = min(200, vocab // 2)
    uniform = _mix((document << 32) + position) / (1 << 64)
    return min(int(least * (vocab / max(least, 1)) ** uniform), vocab - 1)


def _other(token: int, variant: int, vocab: int) -> int:
    """A token that is not `token`."""
    return (token + 1 + _mix(variant) % (vocab - 1)) % vocab


def _mix(number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): 64 bits that look random."""
    z = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
