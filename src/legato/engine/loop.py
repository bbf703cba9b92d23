"""`Engine`: plan, apply, execute, commit, over and over. No input or output of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from legato.core.budget import StepBudget
from legato.core.pace import Pace
from legato.core.pacer import Pacer, lead_seconds
from legato.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from legato.core.request import Finished, Request
from legato.core.schedule import plan_step
from legato.core.shape import StepShape
from legato.core.state import SchedulerState
from legato.core.trace import StepRecord, StepTrace, TracedStep, allowed_seconds
from legato.engine.lane import Background, Inline
from legato.engine.ports import AheadExecutor, Archive, Clock, Executor, Fetch
from legato.errors import EngineError, RequestError

FETCH_WAIT_S = 0.01

Listen = Callable[[float, Background], None]


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step brought: columns of new tokens, one entry a request that got one, and the requests that ended.

    `logprobs` is empty or as long as `token_ids`. A request's last token comes together with its `Finished`. `record`:
    the step's shape and duration; None if nothing was computed, and only aborted requests are reported. `cached`:
    (request, prompt tokens found in the prefix cache) of those that were admitted and found any. `prompt_logprobs`: the
    next ones of each request whose prompt is scored; all have come when its first token comes. `traced`: if the engine
    `traces`, the step with what was foreseen of it.
    """

    request_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    finished: tuple[Finished, ...]
    record: StepRecord | None
    cached: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    traced: TracedStep | None = None


@dataclass(slots=True)
class _Step:
    """A step that is applied. `begins_s`: when it did, or is expected to. `budget_s`: known if the engine traces."""

    plan: StepPlan
    shape: StepShape | None
    cached: tuple[tuple[int, int], ...]
    plan_s: float
    begins_s: float
    ahead: bool
    budget_s: float | None


