"""`Engine`: plan, apply, execute, commit, over and over. Synchronous; no threads, no input or output."""

from __future__ import annotations

from dataclasses import dataclass

from legato.core.budget import StepBudget
from legato.core.plan import StepPlan, TokenLogprobs
from legato.core.policy import Policy
from legato.core.request import Finished, Request
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState
from legato.core.trace import StepRecord, StepTrace
from legato.engine.ports import Clock, Executor
from legato.errors import EngineError


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step brought: columns of new tokens, one entry a request that got one, and the requests that ended.

    `logprobs` is empty or as long as `token_ids`. A request's last token comes together with its `Finished`. `record`:
    the step's shape and duration; None if nothing was computed, and only aborted requests are reported.
    """

    request_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    finished: tuple[Finished, ...]
    record: StepRecord | None


class Engine:
    """Drives one executor with one scheduler state. Every accepted request ends in exactly one `Finished`.

    Not for use from two threads. `submit` and `abort` come between steps, and take effect with the next one.
    """

    def __init__(
        self, state: SchedulerState, executor: Executor, policy: Policy, budget: StepBudget, clock: Clock
    ) -> None:
        self.state = state
        self.policy = policy
        self.budget = budget
        self.trace = StepTrace()
        self._executor = executor
        self._clock = clock
        self._aborted: list[Finished] = []
        executor.bind(state)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return bool(self._aborted) or self.state.has_work

    def submit(self, request: Request) -> None:
        """Queues `request`. Raises RequestError (PromptTooLong with both numbers) for one that can never be served."""
        self.state.submit(request)

    def abort(self, request_id: int) -> None:
        """Ends a request; its `Finished` comes with the next step. One that is unknown or has ended is ignored.

        That is no error: a client may leave in the moment in which its answer is complete.
        """
        finished = self.state.abort(request_id)
        if finished is not None:
            self._aborted.append(finished)

    def step(self) -> StepEvents:
        """Computes one step and says what it brought; without work, an empty one at no cost.

        A step that fails ends the requests that were in it, with reason "error"; the others go on.
        """
        aborted, self._aborted = tuple(self._aborted), []
        state = self.state
        if not state.has_work:
            return StepEvents((), (), (), aborted, None)
        started_s = self._clock()
        plan = plan_step(state, self.budget, self.policy)
        assert plan.request_ids, "there is work, and the plan is empty"
        state.apply(plan)
        planned_s = self._clock()
        finished = self._carry_out(plan)
        emitted = state.emitted
        record = StepRecord(
            plan,
            started_s,
            planned_s - started_s,
            self._clock() - started_s,
            len(state.running),
            len(state.waiting),
            state.free_blocks,
        )
        self.trace.append(record)
        return StepEvents(emitted.request_ids, emitted.token_ids, emitted.logprobs, aborted + finished, record)

    def _carry_out(self, plan: StepPlan) -> tuple[Finished, ...]:
        try:
            result = self._executor.execute(plan)
        except Exception as error:  # whatever a backend raises: its requests end, the engine does not
            return self.state.abort_steps(f"step {plan.step} failed: {type(error).__name__}: {error}")
        try:
            return self.state.commit(result)
        except EngineError as error:
            return self.state.abort_steps(str(error))
