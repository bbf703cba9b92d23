"""Each option by an example one can compute by hand, then distributions, then independence of company."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.request import Request, Sampling, StopRule
from legato.exec.ops import FloatArray
from legato.exec.sampler import Sampler, candidates, draw, row_logprobs, uniform


def row(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def pick(
    logits: FloatArray,
    sampling: Sampling,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    stop: StopRule | None = None,
) -> int:
    request = Request(1, tuple(prompt), sampling, stop or StopRule())
    history = array("i", (*prompt, *output))
    return Sampler().sample(logits[None], [request], [len(history)], [history]).token_ids[0]


def allowed(logits: FloatArray, sampling: Sampling) -> list[int]:
    ids, weights = candidates(logits, sampling)
    return np.flatnonzero(weights).tolist() if ids is None else ids.tolist()


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    assert pick(row(1, 3, 3, 2), Sampling()) == 1


def test_top_k_keeps_k_and_breaks_ties_by_id() -> None:
    logits = row(1, 3, 2, 2, 0, 2)
    assert allowed(logits, Sampling(temperature=1.0, top_k=1)) == [1]
    assert allowed(logits, Sampling(temperature=1.0, top_k=3)) == [1, 2, 3]
    assert allowed(logits, Sampling(temperature=1.0, top_k=6)) == [0, 1, 2, 3, 4, 5]
    assert allowed(logits, Sampling(temperature=1.0, top_k=99)) == [0, 1, 2, 3, 4, 5]


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass() -> None:
    logits = np.log(row(0.15, 0.5, 0.05, 0.3))
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.4)) == [1]
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.6)) == [1, 3]
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.85)) == [0, 1, 3]
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.97)) == [0, 1, 2, 3]
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.0)) == [1]


def test_top_p_among_equals_keeps_the_lowest_ids() -> None:
    assert allowed(row(0, 0, 0, 0), Sampling(temperature=1.0, top_p=0.6)) == [0, 1, 2]


def test_top_p_among_logits_whose_weights_are_equal_in_float32_keeps_the_largest() -> None:
    logits = row(1e-42, 0, 2e-42, 1e-42)
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.0)) == [2]
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.5)) == [0, 2]
    assert allowed(logits, Sampling(temperature=1.0, top_p=0.7)) == [0, 2, 3]


def test_min_p_is_a_share_of_the_largest_probability_after_temperature() -> None:
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    assert allowed(logits, Sampling(temperature=1.0, min_p=0.25)) == [0, 1, 2]
    assert allowed(logits, Sampling(temperature=0.5, min_p=0.25)) == [0, 1]  # squared: 1, 0.36, 0.09, 0.01
    assert allowed(logits, Sampling(temperature=1.0, min_p=1.0)) == [0]


def test_top_p_is_of_what_top_k_left() -> None:
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    # Of the two left, the first has 4/7 = 0.571: enough for 0.55, though it is only 0.4 of the whole.
    assert allowed(logits, Sampling(temperature=1.0, top_k=2, top_p=0.55)) == [0]
    assert allowed(logits, Sampling(temperature=1.0, top_k=2, top_p=0.6)) == [0, 1]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60),
    st.floats(0.1, 3),
    st.floats(0, 1),
    st.integers(0, 70),
    st.floats(0, 1),
)
def test_candidates_are_those_of_the_plain_definition(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = row(*values)
    found = allowed(logits, Sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    order = [i for i in np.argsort(-logits, kind="stable") if min_p == 0 or scaled[i] >= np.log(min_p) - 1e-5]
    order = order[: top_k or None]
    weights = np.exp(scaled[order])
    reached = np.cumsum(weights) / weights.sum()
    fewest = int(np.searchsorted(reached, top_p - 1e-5)) + 1
    most = int(np.searchsorted(reached, top_p + 1e-5)) + 1
    surely = {int(i) for i in order[:fewest] if min_p == 0 or scaled[i] >= np.log(min_p) + 1e-5}
    assert surely <= set(found) <= {int(i) for i in order[:most]}
    assert found == sorted(found)


def test_the_draw_is_the_inverse_of_the_cumulative_distribution_in_id_order() -> None:
    logits = np.log(row(0.125, 0.5, 0.25, 0.125))
    sampling = Sampling(temperature=1.0)
    at = [0.0, 0.1249, 0.1251, 0.6249, 0.6251, 0.8749, 0.8751, 1 - 2**-53]
    assert [draw(logits, sampling, u) for u in at] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = row(-np.inf, 0, -np.inf)
    assert {draw(logits, Sampling(temperature=1.0), u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    assert {draw(row(1, 1.5, -2), Sampling(temperature), u) for u in (0.0, 0.5, 0.999)} == {1}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert pick(row(4, 3, -1), sampling, prompt=(0,)) == 1  # 2, 3, -1
    assert pick(row(4, 3, -1), sampling, prompt=(2,), output=(0, 1)) == 0  # 2, 1.5, -2
    assert pick(row(-1, -1.5), sampling, prompt=(0,)) == 1  # -2, -1.5


def test_presence_and_frequency_penalties_are_of_the_output_only() -> None:
    logits = row(4, 3.5, 0)
    assert pick(logits, Sampling(presence_penalty=1.0), prompt=(0, 0)) == 0
    assert pick(logits, Sampling(presence_penalty=1.0), prompt=(2,), output=(0,)) == 1
    assert pick(logits, Sampling(frequency_penalty=0.2), prompt=(0, 0), output=(0, 0)) == 0  # 3.6
    assert pick(logits, Sampling(frequency_penalty=0.2), prompt=(2,), output=(0, 0, 0)) == 1  # 3.4


def test_logit_bias_comes_after_the_penalties() -> None:
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((1, 2.5),))
    assert pick(row(2, 0, 3.1), sampling, prompt=(2,)) == 1  # 2, 2.5, 1.55


def test_stop_ids_are_ruled_out_until_min_tokens() -> None:
    stop = StopRule(max_tokens=9, token_ids=frozenset({1}), min_tokens=2)
    assert pick(row(0, 9, 1), Sampling(), output=(2,), stop=stop) == 2
    assert pick(row(0, 9, 1), Sampling(), output=(2, 2), stop=stop) == 1


def test_counts_do_not_depend_on_when_or_how_often_a_request_was_seen() -> None:
    """A preempted request comes back with the same tokens; a forgotten one (the cache is small) is counted anew."""
    sampling = Sampling(frequency_penalty=0.3, repetition_penalty=1.3, presence_penalty=0.1)
    logits = np.random.default_rng(3).standard_normal(50).astype(np.float32)
    request = Request(1, (3, 3, 4), sampling)
    other = Request(2, (1, 2), sampling)
    steady, forgetful = Sampler(), Sampler(capacity=1)
    history = array("i", request.prompt)
    for _ in range(400):
        tokens = [s.sample(logits[None], [request], [len(history)], [history]).token_ids for s in (steady, forgetful)]
        again = steady.sample(logits[None], [request], [len(history)], [history]).token_ids
        fresh = Sampler().sample(logits[None], [request], [len(history)], [history]).token_ids
        assert tokens[0] == tokens[1] == again == fresh
        forgetful.sample(logits[None], [other], [2], [array("i", other.prompt)])
        history.append(tokens[0][0])
    assert len(set(history)) > 40  # the penalties did their work


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = np.log(row(0.125, 0.5, 0.25, 0.125)) + np.float32(7)
    found = row_logprobs(logits, 2, 3)
    assert found.chosen == pytest.approx(np.log(0.25), abs=1e-6)
    assert [i for i, _ in found.top] == [1, 2, 0]
    assert [p for _, p in found.top] == pytest.approx(np.log([0.5, 0.25, 0.125]), abs=1e-6)
    assert row_logprobs(logits, 0, 0).top == ()
    assert len(row_logprobs(logits, 0, 99).top) == 4
    assert [row_logprobs(logits, token, 0).rank for token in range(4)] == [3, 1, 2, 4], "of equals the lowest id"


def test_logprobs_of_a_penalised_and_biased_row_are_those_of_the_model() -> None:
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((0, 50.0),), logprobs=1)
    out = Sampler().sample(np.log(row(0.25, 0.75))[None], [Request(1, (1,), sampling)], [1], [array("i", [1])])
    assert out.token_ids == (0,)
    entry = out.logprobs[0]
    assert entry is not None and entry.chosen == pytest.approx(np.log(0.25)) and entry.top[0][0] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_and_no_other(bad: float, temperature: float) -> None:
    logits = np.tile(row(0, 1, 2, 5), (3, 1))
    logits[1, 0] = bad
    requests = [Request(i, (0,), Sampling(temperature, top_k=1, logprobs=0)) for i in range(3)]
    out = Sampler().sample(logits, requests, [1, 1, 1], [array("i", [0])] * 3)
    assert out.failed == (1,)
    assert out.token_ids == (3, 0, 3) and out.logprobs[1] is None


def test_uniform_numbers_are_pinned_and_differ_by_seed_and_position() -> None:
    """Pinned: a served text with a seed must not change with a release."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(-1, 5)] == [
        0.011546754286331562,
        0.3035680343067586,
        0.8133540609793564,
        0.05541565898515444,
    ]
    assert len({uniform(s, p) for s in range(40) for p in range(40)}) == 1600


