"""`time_chunks`: what steps of one chunk take, by its rows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from legato.exec.calibrate import Clock, Probe, StepTimer
from legato.exec.model import LoadedModel

_ROUNDS, _FEW_ROUNDS, _LONG_S = 9, 3, 0.2


def time_chunks(
    loaded: LoadedModel,
    rows: Sequence[int],
    *,
    progress: Callable[[int, int], None] | None = None,
    now: Clock = time.perf_counter,
) -> dict[int, float]:
    """Seconds of a step with one chunk of so many rows, for each of `rows`, none beyond the step budget of `loaded`.
    Overwrites its pool. All chunks have the same middle, so that a row looks back at as many keys whatever its chunk.
    The second shortest of nine runs, of three where they are long, in rounds of an order of their own: others on the
    machine make steps longer, never shorter.
    """
    timer, order = StepTimer(loaded, now), random.Random(0)
    taken: dict[int, list[float]] = {n: [] for n in rows}
    most = max(rows)
    timer.seconds(Probe(chunk=(0, most)))  # what a first step allocates counts for nobody
    for turn in range(_ROUNDS):
        for done, n in enumerate(order.sample(rows, len(rows)), 1):
            if len(taken[n]) < _FEW_ROUNDS or min(taken[n]) < _LONG_S:
                taken[n].append(timer.seconds(Probe(chunk=((most - n) // 2, n))))
            if progress is not None:
                progress(turn * len(rows) + done, _ROUNDS * len(rows))
    return {n: sorted(runs)[1] for n, runs in sorted(taken.items())}
