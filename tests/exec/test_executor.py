"""Plans of the real scheduler, carried out by the oracle: texts do not depend on budget, company or preemption."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from exec.backends import RandomCheckpoint, reference_backend
from exec.fakes import FakeSource, plan
from exec.tiny_specs import TINY_SPECS
from legato.core.budget import StepBudget
from legato.core.plan import TokenLogprobs
from legato.core.policy import FCFS
from legato.core.request import Request, Sampling, StopRule
from legato.core.schedule import plan_step
from legato.core.state import SchedulerState
from legato.errors import EngineError
from legato.exec.batch import Batch
from legato.exec.executor import ModelExecutor
from legato.exec.ops import FloatArray
from legato.exec.profile import StepClock, profile_table

BLOCK_TOKENS = 16
CHECKPOINT = RandomCheckpoint(replace(TINY_SPECS["qwen2"], layers=TINY_SPECS["qwen2"].layers[:1]))
SAMPLINGS = [
    Sampling(logprobs=2),
    Sampling(temperature=1.0, top_p=0.9, seed=5),
    Sampling(temperature=0.7, frequency_penalty=1.0, repetition_penalty=1.2, seed=6),
    Sampling(repetition_penalty=1.5, presence_penalty=0.5),
]
Texts = dict[int, list[tuple[int, TokenLogprobs | None]]]


def requests() -> list[Request]:
    rng = np.random.default_rng(8)
    lengths = [5, 20, 1, 33]
    return [
        Request(i, tuple(rng.integers(0, 101, n).tolist()), SAMPLINGS[i], StopRule(max_tokens=36))
        for i, n in enumerate(lengths)
    ]


def serve(wanted: list[Request], *, max_tokens: int, kv_blocks: int) -> tuple[Texts, SchedulerState]:
    """All generated tokens with their logprobs, by request."""
    backend = reference_backend(CHECKPOINT, blocks=kv_blocks, block_tokens=BLOCK_TOKENS, positions=80)
    executor = ModelExecutor(backend, block_tokens=BLOCK_TOKENS)
    state = SchedulerState(kv_blocks, BLOCK_TOKENS, max_model_len=80)
    executor.bind(state)
    for request in wanted:
        state.submit(request)
    texts: Texts = defaultdict(list)
    while state.has_work:
        step = plan_step(state, StepBudget(max_tokens, max_seqs=min(4, max_tokens)), FCFS)
        state.apply(step)
        result = executor.execute(step)
        state.commit(result)
        state.check()
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        for request_id, token, entry in zip(result.request_ids, result.token_ids, logprobs, strict=True):
            texts[request_id].append((token, entry))
    return texts, state


@pytest.fixture(scope="module")
def alone() -> Texts:
    texts: Texts = {}
    for request in requests():
        texts |= serve([request], max_tokens=100, kv_blocks=8)[0]
    assert all(len(text) == 36 for text in texts.values())
    return texts


@pytest.mark.parametrize("max_tokens", [1, 4, 7, 16, 100])
def test_texts_and_logprobs_are_those_of_each_request_alone(alone: Texts, max_tokens: int) -> None:
    assert serve(requests(), max_tokens=max_tokens, kv_blocks=30)[0] == alone


@pytest.mark.parametrize("max_tokens", [5, 16, 100])
def test_preemption_changes_no_text(alone: Texts, max_tokens: int) -> None:
    """With a pool of 6 blocks the four requests push each other out, and penalties are counted through it."""
    texts, state = serve(requests(), max_tokens=max_tokens, kv_blocks=6)
    assert state.preemptions > 0
    assert texts == alone


class FixedLogits:
    """A backend that returns what the test says."""

    def __init__(self, logits: FloatArray) -> None:
        self.logits = logits
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> FloatArray:
        self.batches.append(batch)
        return self.logits[: len(batch.logit_rows)]


def two_requests() -> FakeSource:
    source = FakeSource()
    for request_id in (3, 4):
        source.add(Request(request_id, (1, 2, 3)), blocks=[request_id])
    return source


def test_only_entries_that_sample_get_a_token() -> None:
    executor = ModelExecutor(FixedLogits(np.eye(5, dtype=np.float32)[2:]), block_tokens=BLOCK_TOKENS)
    executor.bind(two_requests())
    result = executor.execute(plan((3, 0, 2, False), (4, 0, 3, True), step=9))
    assert (result.step, result.request_ids, result.token_ids) == (9, (4,), (2,))
    assert result.logprobs == ()
    assert executor.execute(plan((3, 0, 2, False))).token_ids == ()


def test_a_request_whose_logits_are_not_finite_is_named() -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[0, 3] = np.nan
    executor = ModelExecutor(FixedLogits(logits), block_tokens=BLOCK_TOKENS)
    executor.bind(two_requests())
    with pytest.raises(EngineError, match="request 3 are not finite"):
        executor.execute(plan((3, 0, 3, True), (4, 0, 3, True)))


def test_an_empty_plan_does_not_reach_the_backend() -> None:
    backend = FixedLogits(np.zeros((1, 5), np.float32))
    executor = ModelExecutor(backend, block_tokens=BLOCK_TOKENS)
    executor.bind(FakeSource())
    assert executor.execute(plan(step=3)).request_ids == ()
    assert backend.batches == []


def test_the_clock_tells_phases_apart() -> None:
    seconds = count(start=0.0, step=1.0)  # type: ignore[call-overload]
    clock = StepClock(lambda: float(next(seconds)))
    executor = ModelExecutor(FixedLogits(np.zeros((2, 5), np.float32)), block_tokens=BLOCK_TOKENS, clock=clock)
    executor.bind(two_requests())
    for _ in range(2):
        executor.execute(plan((3, 0, 3, True)))
    assert clock.seconds == {"batch": 2.0, "run": 2.0, "sample": 2.0}
    assert profile_table(clock, {"linear": 1.5}).splitlines() == [
        "batch                    1000.000 ms   33.3 %",
        "run                      1000.000 ms   33.3 %",
        "sample                   1000.000 ms   33.3 %",
        "  run: linear             750.000 ms   25.0 %",
    ]