CHI_SQUARE_MAX = 21.1  # upper 1e-4 quantile for 3 degrees of freedom; the seed is fixed, so nothing is flaky


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(temperature=0.5), [0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3, 0.01 / 0.3]),
        (Sampling(temperature=1.0, top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(temperature=1.0, top_k=3), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(temperature=1.0, min_p=0.5), [4 / 9, 3 / 9, 2 / 9, 0]),
    ],
)
def test_draws_over_positions_follow_the_distribution(sampling: Sampling, expected: list[float]) -> None:
    logits, draws = np.log(row(0.4, 0.3, 0.2, 0.1)), 20_000
    seen = Counter(draw(logits, sampling, uniform(11, position)) for position in range(draws))
    chi_square = sum((seen[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(expected) if p)
    assert chi_square < CHI_SQUARE_MAX
    assert all(seen[i] == 0 for i, p in enumerate(expected) if p == 0)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(-(2**63), 2**64),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (5, -100.0))]),
    logprobs=st.sampled_from([None, 0, 4]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(samplings, min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.integers(101, 163))
def test_a_row_is_sampled_the_same_alone_and_in_any_company(drawn: list[Sampling], noise_seed: int, vocab: int) -> None:
    noise = np.random.default_rng(noise_seed)
    logits = (3 * noise.standard_normal((len(drawn), vocab))).astype(np.float32)
    before = logits.copy()
    requests = [Request(i, tuple(noise.integers(0, vocab, 9).tolist()), s) for i, s in enumerate(drawn)]
    histories = [array("i", (*r.prompt, *noise.integers(0, vocab, 20).tolist())) for r in requests]
    positions = [len(h) for h in histories]
    together = Sampler().sample(logits, requests, positions, histories)
    assert np.array_equal(logits, before)
    for i, request in enumerate(requests):
        misaligned = np.empty(vocab + 1, np.float32)[1:]
        misaligned[:] = logits[i]
        renamed = replace(request, request_id=77)
        alone = Sampler().sample(misaligned[None], [renamed], [positions[i]], [histories[i]])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
