"""What is sent, and when: prompts of which no two begin alike, lengths, and arrivals of an open loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        self._vocab = vocab
        self._scale = scale

    def long(self, tokens: int) -> str | list[int]:
        """About `tokens` tokens: exactly so many of ids."""
        if self._scale is None:
            return self._random.choices(self._vocab, k=tokens)
        return words(self._scale.words(tokens), self._random)

    def short(self) -> str:
        """One line that a model goes on with in words: token ids at random bring forth text that is not."""
        return f"Once upon a time, in a land of {', '.join(self._random.choices(_WORDS, k=6))} and"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt or an answer: always `mean`, or lognormal with that mean and `sigma`, up to eight means."""

    mean: int
    sigma: float = 0.0

    @classmethod
    def of(cls, text: str, name: str) -> Lengths:
        """Reads `400`, or `400:0.6` (mean:sigma). Raises ConfigError that names the option."""
        mean, colon, sigma = text.partition(":")
        try:
            lengths = cls(int(mean), float(sigma) if colon else 0.0)
        except ValueError:
            lengths = cls(0)
        if lengths.mean < 1 or not 0 <= lengths.sigma <= 3:
            raise ConfigError(f"{name} is '{text}'; it is a length as in 400, or mean:sigma as in 400:0.6")
        return lengths

    def draw(self, random: Random) -> int:
        """One length."""
        if not self.sigma:
            return self.mean
        drawn = random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(1, round(drawn)), 8 * self.mean)

    def __str__(self) -> str:
        return f"{self.mean}:{self.sigma:g}" if self.sigma else str(self.mean)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: when it is sent, in seconds from the start, and its tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def poisson_trace(rate: float, duration_s: float, prompt: Lengths, output: Lengths, seed: int) -> tuple[Arrival, ...]:
    """Poisson arrivals at `rate` a second. The same for every server: it depends on the arguments only.

    A higher rate is the same sequence of requests, closer together, so that rates differ by nothing but the rate.
    """
    gaps, sizes = Random(seed), Random(seed + 1)
    trace = []
    at_s = gaps.expovariate(1.0) / rate
    while at_s < duration_s:
        trace.append(Arrival(at_s, prompt.draw(sizes), output.draw(sizes)))
        at_s += gaps.expovariate(1.0) / rate
    return tuple(trace)


def periodic(every_s: float, duration_s: float) -> Iterator[float]:
    """0, every_s, 2 every_s, … below duration_s."""
    return (k * every_s for k in range(math.ceil(duration_s / every_s)))


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
