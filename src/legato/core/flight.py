"""`Flight`: a step that is applied and not committed."""

from __future__ import annotations

from collections.abc import Sequence

from legato.core.host import Move
from legato.core.plan import StepPlan, StepResult
from legato.core.slot import Slot
from legato.errors import EngineError


class Flight:
    """A plan under way. `slots`, `stops`: one an entry, the request and one past the last position it computes.

    `moves`: copies between pool and host memory that come before its rows.
    `preempted`: requests that lost their KV after the step was applied; its tokens still count, its positions do not.
    `returning`: blocks given up while this step may read or write them; one holder fewer once it is committed.
    """

    __slots__ = ("moves", "plan", "preempted", "returning", "slots", "stops")

    def __init__(self, plan: StepPlan, slots: Sequence[Slot], stops: Sequence[int], moves: Sequence[Move]) -> None:
        self.plan = plan
        self.slots = slots
        self.stops = stops
        self.moves = moves
        self.preempted: set[int] = set()
        self.returning: list[int] = []

    def verify(self, result: StepResult) -> None:
        """Raises EngineError unless `result` has what the plan samples and scores, in its order."""
        plan = self.plan
        wanted = tuple(request_id for request_id, sample in zip(plan.request_ids, plan.samples, strict=True) if sample)
        if result.step != plan.step:
            raise EngineError(f"the executor answered step {result.step} when step {plan.step} was due")
        if result.request_ids != wanted or len(result.token_ids) != len(wanted):
            raise EngineError(
                f"step {plan.step} has {len(result.token_ids)} tokens, for requests {result.request_ids[:8]};"
                f" {len(wanted)} were due, for {wanted[:8]}"
            )
        if result.logprobs and len(result.logprobs) != len(wanted):
            raise EngineError(f"step {plan.step} has {len(result.logprobs)} logprobs for {len(wanted)} tokens")
        scored = tuple((p.request_id, p.start - 1, p.start - 1 + len(p.entries)) for p in result.prompt_logprobs)
        if scored != plan.scores:
            raise EngineError(
                f"step {plan.step} has prompt logprobs for (request, start, stop) {scored[:8]}; due were"
                f" {plan.scores[:8]}"
            )
