"""Runs the core alone, step by step, with the fake executor: what an engine does, with every invariant checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.fakes import VOCAB, FakeExecutor, expected_output, expected_scores

from legato.core.budget import StepBudget
from legato.core.plan import StepPlan, StepResult, TokenLogprobs
from legato.core.policy import FCFS, Policy
from legato.core.request import Finished, Request, StopRule
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState
from legato.core.tenants import Tenants


def prompt_of(tokens: int, salt: int = 1) -> tuple[int, ...]:
    """A prompt that is unlike its own shifts, and ends in a token that matters."""
    return tuple((salt * 31 + position * position * 7 + position) % VOCAB for position in range(tokens))


def request_of(
    request_id: int, prompt_tokens: int, max_tokens: int, salt: int | None = None, **stop: object
) -> Request:
    """A request with its own prompt, or with that of `salt`."""
    prompt = prompt_of(prompt_tokens, request_id + 1 if salt is None else salt)
    return Request(request_id, prompt, stop=StopRule(max_tokens, **stop))  # type: ignore[arg-type]


class Driver:
    """One state, one fake executor, and what came out: `outputs` by request, `finished` by request, `plans`."""

    def __init__(
        self,
        *,
        blocks: int,
        block_tokens: int = 4,
        max_tokens: int = 16,
        max_seqs: int | None = None,
        max_model_len: int = 1_000_000,
        policy: Policy = FCFS,
        cache: bool = True,
        host_blocks: int = 0,
        logit_rows: int = 64,
        tenants: Tenants | None = None,
    ) -> None:
        root = b"" if cache else None
        self.state = SchedulerState(
            blocks,
            block_tokens,
            max_model_len,
            cache_root=root,
            host_blocks=host_blocks,
            policy=policy,
            tenants=tenants,
        )
        self.executor = FakeExecutor(block_tokens)
        self.executor.bind(self.state)
        self.budget = StepBudget(max_tokens, max_tokens if max_seqs is None else max_seqs, logit_rows)
        self.policy = policy
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.finished: dict[int, Finished] = {}
        self.plans: list[StepPlan] = []

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.state.submit(request)
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
            self.scores[request.request_id] = []

    def step(self) -> StepPlan:
        plan = self.begin()
        self.end(plan)
        return plan

    def begin(self) -> StepPlan:
        plan = plan_step(self.state, self.budget, self.policy)
        check_plan(self.state, self.budget, plan)
        self.state.apply(plan)
        self.state.check()
        self.plans.append(plan)
        return plan

    def end(self, plan: StepPlan) -> None:
        self.commit(self.executor.execute(plan))

    def commit(self, result: StepResult) -> None:
        self.note(self.state.commit(result))
        emitted = self.state.emitted
        take_scores(self.requests, self.scores, self.outputs, emitted)
        for request_id, token in zip(emitted.request_ids, emitted.token_ids, strict=True):
            self.outputs[request_id].append(token)
        self.state.check()

    def abort(self, request_id: int) -> None:
        finished = self.state.abort(request_id)
        self.note(() if finished is None else (finished,))
        self.state.check()

    def note(self, finished: Iterable[Finished]) -> None:
        for end in finished:
            assert end.request_id not in self.finished, f"request {end.request_id} ended twice"
            self.finished[end.request_id] = end

    def run(self, limit_steps: int = 100_000, each: Callable[[int], None] | None = None) -> Driver:
        """Steps until nothing is left; `each` is called with the number of steps done before every one of them."""
        for number in range(limit_steps):
            if not self.state.has_work:
                break
            if each is not None:
                each(number)
            if self.state.has_work:
                self.step()
        assert not self.state.has_work, f"still at work after {limit_steps} steps"
        assert self.state.free_blocks == self.state.total_blocks, "a block was lost"
        assert self.state.returning_blocks == 0
        self.check_outputs()
        return self

    def run_ahead(self, limit_steps: int = 1000, each: Callable[[int], None] | None = None) -> Driver:
        """As `run`, but step n + 1 is planned and applied while step n computes; `each` is called in between."""
        plan: StepPlan | None = None
        for number in range(limit_steps):
            if not self.state.has_work:
                break
            if plan is None:
                plan = self.begin()
            result = self.executor.execute(plan)
            if each is not None:
                each(number)
            ahead = plan_step(self.state, self.budget, self.policy)
            plan = self.begin() if ahead.request_ids or ahead.preempt else None
            self.commit(result)
        return self.run(limit_steps=0)

    def check_outputs(self) -> None:
        """Every request's tokens are those it would get alone: complete if it ended, else a beginning of them."""
        for request_id, output in self.outputs.items():
            assert output == expected_output(self.requests[request_id].prompt, len(output)), f"request {request_id}"
            end = self.finished.get(request_id)
            assert end is None or end.generated_tokens == len(output), f"request {request_id}"
            check_scores(self.requests[request_id], self.scores[request_id], complete=bool(output))

    def reasons(self) -> dict[int, str]:
        return {request_id: end.reason for request_id, end in self.finished.items()}


