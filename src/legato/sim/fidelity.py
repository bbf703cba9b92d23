"""How near a simulation came to a server: the same figures of both, and how far each percentile is off."""

from __future__ import annotations

from typing import Any

KINDS = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
JUDGED = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"))
BAR = 0.1


def errors(served: dict[str, Any], simulated: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Simulated over served, minus 1, of all that both have."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        there, here = served.get(kind), simulated.get(kind)
        if there and here:
            found[kind] = {name: round(here[name] / there[name] - 1, 4) for name in there if there[name]}
    return found


def worst(found: dict[str, dict[str, float]]) -> float:
    """The largest error, whatever its sign, of p50 and p99 of TTFT and ITL."""
    return max((abs(found[kind][name]) for kind, name in JUDGED if name in found.get(kind, {})), default=0.0)


def delayed(figures: dict[str, Any], door_ms: float) -> dict[str, Any]:
    """As a client sees them who is `door_ms` away: tokenizing, sending and receiving, in all."""
    moved = dict(figures)
    for kind in ("ttft_ms", "e2e_ms"):
        if moved.get(kind):
            moved[kind] = {name: round(value + door_ms, 3) for name, value in moved[kind].items()}
    return moved
