"""`Engine`: plan, apply, execute, commit, over and over. Synchronous; no threads, no input or output of its own."""

from __future__ import annotations

from dataclasses import dataclass

from legato.core.budget import StepBudget
from legato.core.plan import PromptLogprobs, StepPlan, TokenLogprobs
from legato.core.request import Finished, Request
from legato.core.schedule import plan_step
from legato.core.shape import StepShape
from legato.core.state import SchedulerState
from legato.core.trace import StepRecord, StepTrace
from legato.engine.pacer import Pacer
from legato.engine.ports import Archive, Clock, Executor, Fetch
from legato.errors import EngineError, RequestError

FETCH_WAIT_S = 0.01


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step brought: columns of new tokens, one entry a request that got one, and the requests that ended.

    `logprobs` is empty or as long as `token_ids`. A request's last token comes together with its `Finished`. `record`:
    the step's shape and duration; None if nothing was computed, and only aborted requests are reported. `cached`:
    (request, prompt tokens found in the prefix cache) of those that were admitted and found any. `prompt_logprobs`: the
    next ones of each request whose prompt is scored; all have come when its first token comes.
    """

    request_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    finished: tuple[Finished, ...]
    record: StepRecord | None
    cached: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Engine:
    """Drives one executor with one scheduler state. Every accepted request ends in exactly one `Finished`.

    Not for use from two threads. `submit` and `abort` come between steps, and take effect with the next one. With an
    `archive`, what it has of a prompt is fetched before the request joins the queue; all others go on meanwhile. With a
    `pacer`, steps end when running streams are due; without, their tokens alone bound them.
    """

    def __init__(
        self,
        state: SchedulerState,
        executor: Executor,
        budget: StepBudget,
        clock: Clock,
        archive: Archive | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.state = state
        self.budget = budget
        self.trace = StepTrace()
        self._executor = executor
        self._clock = clock
        self._aborted: list[Finished] = []
        self.pacer = pacer
        self._archive = archive
        self._fetching: dict[int, tuple[Request, Fetch]] = {}
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

    def step(self) -> StepEvents:
        """Computes one step and says what it brought; without work, an empty one at no cost.

        A step that fails ends the requests that were in it, with reason "error"; the others go on.
        """
        aborted, self._aborted = tuple(self._aborted), []
        state = self.state
        if self._fetching:
            self._take_in_fetched(wait=not (state.has_work or aborted))
        if not state.has_work:
            return StepEvents((), (), (), aborted, None)
        started_s = self._clock()
        pacer = self.pacer
        budget = self.budget if pacer is None else pacer.budget(self.budget, started_s)
        plan = plan_step(state, budget, state.policy)
        assert plan.request_ids, "there is work, and the plan is empty"
        state.apply(plan)
        cached = tuple((i, found) for i in plan.admit if (found := state.cached_prompt_tokens(i)))
        shape = None if pacer is None else StepShape.of(plan, pacer.tracker.cost.attention, state.request)
        waited_since = [] if pacer is None else state.waited_since(plan)
        planned_s = self._clock()
        finished = self._carry_out(plan)
        emitted = state.emitted
        if self._archive is not None:
            self._archive_fresh(self._archive)
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
        if pacer is not None and shape is not None and not any(end.reason == "error" for end in finished):
            pacer.count_late(waited_since, shape, plan.decodes, record.step_s, started_s + record.step_s)
            pacer.observe(shape, record.step_s)
        return StepEvents(
            emitted.request_ids,
            emitted.token_ids,
            emitted.logprobs,
            aborted + finished,
            record,
            cached,
            emitted.prompt_logprobs,
        )

    def close(self) -> None:
        """Ends what works in the background: an archive writes what it has queued."""
        if self._archive is not None:
            self._archive.close()

    def _carry_out(self, plan: StepPlan) -> tuple[Finished, ...]:
        try:
            result = self._executor.execute(plan)
        except Exception as error:  # whatever a backend raises: its requests end, the engine does not
            return self.state.abort_steps(f"step {plan.step} failed: {type(error).__name__}: {error}")
        try:
            return self.state.commit(result, self._clock())
        except EngineError as error:
            return self.state.abort_steps(str(error))

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
