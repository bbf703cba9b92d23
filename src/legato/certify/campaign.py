"""`Campaign`: trial after trial until one fails, and then the smallest that does."""

from __future__ import annotations

import random
from collections.abc import Callable

from legato.certify.alone import AloneCache
from legato.certify.draw import Limits, random_schedule
from legato.certify.report import Finding
from legato.certify.rig import Rig
from legato.certify.schedule import Schedule
from legato.certify.shrink import DEFAULT_RUNS, DEFAULT_SECONDS, shrink
from legato.certify.totals import Totals
from legato.certify.trial import Failure, run_trial

Clock = Callable[[], float]


class Campaign:
    """Trials of one rig. `totals`, `seconds` and `finding` are what there is so far, also after an interrupt."""

    def __init__(self, rig: Rig, clock: Clock) -> None:
        self.totals = Totals()
        self.seconds = 0.0
        self.finding: Finding | None = None
        self._rig = rig
        self._cache = AloneCache(rig)
        self._clock = clock

    def run(
        self,
        limits: Limits,
        *,
        seed: int,
        trials: int | None = None,
        seconds: float | None = None,
        on_trial: Callable[[Totals], None] = lambda totals: None,
    ) -> None:
        """Ends with the first failure, after `trials`, or after `seconds`. Trial n of a seed is always the same."""
        started_s, number = self._clock(), 0
        while (trials is None or number < trials) and (seconds is None or self._clock() - started_s < seconds):
            schedule = random_schedule(random.Random(f"{seed}:{number}"), limits)
            if not self.replay(schedule, number):
                return
            on_trial(self.totals)
            number += 1

    def replay(self, schedule: Schedule, number: int = 0) -> bool:
        """Runs one schedule; whether nothing differed."""
        started_s = self._clock()
        outcome = run_trial(schedule, self._rig, self._cache)
        self.seconds += self._clock() - started_s
        self.totals.add(outcome.totals)
        if outcome.failure is not None:
            self.finding = Finding(number, outcome.failure, schedule, schedule)
        return outcome.failure is None

    def shrink(self, *, runs: int = DEFAULT_RUNS, seconds: float = DEFAULT_SECONDS) -> None:
        """Makes the schedule of the finding small. One that does not fail again when run again is left as it is."""
        found = self.finding
        assert found is not None, "nothing was found"
        if not found.failure.is_like(self._failure(found.original)):
            self.finding = Finding(found.trial, found.failure, found.original, found.original, 1, is_repeatable=False)
            return
        schedule, asked = shrink(
            found.original,
            lambda candidate: found.failure.is_like(self._failure(candidate)),
            most_blocks=self._rig.shape.pool_blocks,
            block_tokens=self._rig.shape.block_tokens,
            clock=self._clock,
            runs=runs,
            seconds=seconds,
        )
        failure = self._failure(schedule) or found.failure
        self.finding = Finding(found.trial, failure, schedule, found.original, asked + 2)

    def _failure(self, schedule: Schedule) -> Failure | None:
        """Of one run. Answers alone are computed anew: a fault may be in what is kept of them."""
        return run_trial(schedule, self._rig, AloneCache(self._rig)).failure
