"""`StepShape` and `Attention`: counts that a loop over rows and keys would give."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import StepPlan
from legato.core.request import Request, Sampling
from legato.core.shape import Attention, StepShape

windows = st.none() | st.integers(1, 70)


def keys_seen(position: int, window: int | None) -> range:
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@given(start=st.integers(0, 200), rows=st.integers(1, 120), window=windows, layers=st.integers(1, 3))
def test_pairs_are_counted_as_row_by_row(start: int, rows: int, window: int | None, layers: int) -> None:
    counted = sum(len(keys_seen(position, window)) for position in range(start, start + rows))
    assert Attention(((layers, window),)).pairs(start, rows) == layers * counted


@given(start=st.integers(0, 200), rows=st.integers(1, 120), window=windows, block_rows=st.integers(1, 40))
def test_keys_are_read_once_a_block_of_rows(start: int, rows: int, window: int | None, block_rows: int) -> None:
    read = 0
    for first in range(start, start + rows, block_rows):
        block = range(first, min(first + block_rows, start + rows))
        read += block[-1] + 1 - keys_seen(block[0], window)[0]
    assert Attention(((1, window),), block_rows).kv_tokens(start, rows) == read


@given(start=st.integers(0, 200), rows=st.integers(1, 100), window=windows, block_rows=st.integers(1, 40))
def test_another_row_and_a_longer_prefix_never_count_less(
    start: int, rows: int, window: int | None, block_rows: int
) -> None:
    attention = Attention(((2, window), (1, None)), block_rows)
    for count in (attention.pairs, attention.kv_tokens):
        assert count(start, rows) <= count(start, rows + 1)
        assert count(start, rows) <= count(start + 1, rows)


def test_layers_with_and_without_a_window_add_up() -> None:
    both = Attention(((5, 16), (1, None)))
    assert both.pairs(100, 7) == 5 * Attention(((1, 16),)).pairs(100, 7) + Attention(((1, None),)).pairs(100, 7)


@given(starts=st.lists(st.integers(0, 200), max_size=20), window=windows, block_rows=st.integers(1, 40))
def test_decodes_are_counted_at_once_as_one_by_one(starts: list[int], window: int | None, block_rows: int) -> None:
    attention = Attention(((2, window), (1, None)), block_rows)
    assert attention.decoded(starts) == sum(attention.pairs(start, 1) for start in starts)
    assert attention.decoded(starts) == sum(attention.kv_tokens(start, 1) for start in starts)
    shape = StepShape()
    for start in starts:
        shape = shape.with_chunk(attention, start, 1, 1)
    assert StepShape.of_decodes(starts, attention) == shape


def test_a_plan_and_the_same_step_put_together_have_one_shape() -> None:
    draw = random.Random(1)
    for attention in (Attention(((4, None),)), Attention(((3, 64), (1, None)))):
        starts, counts = [draw.randrange(500) for _ in range(6)], [1, 1, 1, 40, 1, 300]
        samples = (True, True, True, False, True, True)
        plan = StepPlan(0, tuple(range(6)), tuple(starts), tuple(counts), samples, decodes=3)
        shape = StepShape()
        for start, count, sample in zip(starts, counts, samples, strict=True):
            shape = shape.with_chunk(attention, start, count, int(sample))
        assert StepShape.of(plan, attention) == shape


def test_rows_are_counted_by_what_is_done_with_their_logits() -> None:
    kinds = (
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(logprobs=0),
        Sampling(temperature=0.5, min_p=0.1, logprobs=3),
        Sampling(temperature=1.0, top_k=5, prompt_logprobs=1),
    )
    requests = {i: Request(i, (1,), sampling) for i, sampling in enumerate(kinds)}
    samples = (True, True, True, True, True, False)
    plan = StepPlan(0, tuple(range(6)), (5,) * 5 + (0,), (1,) * 5 + (30,), samples, decodes=5, scores=((5, 10, 18),))
    shape = StepShape.of(plan, Attention(), requests.__getitem__)
    assert (shape.rows, shape.sequences, shape.logit_rows) == (35, 6, 13)
    assert (shape.drawn_rows, shape.nucleus_rows, shape.logprob_rows) == (3, 2, 10)
    assert StepShape.of(plan, Attention()).drawn_rows == 0
    copying = StepShape.of(plan, Attention(), copied_blocks=7)
    assert (copying.copied_blocks, copying.with_chunk(Attention(), 0, 5).copied_blocks) == (7, 7)
