"""`Draft`: a plan while it is made."""

from __future__ import annotations

import math
from collections.abc import Sequence

from legato.core.budget import StepBudget
from legato.core.plan import StepPlan
from legato.core.room import Room
from legato.core.view import Progress


class Draft:
    """The columns of a plan: decodes, then chunks as far as there is room. Local to one call of `plan_step`."""

    __slots__ = (
        "_budget",
        "_counts",
        "_decodes",
        "_ids",
        "_leaving",
        "_partial",
        "_samples",
        "_scores",
        "_starts",
        "room",
    )

    def __init__(self, budget: StepBudget, decodes: Sequence[Progress], prefills: Sequence[Progress]) -> None:
        self.room = Room(budget, decodes, prefills)
        self._budget = budget
        self._decodes = len(decodes)
        self._ids = [r.request_id for r in decodes]
        self._starts = [r.scheduled for r in decodes]
        self._counts = [1] * len(decodes)
        self._samples = [True] * len(decodes)
        self._scores: list[tuple[int, int, int]] = []
        self._partial = 0  # prompts in the step that it does not finish
        self._leaving: list[tuple[int, Progress]] = []  # those that left rows to others, and where they stand

    def turn_to(self, priority: int) -> None:
        """Comes to requests of that priority: nothing is left to them by more important ones."""
        if self._leaving and self._leaving[0][1].priority != priority:
            self.hand_out_rest()

    def stop(self, request: Progress, start: int) -> int:
        """One past the last row, from `start` on, that a prompt may compute in this step; `start` if none."""
        stop = self.room.stop(request, start)
        if self._budget.chunk_tokens is not None:
            stop = min(stop, start + self._budget.chunk_tokens)
        if stop < request.known and self._partial == self._budget.partial_prefills:
            return start
        return stop

    def pack(self, request: Progress, start: int, leaves: float = 0.0) -> None:
        """Gives `request` what rows it may have, but for the part `leaves`, which others may have if they come.

        Only of a prompt that the step does not finish, that is not scored and is due at no time.
        """
        stop = self.stop(request, start)
        if stop == start:
            return
        if stop < request.known:
            self._partial += 1
            if leaves and request.due_s == math.inf and request.scored >= request.score_stop:
                self._leaving.append((len(self._ids), request))
                stop -= int(leaves * (stop - start))
        first, last = self.room.take(request, start, stop)
        self._ids.append(request.request_id)
        self._starts.append(start)
        self._counts.append(stop - start)
        self._samples.append(stop == request.known)
        if last > first:
            self._scores.append((request.request_id, first, last))

    def hand_out_rest(self) -> None:
        """What was left to others and not taken goes to those who left it, in their order."""
        for n, request in self._leaving:
            start, had = self._starts[n], self._counts[n]
            self.room.take_back(start, start + had)
            self._partial -= 1
            stop = max(self.stop(request, start), start + had)
            self._partial += 1
            self.room.take(request, start, stop)
            self._counts[n] = stop - start
            self._samples[n] = stop == request.known
        self._leaving.clear()

    def finish(
        self,
        step: int,
        admit: Sequence[int],
        preempt: Sequence[int],
        overtaken: tuple[int, ...],
        missed: Sequence[int],
    ) -> StepPlan:
        """The plan."""
        self.hand_out_rest()
        return StepPlan(
            step,
            tuple(self._ids),
            tuple(self._starts),
            tuple(self._counts),
            tuple(self._samples),
            tuple(admit),
            tuple(preempt),
            self._decodes,
            overtaken,
            tuple(self._scores),
            tuple(missed),
        )
