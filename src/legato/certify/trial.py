"""One trial: a schedule carried out step by step, every bit compared with what each request gives alone."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from legato.certify.alone import Alone, AloneCache
from legato.certify.documents import document_tokens
from legato.certify.rig import Rig, RigShape
from legato.certify.schedule import Schedule
from legato.certify.totals import Totals
from legato.core.budget import StepBudget
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import POLICIES
from legato.core.request import Finished
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState
from legato.errors import ConfigError
from legato.exec.ops import FloatArray

FailureKind = Literal["difference", "ending", "error"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trial failed. `kind`: bits or tokens differ; a request or a block has no proper end; something was raised.

    `what` tells failures of one kind apart, `message` tells everything.
    """

    kind: FailureKind
    what: str
    message: str

    def is_like(self, other: Failure | None) -> bool:
        """Whether the other is the same failure, as far as one can tell."""
        return other is not None and (self.kind, self.what) == (other.kind, other.what)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one trial exercised and, if it failed, why."""

    totals: Totals
    failure: Failure | None


def run_trial(schedule: Schedule, rig: Rig, cache: AloneCache) -> Outcome:
    """Carries out `schedule`, from cold. Whatever the code under test raises is a failure, not an error.

    Raises ConfigError for a schedule that the rig cannot hold.
    """
    require_fit(schedule, rig.shape)
    totals = Totals(trials=1, requests=len(schedule.arrivals))
    totals.threaded_trials = int(schedule.threads > 1)
    totals.ahead_trials = int(schedule.ahead)
    setattr(totals, f"{schedule.kv_dtype}_trials", 1)
    try:
        trial = _Trial(schedule, rig, cache, totals)
        trial.run()
        return Outcome(totals, trial.failure())
    except _WrongEnd as error:
        return Outcome(totals, Failure("ending", error.what, str(error)))
    except Exception as error:  # an assertion, or whatever a backend raises
        return Outcome(totals, _failure_of(error))


def require_fit(schedule: Schedule, shape: RigShape) -> None:
    """Raises ConfigError, with both numbers, unless the rig can hold the schedule and the pool its largest request."""
    longest_prompt = max(schedule.prompt_tokens(i) for i in range(len(schedule.arrivals)))
    for what, value, most in (
        ("tokens of a step", schedule.step_tokens, shape.max_rows),
        ("tokens of the longest prompt", longest_prompt, shape.max_rows),
        ("tokens of the longest request", schedule.longest_tokens, shape.max_model_len),
        ("tokens of the longest request", schedule.longest_tokens, schedule.pool_blocks * shape.block_tokens),
        ("requests at once", schedule.max_seqs, shape.max_seqs),
        ("KV blocks", schedule.pool_blocks, shape.pool_blocks),
        ("threads", schedule.threads, shape.threads),
    ):
        if value > most:
            raise ConfigError(f"the schedule has {value} {what} and there is room for {most}; give larger limits")
    if schedule.kv_dtype not in shape.kv_dtypes:
        raise ConfigError(f"the schedule needs --kv-dtype {schedule.kv_dtype}")


class _WrongEnd(Exception):
    """A request or a block did not end as it should."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class _Trial:
    """One schedule under way."""

    def __init__(self, schedule: Schedule, rig: Rig, cache: AloneCache, totals: Totals) -> None:
        self.schedule = schedule
        self.totals = totals
        self.prompts, self.alone = _answers(schedule, rig, cache)
        shape = rig.shape
        self.state = SchedulerState(
            schedule.pool_blocks,
            shape.block_tokens,
            shape.max_model_len,
            cache_root=b"certify" if schedule.cache else None,
            host_blocks=schedule.host_blocks,
            policy=POLICIES[schedule.policy],
        )
        self.executor = rig.executor(
            schedule.kv_dtype,
            blocks=schedule.pool_blocks,
            host_blocks=schedule.host_blocks,
            threads=schedule.threads,
        )
        self.executor.bind(self.state)
        self.executor.observe = self._compare_logits
        self.budget = StepBudget(schedule.step_tokens, schedule.max_seqs)
        self.depth = 2 if schedule.ahead else 1
        self.planned: list[StepPlan] = []  # applied, not executed
        self.executed: StepResult | None = None
        self.step = 0
        self.arrived_step: dict[int, int] = {}
        self.ended_step: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.ends: dict[int, Finished] = {}
        self.outputs: list[list[int]] = [[] for _ in schedule.arrivals]
        self.diverged: set[int] = set()
        self.first_difference = ""

    def run(self) -> None:
        """All of it. Raises AssertionError, or whatever is raised underneath."""
        limit_steps = self._limit_steps()
        while len(self.ends) < len(self.schedule.arrivals) or self.state.has_work:
            if self.step > limit_steps:
                raise _WrongEnd("stuck", f"still at work after {limit_steps} steps")
            self._come_and_go(self.step)
            self._preempt(self.step)
            self._advance()
            self.step += 1
        self._check_ends()
        self.totals.preemptions += self.state.preemptions
        self.totals.restored_blocks += self.state.memory.restored_blocks
        self.totals.evicted_blocks += self.state.memory.pool.evictions

    def failure(self) -> Failure | None:
        """What the comparison found."""
        if not self.first_difference:
            return None
        totals = self.totals
        differ = (
            f"{totals.mismatched_logit_bits:,} bits of logits differ, and {totals.mismatched_tokens:,} of the tokens"
        )
        return Failure("difference", "bits", f"{differ}; first {self.first_difference}")

    # ── steps of a trial ───────────────────────────────────────────────────────────────────────────────────────────

    def _come_and_go(self, step: int) -> None:
        for index, arrival in enumerate(self.schedule.arrivals):
            if index not in self.arrived_step:
                since = 0 if arrival.after is None else self.ended_step.get(arrival.after)
                if since is not None and step >= since + arrival.delay_steps:
                    self.state.submit(arrival.request(index, self.prompts[index]))
                    self.arrived_step[index] = step
            if arrival.abort_steps is not None and step == self.arrived_step.get(index, step) + arrival.abort_steps:
                self._abort(index)
        self.state.check()

    def _abort(self, index: int) -> None:
        finished = self.state.abort(index)
        if finished is not None:
            self.aborted.add(index)
            self._note((finished,))

    def _preempt(self, step: int) -> None:
        for at, which in self.schedule.preempt:
            running = self.state.running
            if at == step and running and self.state.in_flight < self.depth:
                victim = running[which % len(running)].request_id
                self.totals.forced_preemptions += 1
                self._apply(StepPlan(self.state.next_step, (), (), (), (), preempt=(victim,)))
                while self.state.in_flight >= self.depth:
                    self._commit()

    def _advance(self) -> None:
        if not self.state.has_work:
            return
        plan = plan_step(self.state, self.budget, self.state.policy)
        if plan.request_ids or plan.preempt:
            self._count(plan)
            self._apply(plan)
        elif not self.state.in_flight:
            raise _WrongEnd("stuck", "there is work, and the plan is empty")
        else:
            self._commit()
        while self.state.in_flight >= self.depth:
            self._commit()

    def _apply(self, plan: StepPlan) -> None:
        self.state.apply(plan)
        self.state.check()
        self.planned.append(plan)
        self._execute_next()

    def _execute_next(self) -> None:
        """Steps are executed one at a time, each when the one before is committed."""
        if self.executed is None and self.planned:
            self.executed = self.executor.execute(self.planned.pop(0))

    def _commit(self) -> None:
        assert self.executed is not None
        finished = self.state.commit(self.executed)
        self.executed = None
        self._compare_tokens()
        self._note(finished)
        self.state.check()
        self._execute_next()

    def _note(self, finished: tuple[Finished, ...]) -> None:
        for end in finished:
            if end.request_id in self.ends:
                raise _WrongEnd("twice", f"request {end.request_id} ended twice")
            self.ends[end.request_id] = end
            self.ended_step[end.request_id] = self.step

    def _count(self, plan: StepPlan) -> None:
        totals = self.totals
        totals.steps += 1
        totals.rows += plan.rows
        totals.largest_step_rows = max(totals.largest_step_rows, plan.rows)
        totals.steps_in_company += len(plan.request_ids) > 1
        admitted = set(plan.admit)
        for request_id, start, count in zip(plan.request_ids, plan.starts, plan.counts, strict=True):
            if request_id in admitted:
                totals.cached_tokens += start
            prompt_tokens = len(self.prompts[request_id])
            totals.chunks += start < prompt_tokens and count < prompt_tokens

    # ── comparison ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _compare_logits(self, plan: StepPlan, logits: FloatArray) -> None:
        sampled = (
            (request_id, start + count)
            for request_id, start, count, samples in zip(
                plan.request_ids, plan.starts, plan.counts, plan.samples, strict=True
            )
            if samples
        )
        for row, (request_id, position) in zip(logits.view(np.uint32), sampled, strict=True):
            if request_id in self.diverged:
                continue  # another text has other logits
            number = position - len(self.prompts[request_id])
            expected = self.alone[request_id].logits[number]
            self.totals.compared_logits += len(row)
            if np.array_equal(row, expected):
                continue
            bits = int(np.bitwise_count(row ^ expected).sum())
            self.totals.mismatched_logit_bits += bits
            apart = float(np.abs(row.view(np.float32) - expected.view(np.float32)).max())
            self._tell(f"the logits of token {number} of request {request_id}: {bits:,} bits, by {apart:.3g} at most")

    def _compare_tokens(self) -> None:
        emitted = self.state.emitted
        for request_id, token in zip(emitted.request_ids, emitted.token_ids, strict=True):
            output, expected = self.outputs[request_id], self.alone[request_id].token_ids
            number = len(output)
            output.append(token)
            self.totals.compared_tokens += 1
            if number >= self.schedule.arrivals[request_id].max_tokens:
                raise _WrongEnd("long", f"request {request_id} goes on after its {number} tokens")
            if token != expected[number]:
                self.diverged.add(request_id)
                self.totals.mismatched_tokens += 1
                self._tell(f"token {number} of request {request_id}: {token}, alone {expected[number]}")

    def _tell(self, difference: str) -> None:
        self.first_difference = self.first_difference or difference

    def _check_ends(self) -> None:
        for index, arrival in enumerate(self.schedule.arrivals):
            end, got = self.ends[index], len(self.outputs[index])
            self.totals.aborts += end.reason == "abort"
            wanted = "abort" if index in self.aborted else "length"
            if end.reason != wanted:
                raise _WrongEnd("reason", f"request {index} ended with '{end.reason}', not '{wanted}': {end.message}")
            if end.generated_tokens != got:
                raise _WrongEnd("count", f"request {index} ended with {end.generated_tokens} tokens, and gave {got}")
            if (got < arrival.max_tokens) != (end.reason == "abort"):
                raise _WrongEnd("tokens", f"request {index} ended with {got} of {arrival.max_tokens} tokens")
        state = self.state
        if state.free_blocks != state.total_blocks or state.returning_blocks:
            raise _WrongEnd("blocks", f"{state.total_blocks - state.free_blocks} blocks were lost")

    def _limit_steps(self) -> int:
        """Far more than any schedule needs: every row by itself, again after each preemption, one after the other."""
        schedule = self.schedule
        rows = sum(len(prompt) + a.max_tokens for prompt, a in zip(self.prompts, schedule.arrivals, strict=True))
        delays = sum(arrival.delay_steps for arrival in schedule.arrivals)
        return 100 + delays + 4 * rows * (1 + len(schedule.preempt))


def _answers(schedule: Schedule, rig: Rig, cache: AloneCache) -> tuple[list[tuple[int, ...]], list[Alone]]:
    """Prompt and answer alone of every arrival, in order: a conversation goes on from the answer."""
    shape = rig.shape
    prompts: list[tuple[int, ...]] = []
    answers: list[Alone] = []
    for arrival in schedule.arrivals:
        before: tuple[int, ...] = ()
        if arrival.follows is not None:
            said = schedule.arrivals[arrival.follows]
            before = prompts[arrival.follows] + answers[arrival.follows].token_ids[: said.max_tokens]
        prompt = before + document_tokens(
            arrival.document,
            arrival.length,
            vocab=shape.vocab,
            first_token=None if before else shape.first_token,
            head=arrival.head,
            tail=arrival.tail,
        )
        prompts.append(prompt)
        answers.append(cache.get(prompt, arrival.sampling, arrival.max_tokens, schedule.kv_dtype))
    return prompts, answers


def _failure_of(error: Exception) -> Failure:
    """Where it was raised is what tells errors apart."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    name = type(error).__name__
    callers = " < ".join(frame.name for frame in islice(reversed(frames), 4))
    return Failure("error", f"{name} at {place}", f"{name} at {place} ({callers}): {error}")
