"""`Pace`: what tokens take at present, whoever plans the steps."""

from __future__ import annotations

import pytest

from legato.core.pace import Pace


def test_a_mean_of_the_last_steps_for_streams_and_for_prompts() -> None:
    pace = Pace()
    assert (pace.decode_s, pace.token_s) == (0.0, 0.0)
    for _ in range(100):
        pace.observe(50, 8, 0.1)
    assert pace.decode_s == pytest.approx(0.1)
    assert pace.token_s == pytest.approx(0.002)
    for _ in range(100):
        pace.observe(0, 8, 0.02)
    assert pace.decode_s == pytest.approx(0.02, rel=0.01)
    assert pace.token_s == pytest.approx(0.002), "steps without prompts say nothing of them"


def test_one_step_of_another_kind_counts_for_a_tenth() -> None:
    pace = Pace()
    pace.observe(0, 1, 0.1)
    pace.observe(0, 1, 0.2)
    assert pace.decode_s == pytest.approx(0.11)


def test_a_step_that_is_supposed_counts_for_as_many_as_it_stands_for() -> None:
    pace = Pace()
    pace.suppose(100, 0.1, 8)
    pace.suppose(100, 0.2, 8)
    assert pace.token_s == pytest.approx((0.2 * 0.08 + 0.8 * 0.2) / (0.2 * 80 + 0.8 * 100))
    pace.suppose(10, 0.5, 1000)
    assert pace.token_s == pytest.approx(0.05)
