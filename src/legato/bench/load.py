"""What is sent: prompts of which no two begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from legato.errors import ConfigError

# fmt: off
_WORDS = (
    "river", "lamp", "copper", "garden", "letter", "winter", "bridge", "market", "silver", "castle", "forest",
    "window", "summer", "island", "harbor", "mirror", "engine", "ladder", "orange", "candle", "pocket", "thunder",
    "village", "blanket", "desert", "monkey", "pepper", "saddle", "ticket", "violin", "walnut", "anchor", "basket",
    "carpet", "dragon", "eleven", "fabric", "ginger", "hammer", "insect", "jacket", "kitchen", "lemon", "marble",
    "needle", "ocean", "paper", "quarter", "rabbit", "salmon", "temple", "valley", "wagon", "yellow", "butter",
    "circle", "doctor", "family", "guitar", "hunter", "iron", "jungle", "kettle",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class WordScale:
    """Tokens of a text of words: `extra + per_word * words`. The defaults suit most tokenizers."""

    per_word: float = 1.1
    extra: float = 1.0

    def words(self, tokens: int) -> int:
        """Words that make up about so many tokens."""
        return max(1, round((tokens - self.extra) / self.per_word))


class Prompts:
    """Prompts drawn from `random`, of token ids in `vocab`, or of words where the server takes no ids (`scale`)."""

    def __init__(self, random: Random, vocab: range, scale: WordScale | None = None) -> None:
        self._random = random
        self._seed = random.random()
        self._vocab = vocab
        self._scale = scale

    def long(self, tokens: int) -> str | list[int]:
        """About `tokens` tokens: exactly so many of ids."""
        if self._scale is None:
            return self._random.choices(self._vocab, k=tokens)
        return words(self._scale.words(tokens), self._random)

    def composed(self, shared: Sequence[tuple[int, int]], tokens: int) -> str | list[int]:
        """So many tokens that begin with texts of (number, tokens): the same number is the same text. Of words: about
        so many, and where texts meet the tokens may differ.
        """
        if not shared:
            return self.long(tokens)
        if self._scale is not None:
            parts = [words(self._scale.words(size), self._text(text)) for text, size in shared]
            rest = tokens - sum(size for _, size in shared)
            return " ".join([*parts, words(self._scale.words(rest), self._random)] if rest > 0 else parts)
        ids: list[int] = []
        for text, size in shared:
            ids += self._text(text).choices(self._vocab, k=size)
        return (ids + self._random.choices(self._vocab, k=max(tokens - len(ids), 0)))[:tokens]

    def _text(self, number: int) -> Random:
        """Draws a text: another one for other prompts, or a cache would know it from before."""
        return Random(f"{self._seed}/{number}")

    def short(self) -> str:
        """One line that a model goes on with in words: token ids at random bring forth text that is not."""
        return f"Once upon a time, in a land of {', '.join(self._random.choices(_WORDS, k=6))} and"


def words(count: int, random: Random | int) -> str:
    """`count` words, drawn."""
    random = Random(random) if isinstance(random, int) else random
    return " ".join(random.choices(_WORDS, k=count))


def parse_vocab(text: str) -> range:
    """The token ids in `300:20000`. Raises ConfigError."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) + 100 <= int(high)):
        raise ConfigError(f"--vocab is '{text}'; it is a range of at least 100 token ids, as in 300:20000")
    return range(int(low), int(high))


def parse_tokens(text: str, name: str) -> tuple[int, ...]:
    """The lengths in `4000` or `4000,8000`. Raises ConfigError that names the option."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name} is '{text}'; it is one length as in 4000, or several as in 4000,8000")
    return tuple(int(part) for part in parts)
