"""`Advice`: which setting, and why. The knee of tail gaps against first tokens, by Kneedle."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from legato.errors import ConfigError
from legato.tune.sweep import Point, Setting

RULE = (
    "Kneedle (Satopää et al., 2011), on p99 of the gaps beside a long prompt against the median time to its first token"
)
_CORNER = "the nearest to the best of both, each from 0 to 1: Kneedle sees no knee"
# Of Kneedle: how far a curve must fall from its knee; 1 is for curves of many points.
_SENSITIVITY = 0.5
# A setting counts as no worse than another one within this.
_ALIKE = 1.03


@dataclass(frozen=True, slots=True)
class Advice:
    """`knee`: of the budgets in tokens. `chosen`: that, or a budget in time which is better. `why`: a sentence."""

    knee: Point
    chosen: Point
    rule: str
    why: str

    @property
    def setting(self) -> Setting:
        """To serve with."""
        return self.chosen.setting


def advise(points: Sequence[Point]) -> Advice:
    """Of points of one load, three of them of budgets in tokens at least. Raises ConfigError for fewer."""
    in_tokens = sorted((p for p in points if p.setting.itl_ms is None), key=lambda p: p.setting.tokens)
    if len(in_tokens) < 3:
        raise ConfigError(f"{len(in_tokens)} budgets were measured, and a knee needs 3; give --budgets more")
    front = _front(in_tokens)
    knee, rule = _knee(front) if len(front) > 2 else (None, "")
    if knee is None:
        knee, rule = _nearest_to_corner(in_tokens), _CORNER
    chosen, why = knee, _why(knee, in_tokens)
    for point in (p for p in points if p.setting.itl_ms is not None):
        if point.itl_p99_ms <= _ALIKE * chosen.itl_p99_ms and point.ttft_ms <= _ALIKE * chosen.ttft_ms:
            chosen = point
            why = _why_time(knee, point)
    return Advice(knee, chosen, rule, why)


def _front(points: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in both, by rising gaps."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.itl_p99_ms, p.ttft_ms)):
        if not front or point.ttft_ms < front[-1].ttft_ms:
            front.append(point)
    return front


def _knee(front: Sequence[Point]) -> tuple[Point | None, str]:
    from kneed import KneeLocator

    gaps, firsts = [p.itl_p99_ms for p in front], [p.ttft_ms for p in front]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is none is told by the answer
        found = KneeLocator(gaps, firsts, S=_SENSITIVITY, curve="convex", direction="decreasing").knee
    return next((p for p in front if p.itl_p99_ms == found), None), RULE


def _nearest_to_corner(points: Sequence[Point]) -> Point:
    def share(value: float, values: list[float]) -> float:
        low, high = min(values), max(values)
        return (value - low) / (high - low) if high > low else 0.0

    gaps, firsts = [p.itl_p99_ms for p in points], [p.ttft_ms for p in points]
    return min(points, key=lambda p: share(p.itl_p99_ms, gaps) ** 2 + share(p.ttft_ms, firsts) ** 2)


def _why(knee: Point, points: Sequence[Point]) -> str:
    """What the step to it brings, and what the next one would."""
    at = points.index(knee)
    parts = []
    if at:
        before = points[at - 1]
        first, gap = _change(before.ttft_ms, knee.ttft_ms), _change(before.itl_p99_ms, knee.itl_p99_ms)
        parts.append(f"from {before.setting} on, the time to a first token is {first}, p99 of the gaps {gap}")
    if at + 1 < len(points):
        after = points[at + 1]
        first, gap = _change(knee.ttft_ms, after.ttft_ms), _change(knee.itl_p99_ms, after.itl_p99_ms)
        parts.append(f"at {after.setting} they would be {first} and {gap}")
    return f"{knee.setting}: {'; '.join(parts)}"


def _why_time(knee: Point, point: Point) -> str:
    gap, first = _change(knee.itl_p99_ms, point.itl_p99_ms), _change(knee.ttft_ms, point.ttft_ms)
    return (
        f"{point.setting} instead of {knee.setting}: p99 of the gaps is {gap}, the time to a first token {first}, and"
        f" the gap stays when prompts are longer or the machine is slower"
    )


def _change(before: float, after: float) -> str:
    """`12 % shorter`, of milliseconds."""
    percent = 100 * (after / before - 1) if before else 0.0
    if abs(percent) < 0.5:
        return "the same"
    return f"{abs(percent):.0f} % {'shorter' if percent < 0 else 'longer'}"
