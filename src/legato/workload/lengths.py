"""`Lengths`: tokens of prompts or of answers, as a user writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

from legato.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Always `mean`; or lognormal with that mean and `sigma`, up to eight means; or any of `values`, `mean` on average.

    `source`: the file that they are from.
    """

    mean: int
    sigma: float = 0.0
    values: tuple[int, ...] = ()
    source: str = ""

    @classmethod
    def of(cls, text: str, name: str) -> Lengths:
        """Reads `400`, `400:0.6` (mean:sigma) or `@FILE`, a length a line. Raises ConfigError that names the option."""
        if text.startswith("@"):
            return _from_file(Path(text[1:]), name)
        mean, colon, sigma = text.partition(":")
        try:
            lengths = cls(int(mean), float(sigma) if colon else 0.0)
        except ValueError:
            lengths = cls(0)
        if lengths.mean < 1 or not 0 <= lengths.sigma <= 3:
            raise ConfigError(
                f"{name} is '{text}'; it is a length as in 400, mean:sigma as in 400:0.6, or @FILE with one a line"
            )
        return lengths

    def draw(self, random: Random) -> int:
        """One length."""
        if self.values:
            return random.choice(self.values)
        if not self.sigma:
            return self.mean
        drawn = random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(1, round(drawn)), 8 * self.mean)

    def __str__(self) -> str:
        if self.values:
            return f"@{self.source}"
        return f"{self.mean}:{self.sigma:g}" if self.sigma else str(self.mean)


def _from_file(path: Path, name: str) -> Lengths:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{name}: {path} cannot be read: {reason}") from error
    values = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.strip().isdecimal() or int(line) < 1:
            raise ConfigError(f"{name}: {path}, line {number}: '{line.strip()[:40]}' is no length; write one a line")
        values.append(int(line))
    if not values:
        raise ConfigError(f"{name}: {path} has no lengths; write one a line")
    return Lengths(max(1, round(sum(values) / len(values))), values=tuple(values), source=str(path))
