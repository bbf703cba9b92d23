"""What is tried, and what came of it: `Setting`, `Point`, and the points that were measured before an interruption."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.errors import ConfigError

BUDGETS = (256, 384, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True, slots=True)
class Setting:
    """A budget in tokens a step, or, where `itl_ms` is given, in time. `tokens`: of a step, at most, in either case."""

    tokens: int
    itl_ms: float | None = None

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens" if self.itl_ms is None else f"{self.itl_ms:g} ms"

    @property
    def options(self) -> dict[str, int | float]:
        """As `legato serve` takes it."""
        if self.itl_ms is None:
            return {"max-num-batched-tokens": self.tokens}
        return {"itl-ms": self.itl_ms, "max-num-batched-tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class Point:
    """What a setting came to. ITL: gaps of the streams while a long prompt was in flight; of all gaps these may be less
    than a hundredth. TTFT: of the long prompts, the median.
    """

    setting: Setting
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    ttft_ms: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {k: round(v, 3) for k, v in dataclasses.asdict(self).items() if k != "setting"}
        return {"tokens": self.setting.tokens, "budget_ms": self.setting.itl_ms, **values}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Point:
        """The same back. Raises KeyError or TypeError for anything else."""
        values = dict(data)
        return cls(Setting(values.pop("tokens"), values.pop("budget_ms")), **values)


def aligned(budgets: Sequence[int], tile: int) -> tuple[int, ...]:
    """Each as the next multiple of `tile`, without repetition: a block of rows that is begun costs like a full one."""
    return tuple(dict.fromkeys(-(-budget // tile) * tile for budget in budgets))


class Kept:
    """Points in a file, a line each, so that an interrupted sweep can go on.

    The first line says what they were measured with: `what`. Raises ConfigError if that was something else.
    """

    def __init__(self, path: Path, what: dict[str, Any]) -> None:
        self._path = path
        self.points: list[Point] = []
        """Those that were measured before."""
        what = json.loads(json.dumps(what))
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if not lines:
            self._append(what)
            return
        try:
            if json.loads(lines[0]) != what:
                raise ConfigError(
                    f"{path} has points of another sweep; delete it, or keep the points of this one elsewhere with"
                    " --resume"
                )
            self.points = [Point.from_dict(json.loads(line)) for line in lines[1:]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no file of points ({error}); delete it") from error

    def add(self, point: Point) -> None:
        """Keeps a point."""
        self._append(point.to_dict())
        self.points.append(point)

    def forget(self) -> None:
        """The sweep is done."""
        self._path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from error