class Engine:
    """Drives one executor with one scheduler state. Every accepted request ends in exactly one `Finished`.

    Not for use from two threads. `submit` and `abort` come between steps, or while `step` listens, and take effect with
    the next one. With an `archive`, what it has of a prompt is fetched before the request joins the queue; all others
    go on meanwhile. With a `pacer`, steps end when running streams are due; without, their tokens alone bound them.
    With `ahead`, a thread computes, and each step is planned while the one before it is computed: shortly before its
    end, so that whoever comes meanwhile is in the next one all the same.
    """

    def __init__(
        self,
        state: SchedulerState,
        executor: Executor,
        budget: StepBudget,
        clock: Clock,
        archive: Archive | None = None,
        pacer: Pacer | None = None,
        ahead: AheadExecutor | None = None,
    ) -> None:
        """`ahead`: the same executor, if steps are to be planned ahead."""
        self.state = state
        self.budget = budget
        self.trace = StepTrace()
        self.traces = False
        """Whether `StepEvents.traced` is wanted."""
        self._executor = executor
        self._clock = clock
        self._aborted: list[Finished] = []
        self.pacer = pacer
        self.pace = Pace() if pacer is None else pacer.pace
        self._archive = archive
        self._fetching: dict[int, tuple[Request, Fetch]] = {}
        self._background = None if ahead is None else Background()
        self._lane: Inline | Background = self._background or Inline()
        self._begin = functools.partial(_begin_inline, executor) if ahead is None else ahead.begin
        self._current: _Step | None = None  # in the lane
        self._next: _Step | None = None  # applied, and begins when that one is committed
        self._last = (0.0, 1)  # seconds and rows of the last step
        if archive is not None:
            state.memory.fresh = []
        executor.bind(state)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return bool(self._aborted or self._fetching) or self.state.has_work

    def submit(self, request: Request) -> None:
        """Queues `request`. Raises RequestError (PromptTooLong with both numbers) for one that can never be served."""
        archive = self._archive
        if archive is not None:
            self.state.verify(request)
            if request.request_id in self._fetching:
                raise RequestError(f"request id {request.request_id} is in use; ids may come back once finished")
            missing = self.state.missing_keys(request)
            if missing and missing[0] in archive:
                self._fetching[request.request_id] = (request, archive.fetch(missing))
                return
        self.state.submit(request)

    def abort(self, request_id: int) -> None:
        """Ends a request; its `Finished` comes with the next step. One that is unknown or has ended is ignored.

        That is no error: a client may leave in the moment in which its answer is complete.
        """
        if request_id in self._fetching:
            request, _ = self._fetching.pop(request_id)
            finished: Finished | None = Finished(request_id, "abort", len(request.prompt), 0)
        else:
            finished = self.state.abort(request_id)
        if finished is not None:
            self._aborted.append(finished)

    def step(self, listen: Listen | None = None) -> StepEvents:
        """Computes one step and says what it brought; without work, an empty one at no cost.

        A step that fails ends the requests that were in it, with reason "error"; the others go on. `listen`: takes in
        requests for at most so many seconds, while the step computes, or until it is done; called when planning ahead.
        """
        aborted, self._aborted = tuple(self._aborted), []
        state = self.state
        if self._current is None:
            if self._fetching:
                self._take_in_fetched(wait=not (state.has_work or aborted))
            if not state.has_work:
                return StepEvents((), (), (), aborted, None)
            step = self._plan(self._clock())
            assert step is not None, "there is work, and the plan is empty"
            self._start(step)
        current = self._current
        assert current is not None
        if self._background is not None and self._next is None:
            self._plan_ahead(self._background, current, listen)
        waited_since = [] if self.pacer is None else state.waited_since(current.plan)
        finished = self._end(current.plan)
        self._current = None
        ended_s = self._clock()
        ahead, self._next = self._next, None
        if ahead is not None and state.in_flight:
            ahead.begins_s = ended_s
            self._start(ahead)
        emitted = state.emitted
        if self._archive is not None:
            self._archive_fresh(self._archive)
        record = self._record(current, ended_s)
        traced = self._traced(current, record, emitted.request_ids) if self.traces else None
        self._learn(current, record, waited_since, failed=any(end.reason == "error" for end in finished))
        return StepEvents(
            emitted.request_ids,
            emitted.token_ids,
            emitted.logprobs,
            aborted + finished,
            record,
            current.cached,
            emitted.prompt_logprobs,
            traced,
        )

    def close(self) -> None:
        """Ends what works in the background, after the step that computes: an archive writes what it has queued."""
        self._lane.close()
        if self._archive is not None:
            self._archive.close()

    def _plan(self, begins_s: float, *, ahead: bool = False) -> _Step | None:
        """Plans and applies a step that begins then; None if there is nothing that it could compute.

        Or, ahead of a commit that may free blocks, if somebody would be preempted for want of one, or wait.
        """
        state, pacer, started_s = self.state, self.pacer, self._clock()
        budget = self.budget if pacer is None else pacer.budget(self.budget, begins_s)
        plan = plan_step(state, budget, state.policy)
        if not plan.request_ids:
            return None
        if ahead and (plan.preempt or plan.decodes < sum(r.known - r.scheduled == 1 for r in state.running)):
            return None
        budget_s = allowed_seconds(state.running, plan, budget) if self.traces else None
        state.apply(plan)
        cached = tuple((i, found) for i in plan.admit if (found := state.cached_prompt_tokens(i)))
        shape = (
            None
            if pacer is None
            else StepShape.of(
                plan, pacer.tracker.cost.attention, state.request, copied_blocks=len(state.moves(plan.step))
            )
        )
        return _Step(plan, shape, cached, self._clock() - started_s, begins_s, ahead, budget_s)

    def _start(self, step: _Step) -> None:
        self._current = step
        self._lane.start(self._begin(step.plan))

    def _plan_ahead(self, background: Background, current: _Step, listen: Listen | None) -> None:
        """Waits until `current` will soon be done, then plans the step after it; if it is done before that, does not.

        What an archive has fetched joins the queue only when nothing is in flight.
        """
        expected_s = self._expected_s(current)
        lead_s = lead_seconds(expected_s)
        while (left_s := current.begins_s + expected_s - lead_s - self._clock()) > 0.0:
            if background.wait(0.0):
                return
            if listen is None:
                background.wait(left_s)
            else:
                listen(left_s, background)
        if not background.wait(0.0) and not any(fetch.done for _, fetch in self._fetching.values()):
            self._next = self._plan(max(current.begins_s + expected_s, self._clock()), ahead=True)

    def _expected_s(self, step: _Step) -> float:
        if self.pacer is not None and step.shape is not None:
            return self.pacer.predict(step.shape)
        seconds, rows = self._last
        return seconds * step.plan.rows / rows

    def _end(self, plan: StepPlan) -> tuple[Finished, ...]:
        try:
            result = self._lane.result()
        except Exception as error:  # whatever a backend raises: its requests end, the engine does not
            return self.state.abort_steps(f"step {plan.step} failed: {type(error).__name__}: {error}")
        try:
            return self.state.commit(result, self._clock())
        except EngineError as error:
            return self.state.abort_steps(str(error))

    def _record(self, step: _Step, ended_s: float) -> StepRecord:
        """Keeps what the step took."""
        state, plan, step_s = self.state, step.plan, ended_s - step.begins_s
        counts = len(state.running), len(state.waiting), state.free_blocks
        record = StepRecord(plan, step.begins_s, step.plan_s, step_s, *counts)
        self.trace.append(record)
        return record

    def _traced(self, step: _Step, record: StepRecord, emitted: tuple[int, ...]) -> TracedStep:
        """The step with what is foreseen of it as long as nothing was learned from it."""
        if self.pacer is None or step.shape is None:
            return TracedStep(record, emitted, step.ahead)
        tracker, predicted_s = self.pacer.tracker, self.pacer.predict(step.shape)
        speeds = tracker.cost.scale, tracker.cost.memory_scale, tracker.margin
        return TracedStep(record, emitted, step.ahead, step.shape, predicted_s, step.budget_s, *speeds)

    def _learn(self, step: _Step, record: StepRecord, waited_since: list[tuple[float, bool]], *, failed: bool) -> None:
        decodes, step_s = step.plan.decodes, record.step_s
        self._last = (step_s, max(step.plan.rows, 1))
        if self.pacer is None:
            self.pace.observe(record.prefill_rows, decodes, step_s)
        elif step.shape is not None and not failed:
            self.pacer.count_late(waited_since, step.shape, decodes, step_s, record.started_s + step_s)
            self.pacer.observe(step.shape, step_s, decodes)

    def _take_in_fetched(self, *, wait: bool) -> None:
        """Queues the requests whose fetch is done, with what it brought in host memory."""
        assert self._archive is not None
        if wait:
            next(iter(self._fetching.values()))[1].wait(FETCH_WAIT_S)
        for request_id, (request, fetch) in list(self._fetching.items()):
            if not fetch.done:
                continue
            del self._fetching[request_id]
            # The last block first: host memory gives up what came first, and a chain is of use only from its head.
            for key, content in reversed(fetch.blocks):
                slot = None if key in self.state.memory.pool else self.state.memory.host.put(key)
                if slot is not None:
                    self._archive.load(slot, content)
            self.state.submit(request)

    def _archive_fresh(self, archive: Archive) -> None:
        fresh = self.state.memory.fresh
        assert fresh is not None
        for key, block in fresh:
            if key not in archive:
                archive.save(key, block)
        fresh.clear()


def _begin_inline(executor: Executor, plan: StepPlan) -> Callable[[], StepResult]:
    return functools.partial(executor.execute, plan)
