"""Figures from stamps, against sums done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.bench.client import Reply
from legato.bench.record import (
    Gaps,
    chunks_between,
    gaps_of,
    is_decoding_at,
    percentile,
    spread,
    tokens_per_chunk,
)


def reply(*arrivals_s: float, done_s: float | None = None, tokens: int | None = None) -> Reply:
    made = Reply()
    made.sent_s, made.arrivals_s, made.done_s, made.completion_tokens = 0.0, list(arrivals_s), done_s, tokens
    return made


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(100, 0.99, 99), (100, 0.5, 50), (101, 0.99, 100), (1, 0.5, 1), (10, 0.99, 10)]
)
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(
    count: int, share: float, expected: int
) -> None:
    assert percentile(range(count, 0, -1), share) == expected


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0.01, 1))
def test_a_percentile_was_observed_and_enough_values_do_not_exceed_it(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_a_spread_is_in_milliseconds_and_of_nothing_there_is_none() -> None:
    found = spread([0.010, 0.030, 0.020])
    assert found is not None
    assert (found.p50_ms, found.p99_ms, found.max_ms, found.count) == (20.0, 30.0, 30.0, 3)
    assert spread([]) is None


def test_gaps_are_within_an_answer_and_belong_to_the_time_they_begin_in() -> None:
    answers = [reply(0.5, 1.0, 1.5, 9.0, done_s=9.0), reply(1.25, 1.5, done_s=1.5)]
    gaps = gaps_of(answers, 1.0, 2.0, 10.0, limit_s=1.0)
    assert gaps.begin_s == [1.0, 1.5, 1.25]
    assert gaps.length_s == [0.5, 7.5, 0.25]
    assert gaps.over(1.0) == 1


def test_a_gap_that_the_end_of_the_run_cuts_counts_if_it_is_over_the_limit() -> None:
    """A server that stands still at the end must not look better than one that stands still in the middle."""
    assert gaps_of([reply(1.0)], 0.0, 2.0, 4.0, limit_s=1.0).length_s == [3.0]
    assert gaps_of([reply(1.0)], 0.0, 2.0, 1.5, limit_s=1.0).length_s == []
    assert gaps_of([reply(1.0, done_s=1.0)], 0.0, 2.0, 4.0, limit_s=1.0).length_s == []


def test_gaps_are_told_apart_by_whether_they_touch_a_span() -> None:
    gaps = Gaps()
    for begin in range(6):
        gaps.add(float(begin), 1.0)
    beside, apart = gaps.split([(2.5, 2.6), (2.55, 3.5)])
    assert (len(beside), len(apart)) == (2, 4)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=20),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6),
)
def test_the_split_is_that_of_comparing_every_gap_with_every_span(
    made: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    gaps = Gaps()
    for begin, length in made:
        gaps.add(begin, length)
    ends = [(begin, begin + length) for begin, length in spans]
    touching = [length for begin, length in made if any(a <= begin + length and begin <= b for a, b in ends)]
    beside, apart = gaps.split(ends)
    assert beside == touching
    assert len(apart) == len(made) - len(touching)


def test_tokens_per_chunk_come_from_answers_that_told_them() -> None:
    answers = [reply(1, 2, 3, done_s=3, tokens=6), reply(1, 2, done_s=2, tokens=2), reply(1, 2, 3)]
    assert tokens_per_chunk(answers) == 8 / 5
    assert tokens_per_chunk([reply(1, 2)]) is None


def test_chunks_are_counted_in_a_half_open_interval() -> None:
    assert chunks_between([reply(1, 2, 3, 4), reply(2)], 2, 4) == 3


def test_an_answer_is_decoding_between_its_first_and_its_last_token() -> None:
    answer = reply(1, 5)
    assert [is_decoding_at(answer, at) for at in (0.5, 1, 3, 5, 6)] == [False, True, True, False, False]
    assert not is_decoding_at(reply(), 1)