def take_scores(
    requests: dict[int, Request],
    scores: dict[int, list[TokenLogprobs]],
    outputs: dict[int, list[int]],
    emitted: StepResult,
) -> None:
    """Adds what a step says of prompts, which must follow what there is, and come before the first token."""
    for scored in emitted.prompt_logprobs:
        first = requests[scored.request_id].scored_rows[0] + 1
        assert scored.start == first + len(scores[scored.request_id]), "an entry is lost or comes twice"
        assert not outputs[scored.request_id], "an entry after the first token"
        scores[scored.request_id].extend(scored.entries)


def check_scores(request: Request, scores: list[TokenLogprobs], *, complete: bool) -> None:
    """The entries of the prompt that were asked for, all of them or a beginning."""
    wanted = expected_scores(request)
    assert scores == wanted[: len(scores)], f"request {request.request_id}"
    assert not complete or len(scores) == len(wanted), f"request {request.request_id}"


def check_plan(state: SchedulerState, budget: StepBudget, plan: StepPlan) -> None:
    """What must hold of any plan for `state`, whatever the policy."""
    known = {slot.request_id: slot for slot in [*state.running, *state.waiting]}
    ready = [slot for slot in state.running if slot.known - slot.scheduled == 1]
    assert plan.rows <= budget.max_tokens
    assert sum(stop - start for _, start, stop in plan.scores) <= budget.prompt_logit_rows
    chunks = list(zip(plan.counts[plan.decodes :], plan.samples[plan.decodes :], strict=True))
    assert budget.chunk_tokens is None or all(count <= budget.chunk_tokens for count, _ in chunks)
    assert budget.partial_prefills is None or sum(not last for _, last in chunks) <= budget.partial_prefills
    assert len(set(plan.request_ids)) == len(plan.request_ids)
    assert not set(plan.preempt) & set(plan.request_ids)
    assert set(plan.admit) <= set(plan.request_ids)
    assert len(state.running) - len(plan.preempt) + len(plan.admit) <= max(budget.max_seqs, len(state.running))
    if not state.in_flight:
        left_out = {slot.request_id for slot in ready} - set(plan.request_ids) - set(plan.preempt)
        assert not left_out, f"decodes {left_out} wait, and nothing is in flight"
        assert plan.request_ids or not state.has_work, "there is work, and nothing advances"
    assert all(count == 1 and sample for count, sample in pairs(plan, plan.decodes)), "a decode is not one row"
    for request_id, start, count, sample in zip(plan.request_ids, plan.starts, plan.counts, plan.samples, strict=True):
        slot = known[request_id]
        assert 0 < count <= slot.known - start
        if request_id in plan.admit:
            assert start % state.block_tokens == 0, "only whole blocks are cached"
        else:
            assert start == slot.scheduled
        assert sample == (start + count == slot.known)


def pairs(plan: StepPlan, entries: int) -> Sequence[tuple[int, bool]]:
    return list(zip(plan.counts[:entries], plan.samples[:entries], strict=True))
