"""`Room`: what a step still has place for while it is planned: tokens, seconds, logits of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from legato.core.budget import StepBudget, StepTime
from legato.core.shape import StepShape
from legato.core.view import Progress


class Room:
    """Begins with a step's decodes, which are in it whatever they take; gives out the rest to prompts, row by row.

    Local to one call of `plan_step`: nothing outlives it.
    """

    __slots__ = ("_decodes", "_next", "_now", "_prefills", "_seconds", "_time", "scores", "tokens")

    def __init__(self, budget: StepBudget, decodes: Sequence[Progress], prefills: Sequence[Progress]) -> None:
        self.tokens = budget.max_tokens - len(decodes)
        self.scores = budget.prompt_logit_rows
        self._decodes = decodes
        self._prefills = prefills
        self._time = budget.time
        self._now: StepShape | None = None  # this step as far as it is planned, once somebody asks for rows
        self._next: StepShape | None = None  # one in which all inside decode, once somebody asks to enter
        self._seconds = 0.0

    def stop(self, request: Progress, start: int) -> int:
        """One past the last row, from `start` on, that `request` may compute in this step; `start` if none.

        The first prompt of a step has at least `StepTime.least_rows`, whatever time they take: it goes on.
        """
        stop = min(request.known, start + self.tokens)
        if request.scored < min(stop, request.score_stop):
            scored = min(stop, request.score_stop, request.scored + self.scores)
            if scored < request.score_stop:
                stop = scored
        time = self._time
        if time is None or stop <= start:
            return max(stop, start)
        now = self._shape(time)
        at_least = time.least_rows if now.sequences == len(self._decodes) else 0
        rows = time.cost.rows_within(now, start, stop - start, self._seconds, int(stop == request.known))
        return start + max(rows, min(at_least, stop - start))

    def take(self, request: Progress, start: int, stop: int) -> tuple[int, int]:
        """Gives rows `[start, stop)` to `request`. Returns the rows `[first, last)` of these that are scored."""
        self.tokens -= stop - start
        first, last = request.scored, max(request.scored, min(stop, request.score_stop))
        self.scores -= last - first
        if self._time is not None:
            logit_rows = last - first + (stop == request.known)
            now, attention = self._shape(self._time), self._time.cost.attention
            self._now = now.with_chunk(attention, start, stop - start, logit_rows)
        return first, last

    def take_back(self, start: int, stop: int) -> None:
        """Undoes `take` for rows of a prompt that is not finished with them, nor scored."""
        self.tokens += stop - start
        if self._time is not None:
            attention, now, rows = self._time.cost.attention, self._shape(self._time), stop - start
            self._now = dataclasses.replace(
                now,
                rows=now.rows - rows,
                sequences=now.sequences - 1,
                pairs=now.pairs - attention.pairs(start, rows),
                kv_tokens=now.kv_tokens - attention.kv_tokens(start, rows),
            )

    def lets_in(self, request: Progress, start: int) -> bool:
        """Whether `request` may enter: there is time for a row of it, and one more that decodes leaves streams their
        time and prompts their share. Counts it in, if so. Whoever comes first is always let in.
        """
        time = self._time
        if time is None:
            return True
        if self.stop(request, start) == start:
            return False
        if self._next is None:
            starts = [*(r.scheduled for r in self._decodes), *(r.known for r in self._prefills)]
            self._next = StepShape.of_decodes(starts, time.cost.attention)
        then = self._next.with_chunk(time.cost.attention, request.known, 1, 1)
        if self._next.rows and time.cost.predict(then) > time.most_decode_s:
            return False
        self._next = then
        return True

    def _shape(self, time: StepTime) -> StepShape:
        """This step as far as it is planned."""
        if self._now is None:
            self._now = StepShape.of_decodes([r.scheduled for r in self._decodes], time.cost.attention)
            self._seconds = time.step_seconds(self._decodes, time.cost.predict(self._now))
        return self._now
