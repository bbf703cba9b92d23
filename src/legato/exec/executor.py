"""Carries out a plan: rows → logits → tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from legato.core.host import Move
from legato.core.plan import PromptLogprobs, StepPlan, StepResult
from legato.core.view import RowSource
from legato.errors import EngineError
from legato.exec.batch import Batch, build_batch
from legato.exec.host_pool import HostPool
from legato.exec.ops import FloatArray
from legato.exec.profile import StepClock
from legato.exec.sampler import Sampler, row_logprobs


class Backend(Protocol):
    """A decoder with its weights and its KV pool."""

    def run(self, batch: Batch) -> FloatArray:
        """Logits `[len(batch.logit_rows), vocab]`, valid until the next call; keys and values are in the pool then."""


class ModelExecutor:
    """The `Executor` of a model: `bind` it to the scheduler's state once, then `execute` each plan after `apply`."""

    def __init__(
        self, backend: Backend, *, block_tokens: int, host: HostPool | None = None, clock: StepClock | None = None
    ) -> None:
        """`host`: where blocks go that the pool gives up, if the scheduler's state has `host_blocks`."""
        self._backend = backend
        self._block_tokens = block_tokens
        self._host = host
        self._sampler = Sampler()
        self._source: RowSource | None = None
        self.clock = clock
        self.observe: Callable[[StepPlan, FloatArray], None] | None = None
        """Sees each plan with the logits `[sampled rows, vocab]` of what it samples; they hold until the next step."""

    def bind(self, source: RowSource) -> None:
        """Names the state that `execute` reads requests, tokens and block tables from."""
        self._source = source

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes the planned rows, samples where `plan.samples` says so and scores the prompts of `plan.scores`.

        Raises EngineError, naming the requests, when logits are not finite: damaged weights, or an overflow.
        """
        return self.begin(plan)()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """The same in two parts: reads block tables and tokens; what is returned computes, in any thread."""
        source, clock = self._source, self.clock
        assert source is not None, "bind the executor to a state first"
        if clock:
            clock.start()
        batch = build_batch(plan, source, self._block_tokens) if plan.request_ids else None
        if clock:
            clock.lap("batch")
        return functools.partial(self._compute, plan, source, source.moves(plan.step), batch)

    def _compute(self, plan: StepPlan, source: RowSource, moves: Sequence[Move], batch: Batch | None) -> StepResult:
        clock = self.clock
        for move in moves:
            assert self._host is not None, "the state moves blocks to host memory that is not there"
            if move.saves:
                self._host.save(move.block, move.slot)
            else:
                self._host.restore(move.slot, move.block)
        if batch is None:
            return StepResult(plan.step, (), ())
        logits = self._backend.run(batch)
        wanted = [i for i, samples in enumerate(plan.samples) if samples]
        if self.observe is not None:
            self.observe(plan, logits[: len(wanted)])
        if clock:
            clock.lap("run")
        request_ids = tuple(plan.request_ids[i] for i in wanted)
        sampled = self._sampler.sample(
            logits[: len(wanted)],
            [source.request(request_id) for request_id in request_ids],
            [plan.starts[i] + plan.counts[i] for i in wanted],
            [source.tokens(request_id) for request_id in request_ids],
        )
        if sampled.failed:
            raise _not_finite(request_ids[row] for row in sampled.failed)
        prompt_logprobs = tuple(_score(plan, source, logits[len(wanted) :])) if plan.scores else ()
        if clock:
            clock.lap("sample")
        has_logprobs = any(entry is not None for entry in sampled.logprobs)
        return StepResult(
            step=plan.step,
            request_ids=request_ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs if has_logprobs else (),
            prompt_logprobs=prompt_logprobs,
        )


def _score(plan: StepPlan, source: RowSource, logits: FloatArray) -> Iterator[PromptLogprobs]:
    """Log-probabilities of the prompts' tokens after the rows of `plan.scores`, whose `logits` these are, in order."""
    row = 0
    for request_id, start, stop in plan.scores:
        request = source.request(request_id)
        top = request.sampling.prompt_logprobs
        assert top is not None, f"request {request_id} did not ask for the log-probabilities of its prompt"
        entries = []
        for position in range(start + 1, stop + 1):
            if not np.isfinite(logits[row].max()):
                raise _not_finite([request_id])
            entries.append(row_logprobs(logits[row], request.prompt[position], top))
            row += 1
        yield PromptLogprobs(request_id, start + 1, tuple(entries))


def _not_finite(request_ids: Iterable[int]) -> EngineError:
    bad = ", ".join(map(str, request_ids))
    return EngineError(f"the logits of request {bad} are not finite: are the weights damaged?")
