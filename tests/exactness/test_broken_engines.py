"""Inputs that broke other engines, on the real kernels: tokens and logits bit-equal to the same request alone.

A tiny random model, so that every boundary can be visited; the scheduler's side of the same reports is in
`tests/core/test_broken_engines.py` and `tests/core/test_prefix_cache.py`. `run_trial` checks that each request ends as
it should, that no block is lost and that every invariant of the state holds after each step.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from exec.backends import RandomCheckpoint, cpu_backend, needs_native
from exec.tiny_specs import TINY_SPECS
from legato.certify.alone import AloneCache
from legato.certify.rig import NativeRig, RigShape
from legato.certify.schedule import Arrival, Schedule
from legato.certify.totals import Totals
from legato.certify.trial import run_trial

pytestmark = needs_native
MAX_ROWS, MAX_SEQS = 1_100, 16


@functools.cache
def rig_of(spec: str = "llama", block_tokens: int = 16, blocks: int = 160) -> tuple[NativeRig, AloneCache]:
    """Quantised weights on the default instruction set, and what it has answered alone."""
    from legato import _native

    checkpoint = RandomCheckpoint(TINY_SPECS[spec], lambda name: "Q4_1" if "ffn" in name else "Q8_0")
    backend = cpu_backend(
        checkpoint,
        blocks=blocks,
        block_tokens=block_tokens,
        positions=blocks * block_tokens,
        isa=_native.isa(),
        activations="int8",
        kv_dtype="f16",
        threads=2,
        max_rows=MAX_ROWS,
    )
    shape = RigShape(
        vocab=checkpoint.spec.vocab,
        first_token=None,
        block_tokens=block_tokens,
        max_model_len=blocks * block_tokens,
        max_rows=MAX_ROWS,
        max_seqs=MAX_SEQS,
        pool_blocks=blocks,
        threads=2,
        kv_dtypes=("f16",),
    )
    rig = NativeRig(shape, {"f16": backend}, spec)
    return rig, AloneCache(rig)


def check(
    *arrivals: Arrival,
    step_tokens: int,
    spec: str = "llama",
    block_tokens: int = 16,
    pool_blocks: int = 160,
    max_seqs: int = MAX_SEQS,
    cache: bool = True,
    preempt: tuple[tuple[int, int], ...] = (),
) -> Totals:
    """Carries out the schedule and fails if a bit, a token, an end or a block is not as it should be."""
    rig, alone = rig_of(spec, block_tokens)
    schedule = Schedule(
        arrivals=arrivals,
        step_tokens=step_tokens,
        max_seqs=min(max_seqs, step_tokens),
        pool_blocks=pool_blocks,
        cache=cache,
        preempt=preempt,
    )
    outcome = run_trial(schedule, rig, alone)
    assert outcome.failure is None, outcome.failure.message
    return outcome.totals


@pytest.mark.parametrize("length", sorted({k * 16 + d for k in (1, 2, 3) for d in (-1, 0, 1)}))
def test_a_random_last_token_at_every_chunk_boundary_and_a_second_request_with_its_prefix(length: int) -> None:
    """sglang#30181."""
    totals = check(
        Arrival(1, length, 4, tail=1),
        Arrival(1, length, 4, tail=2, after=0),
        Arrival(1, length + 9, 4, after=0),
        step_tokens=16,
    )
    assert totals.cached_tokens >= (length - 1) // 16 * 16


@pytest.mark.parametrize("lengths", [(100, 50, 1), (100, 50, 65)])
def test_one_row_of_a_prompt_beside_decodes_of_one_row(lengths: tuple[int, ...]) -> None:
    """vllm#51483: contexts with one query row each, told apart by state and not by length."""
    arrivals = [Arrival(document, length, 6) for document, length in enumerate(lengths)]
    check(*arrivals, step_tokens=3)
    check(*arrivals, step_tokens=1, max_seqs=1)


@pytest.mark.parametrize("cache", [True, False])
def test_a_preemption_at_every_step_index(cache: bool) -> None:
    """vllm-tt-plugin#52: prompt 40, 30 generated, C = 16, preempted at every step, replayed in chunks."""
    for step in range(34):
        totals = check(Arrival(1, 40, 30), step_tokens=16, cache=cache, preempt=((step, 0),))
        assert totals.compared_tokens == 30, "a token was given twice, or max_tokens began anew"


