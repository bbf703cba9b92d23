"""Any order of submit, plan, apply, commit, abort, preemption and failure, with one or two steps in flight.

Prompts have beginnings in common, so that blocks are shared, evicted, copied to host memory and back. Every invariant
is checked each time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.drive import check_plan, check_scores, prompt_of, take_scores
from tests.core.timed import MACHINE
from tests.fakes import FakeExecutor, expected_output

from legato.core.budget import StepBudget, StepTime
from legato.core.plan import StepPlan, StepResult, TokenLogprobs
from legato.core.policy import FAIR, FCFS, SLO, Policy
from legato.core.request import Finished, Request, Sampling, StopRule
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState


class Scheduling(RuleBasedStateMachine):
    """The state against a model: what every request would generate alone, and how far it got."""

    @initialize(
        blocks=st.integers(3, 10),
        block_tokens=st.integers(1, 5),
        max_tokens=st.integers(1, 12),
        max_seqs=st.integers(1, 4),
        depth=st.integers(1, 2),
        max_model_len=st.integers(8, 60),
        spare_blocks=st.integers(0, 1),
        host_blocks=st.sampled_from([0, 0, 2, 6]),
        cache=st.integers(0, 7),
        overtakes=st.integers(0, 2),
        logit_rows=st.integers(1, 9),
        chunk_tokens=st.sampled_from([None, None, 1, 4]),
        partial_prefills=st.sampled_from([None, None, 1, 2]),
        time=st.sampled_from([None, StepTime(MACHINE, 1.0, 0.006), StepTime(MACHINE, 1.0, 0.004, token_s=0.1)]),
        base=st.sampled_from([FCFS, SLO, FAIR]),
    )
    def start(
        self,
        blocks: int,
        block_tokens: int,
        max_tokens: int,
        max_seqs: int,
        depth: int,
        max_model_len: int,
        spare_blocks: int,
        host_blocks: int,
        cache: int,
        overtakes: int,
        logit_rows: int,
        chunk_tokens: int | None,
        partial_prefills: int | None,
        time: StepTime | None,
        base: Policy,
    ) -> None:
        self.policy = replace(base, spare_blocks=lambda inside: inside * spare_blocks, overtakes=overtakes)
        root = b"model" if cache else None
        self.state = SchedulerState(
            blocks, block_tokens, max_model_len, cache_root=root, host_blocks=host_blocks, policy=base
        )
        self.budget = StepBudget(
            max_tokens,
            min(max_seqs, max_tokens),
            logit_rows,
            time,
            chunk_tokens=chunk_tokens,
            partial_prefills=partial_prefills,
        )
        self.executor = FakeExecutor(block_tokens)
        self.executor.bind(self.state)
        self.depth = depth
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.ends: dict[int, Finished] = {}
        self.planned: list[StepPlan] = []
        self.executed: StepResult | None = None
        self.cursors: dict[int, tuple[int, int, int]] = {}

    @rule(
        share=st.floats(0, 1),
        own=st.sampled_from([0, 0, 0, 1, 3, 99]),
        max_tokens=st.integers(1, 20),
        stop=st.integers(0, 96),
        min_tokens=st.integers(0, 5),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        tenant=st.sampled_from([b"", b"", b"", b"other"]),
        image=st.sampled_from([(), (), (), ((1, b"cat"),), ((1, b"dog"),)]),
        score_from=st.sampled_from([None, None, 0, 0, 3, 9, 99]),
        arrival_s=st.sampled_from([0.0, 0.01, 5.0]),
        due_s=st.sampled_from([math.inf, math.inf, 0.0, 0.02, 3.0]),
    )
    def submit(
        self,
        share: float,
        own: int,
        max_tokens: int,
        stop: int,
        min_tokens: int,
        priority: int,
        tenant: bytes,
        image: tuple[tuple[int, bytes], ...],
        score_from: int | None,
        arrival_s: float,
        due_s: float,
    ) -> None:
        """`own`: tokens at the end of the prompt that no other request has. `score_from`: its logprobs are wanted."""
        request_id = len(self.requests)
        length = 1 + int(share * (self.state.context - 2))
        own = min(own, length)
        prompt = prompt_of(length - own, 1) + prompt_of(own, request_id)
        rule_ = StopRule(max_tokens, frozenset(range(stop, 97, 7)), min_tokens)
        scored = Sampling(prompt_logprobs=None if score_from is None else 1, prompt_logprobs_start=score_from or 0)
        self.requests[request_id] = Request(
            request_id,
            prompt,
            scored,
            rule_,
            arrival_s,
            priority,
            cache_salt=tenant,
            attachments=image,
            due_s=due_s,
            tenant=tenant.decode(),
        )
        self.outputs[request_id] = []
        self.scores[request_id] = []
        self.state.submit(self.requests[request_id])

    @precondition(lambda self: self.state.in_flight < self.depth)
    @rule()
    def plan_and_apply(self) -> None:
        plan = plan_step(self.state, self.budget, self.policy)
        check_plan(self.state, self.budget, plan)
        if plan.request_ids or plan.preempt:
            self.apply(plan)

    @precondition(lambda self: self.state.in_flight < self.depth and self.state.running)
    @rule(which=st.integers(0, 10_000))
    def preempt(self, which: int) -> None:
        """Anybody, for no reason."""
        victim = self.state.running[which % len(self.state.running)].request_id
        self.apply(StepPlan(self.state.next_step, (), (), (), (), preempt=(victim,)))

    def apply(self, plan: StepPlan) -> None:
        for request_id in plan.preempt:
            self.cursors.pop(request_id)
        self.state.apply(plan)
        self.planned.append(plan)
        self.execute_next()

    def execute_next(self) -> None:
        """Steps are executed one at a time, when the one before is committed."""
        if self.executed is None and self.planned:
            self.executed = self.executor.execute(self.planned.pop(0))

    @precondition(lambda self: self.state.in_flight)
    @rule()
    def commit(self) -> None:
        assert self.executed is not None
        finished = self.state.commit(self.executed)
        emitted = self.state.emitted
        assert all(scored.request_id not in self.ends for scored in emitted.prompt_logprobs), "scores after the end"
        take_scores(self.requests, self.scores, self.outputs, emitted)
        for request_id, token in zip(emitted.request_ids, emitted.token_ids, strict=True):
            assert request_id not in self.ends, "a token after the end"
            self.outputs[request_id].append(token)
        self.note(finished)
        self.executed = None
        self.execute_next()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 10_000))
    def abort(self, which: int) -> None:
        finished = self.state.abort(which % len(self.requests))
        self.note(() if finished is None else (finished,))

    @precondition(lambda self: self.state.in_flight)
    @rule(dice=st.integers(0, 9))
    def fail(self, dice: int) -> None:
        if dice:
            return
        self.note(self.state.abort_steps("dropped"))
        for plan in self.planned:
            self.executor.give_up(plan)
        self.planned.clear()
        self.executed = None

    def note(self, finished: tuple[Finished, ...]) -> None:
        for end in finished:
            assert end.request_id not in self.ends, "a second end"
            self.ends[end.request_id] = end

    @invariant()
    def every_invariant_holds(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.check()
        for slot in [*self.state.running, *self.state.waiting]:
            now = (slot.computed, slot.scheduled, slot.known)
            before = self.cursors.get(slot.request_id, (0, 0, 0))
            assert all(b <= n for b, n in zip(before, now, strict=True)), "a cursor went back without a preemption"
            self.cursors[slot.request_id] = now
            assert list(slot.tokens) == [*self.requests[slot.request_id].prompt, *self.outputs[slot.request_id]]

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        for _ in range(5000):
            if not self.state.has_work:
                break
            if self.state.in_flight:
                self.commit()
            else:
                self.plan_and_apply()
            self.every_invariant_holds()
        assert not self.state.has_work, "livelock"
        assert self.state.free_blocks == self.state.total_blocks, "a block was lost"
        assert set(self.ends) == set(self.requests), "a request without an end"
        for request_id, request in self.requests.items():
            self.check_output(request, self.outputs[request_id], self.ends[request_id])

    def check_output(self, request: Request, output: list[int], end: Finished) -> None:
        """The tokens of a request alone, up to where its own rules end it, wherever preemptions and chunks fell."""
        assert end.generated_tokens == len(output)
        check_scores(request, self.scores[request.request_id], complete=end.reason in ("stop", "length"))
        most = min(request.stop.max_tokens, self.state.context - len(request.prompt))
        alone = expected_output(request.prompt, most)
        stops = [
            n for n, token in enumerate(alone, 1) if token in request.stop.token_ids and n >= request.stop.min_tokens
        ]
        assert output == alone[: len(output)]
        if end.reason == "stop":
            assert len(output) == stops[0]
        elif end.reason == "length":
            assert len(output) == most and not stops
        else:
            assert len(output) < min([most, *stops])


class MoreScheduling(Scheduling):
    """The same machine, for the long run."""


def steps(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )


TestTenThousandSteps = Scheduling.TestCase
TestTenThousandSteps.settings = steps(200)
TestHundredThousandSteps = pytest.mark.slow(MoreScheduling.TestCase)
TestHundredThousandSteps.settings = steps(2000)
