"""From stamps to figures and to a sentence."""

from __future__ import annotations

import dataclasses

import pytest

from demo.rig import SETUP, recorded
from legato.demo.figures import duration, figures_of, gaps_of, name_of, sum_up
from legato.demo.run import Run
from legato.demo.scale import Scale, seconds_between_ticks, tick_name


def made(method: str, longest_s: float, ttft_s: float) -> Run:
    """A run whose streams wait 10 ms, once as long as said."""
    return Run(
        method,  # type: ignore[arg-type]
        [[0.0, 0.01, 0.02, 0.02 + longest_s]],
        0.02,
        0.02 + ttft_s,
        0.02 + max(longest_s, ttft_s),
    )


def test_a_gap_of_several_streams_counts_once() -> None:
    run = Run("tokens", [[0.0, 0.1, 0.3], [0.0, 0.1, 0.35], [0.1]])
    assert gaps_of(run) == [(0.0, 0.1), (0.1, 0.3), (0.1, 0.35)]
    assert figures_of(run).worst_ms == pytest.approx((250.0, 200.0, 100.0))


def test_of_nothing_there_are_no_figures() -> None:
    found = figures_of(Run("tokens"))
    assert found == (type(found))((), None, None, None)
    assert found.to_dict()["worst_gaps_ms"] == []


def test_the_sentence_says_what_the_chunks_were_for() -> None:
    said = sum_up(SETUP, [made("one pass", 3.1, 3.1), made("tokens", 0.5, 3.2), made("milliseconds", 0.03, 3.9)])
    assert said == (
        "Read in one step, a prompt of 600 tokens kept all 4 readers waiting for 3.1 s. Asked for 30 ms, no wait was"
        " longer than 30 ms and the prompt was answered 0.8 s later: after 3.9 s instead of 3.1."
    )


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([made("one pass", 3.1, 3.1), made("milliseconds", 0.09, 2.0)], "which is more than was asked for,"),
        ([made("one pass", 3.1, 3.1), made("milliseconds", 0.032, 2.0)], "30 ms, the longest wait was 32 ms, and"),
        ([made("one pass", 3.1, 3.1), made("milliseconds", 0.03, 2.0)], "1.1 s sooner: after 2.0 s"),
        ([made("one pass", 3.1, 3.1), made("milliseconds", 0.03, 3.1)], "as soon: after 3.1 s"),
        ([made("one pass", 0.03, 0.03), made("milliseconds", 0.03, 0.1)], "here chunks made no difference"),
        ([made("one pass", 3.1, 3.1), made("tokens", 0.5, 2.0)], "In steps of 100 tokens no wait was longer than 500"),
        ([made("one pass", 3.1, 3.1)], "kept all 4 readers waiting for 3.1 s."),
        ([Run("one pass")], "nothing to compare"),
        ([], "nothing to compare"),
    ],
)
def test_the_sentence_is_true_of_whatever_came(runs: list[Run], words: str) -> None:
    assert words in sum_up(SETUP, runs)


def test_what_is_late_is_told_with_its_cause() -> None:
    paced = made("milliseconds", 0.09, 2.0)
    paced.late = {"slow": 8, "prompts": 4}
    said = sum_up(SETUP, [made("one pass", 3.1, 3.1), paced])
    assert "90 ms, which is more than was asked for (steps took longer than foreseen" in said
    assert recorded()[2].late == {}


def test_one_reader_is_told_as_one() -> None:
    alone = dataclasses.replace(SETUP, streams=1)
    assert "kept its reader waiting" in sum_up(alone, recorded(alone))


def test_names_say_what_bounds_a_step() -> None:
    assert [name_of(run, SETUP)[1] for run in recorded()] == [
        "the whole prompt in one step",
        "100 tokens a step",
        "a token every 30 ms",
    ]


def test_durations_are_for_people() -> None:
    assert [duration(ms) for ms in (0.25, 12.3, 999.0, 1000.0, 3812.0)] == [
        "0.2 ms",
        "12 ms",
        "999 ms",
        "1.0 s",
        "3.8 s",
    ]


def test_a_scale_holds_every_gap_and_keeps_their_order() -> None:
    scale = Scale.of([5.0, 7.0, 3000.0], 150.0)
    shares = [scale.share(ms) for ms in (0.0, 5.0, 7.0, 150.0, 3000.0, 99_999.0)]
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == 1.0 and shares[1] > 0.0 and shares[4] < 1.0
    assert [tick_name(ms) for ms in scale.ticks()] == ["10 ms", "100 ms", "1 s"]


def test_ticks_of_time_are_round_and_few() -> None:
    for span_s in (0.003, 0.4, 7.0, 8.0, 61.0, 3000.0):
        step_s = seconds_between_ticks(span_s, 10)
        assert span_s / step_s <= 10.1
        assert f"{step_s:.0e}"[0] in "125"