@pytest.mark.parametrize("length", [48, 49])
def test_whole_blocks_sent_twice_and_a_third_turn_shorter_than_a_chunk(length: int) -> None:
    """vllm#53706: L of 3B and 3B + 1, max_tokens 1."""
    totals = check(
        Arrival(1, length, 1), Arrival(1, length, 1, after=0), Arrival(7, 5, 3, follows=1, after=1), step_tokens=32
    )
    assert totals.cached_tokens >= 2 * ((length - 1) // 16 * 16)


@pytest.mark.parametrize("cache", [True, False])
def test_sixty_identical_prompts_of_67_at_a_budget_of_64(cache: bool) -> None:
    """sglang#2255: remainders meet the budget exactly."""
    totals = check(*[Arrival(1, 67, 1)] * 60, step_tokens=64, cache=cache)
    assert totals.largest_step_rows <= 64
    assert totals.rows == (60 * 67 if not cache else 67 + 59 * 3)


@pytest.mark.parametrize("length", range(65, 73))
def test_a_prompt_just_over_a_chunk_after_fifty_others(length: int) -> None:
    """koboldcpp#2493."""
    others = [Arrival(document, 5, 2) for document in range(50)]
    check(*others, Arrival(99, length, 3, after=49), step_tokens=64, max_seqs=4)


@pytest.mark.parametrize("block_tokens", [48, 64])
def test_a_block_larger_than_the_chunk(block_tokens: int) -> None:
    """sglang#36344, vllm#34445, vLLM-2080Ti-Definitive#206: blocks of 64 at C = 32, L = 33; of 48 at a budget of 64."""
    check(Arrival(1, 33, 5), Arrival(1, 65, 5), Arrival(2, 64, 5), step_tokens=32, block_tokens=block_tokens)
    check(Arrival(1, 1000, 2), Arrival(2, 1000, 2), step_tokens=64, block_tokens=block_tokens)


def test_answers_that_outgrow_the_pool_together() -> None:
    """local-inference-lab/vllm#394: two of 480 + 60 in a pool of 1,024 tokens; and one of 960 + 64 alone."""
    totals = check(Arrival(1, 480, 60), Arrival(2, 480, 60), step_tokens=128, pool_blocks=64)
    assert totals.preemptions == 1
    assert check(Arrival(1, 960, 64), step_tokens=128, pool_blocks=64).preemptions == 0


@pytest.mark.parametrize("step_tokens", [8, 16, 64])
@pytest.mark.parametrize("cache", [True, False])
def test_preemption_every_three_steps(step_tokens: int, cache: bool) -> None:
    """sglang-jax#1010."""
    arrivals = [Arrival(document, 9 + 7 * document, 60) for document in range(4)]
    forced = tuple((step, step) for step in range(2, 120, 3))
    assert check(*arrivals, step_tokens=step_tokens, cache=cache, preempt=forced).forced_preemptions > 10


@pytest.mark.parametrize("step_tokens", [16, 32, 64, 96])
@pytest.mark.parametrize("length", [80, 200])
def test_sliding_windows_and_two_rope_tables_in_any_chunks(step_tokens: int, length: int) -> None:
    """mlxcel#1358, executorch#20346: what a row sees is chosen by its position, not by its chunk.

    Layers with a window of 20 and a rotary table of their own among full ones. A table that switches with the length of
    the request (longrope) is refused at load.
    """
    check(Arrival(1, length, 9), Arrival(2, 31, 40), spec="gemma3", step_tokens=step_tokens)


def test_nine_prompts_of_500_repeated_digits() -> None:
    """vllm#48214: at C = 64; here nine documents, and nine times the same."""
    check(*[Arrival(document, 500, 3) for document in range(9)], step_tokens=64, pool_blocks=150)
    check(*[Arrival(1, 500, 3)] * 9, step_tokens=64, pool_blocks=150)


@pytest.mark.parametrize("chunk", range(11))
def test_a_client_that_leaves_after_any_chunk_and_sends_the_same_body_again(chunk: int) -> None:
    """sglang#34149, ds4#333: L = 640, C = 64; the pool holds one of them."""
    totals = check(Arrival(1, 640, 3, abort_steps=chunk), Arrival(1, 640, 3, after=0), step_tokens=64, pool_blocks=41)
    assert totals.cached_tokens == min(chunk * 64, 624), "the retry goes on where the first one stopped"
    assert totals.aborts == 1


def test_a_needle_in_600_tokens_is_found_alike_at_every_chunk_width(smollm2_path: Path) -> None:
    """vllm#47567: no error that grows with the number of chunks. Tokens and logprobs, on SmolLM2."""
    from legato import LLM, SamplingParams
    from legato.core.budget import StepBudget

    llm = LLM(str(smollm2_path), enable_prefix_caching=False, max_num_batched_tokens=600, kv_tokens=2048)
    hay = "The grass is green and the sky is blue, and nothing much happens here. " * 36
    prompt = llm.text.encode(hay[:1000] + "The password of the old gate is 'marzipan'. " + hay[1000:])
    prompt = [*prompt[:590], *llm.text.encode("\nThe password of the old gate is '")]
    answers = []
    for width in (600, 64, 128, 200, 300):
        llm.engine.budget = StepBudget(width, min(64, width))
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12, logprobs=3), progress=False)
        answers.append((answer.token_ids, answer.logprobs))
    assert "marz" in b"".join(llm.text.token_bytes[i] for i in answers[0][0]).decode()
    assert all(answer == answers[0] for answer in answers[1:])
