"""Where longer steps stop paying off, and what a chunk is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.core.cost import Curve, StepCost
from legato.core.shape import Attention
from legato.errors import ConfigError
from legato.tune.efficiency import Efficiency, predicted, sizes, steps
from legato.tune.knee import RULE, advise
from legato.tune.sweep import BUDGETS, Kept, Point, Setting, aligned


def point(tokens: int, gap_ms: float, first_ms: float, itl_ms: float | None = None) -> Point:
    return Point(Setting(tokens, itl_ms), gap_ms / 2, gap_ms, gap_ms, first_ms, 100.0, 400.0)


# Gaps grow with the budget; first tokens fall steeply up to 512 and hardly after that.
ELBOW = [
    point(128, 30, 4000),
    point(256, 55, 2100),
    point(512, 100, 1200),
    point(1024, 200, 1120),
    point(2048, 400, 1080),
]


def test_the_knee_of_an_elbow_is_its_elbow() -> None:
    advice = advise(ELBOW)
    assert advice.setting == Setting(512) and advice.rule == RULE
    assert advice.why == (
        "512 tokens: from 256 tokens on, the time to a first token is 43 % shorter, p99 of the gaps 82 % longer;"
        " at 1,024 tokens they would be 7 % shorter and 100 % longer"
    )


def test_the_order_of_points_does_not_matter_nor_one_that_is_worse_in_both() -> None:
    assert advise(ELBOW[::-1]).setting == Setting(512)
    assert advise([*ELBOW, point(700, 150, 1500)]).setting == Setting(512)


def test_a_line_has_no_knee_and_the_nearest_to_the_corner_is_taken() -> None:
    advice = advise([point(n, 100.0 * n, 1000.0 - 100 * n) for n in range(1, 8)])
    assert "nearest" in advice.rule and advice.setting == Setting(4)


def test_a_gap_in_milliseconds_is_chosen_if_it_is_no_worse_than_the_knee() -> None:
    better, worse = point(2048, 99, 1210, 100.0), point(2048, 250, 1100, 250.0)
    advice = advise([*ELBOW, worse, better])
    assert (advice.setting, advice.knee.setting) == (better.setting, Setting(512))
    assert advice.why.startswith("100 ms instead of 512 tokens: p99 of the gaps is 1 % shorter")
    assert advice.setting.options == {"itl-ms": 100.0, "max-num-batched-tokens": 2048}
    assert advise([*ELBOW, worse]).setting == Setting(512)


def test_two_budgets_have_no_knee() -> None:
    with pytest.raises(ConfigError, match="a knee needs 3"):
        advise(ELBOW[:2])


def test_budgets_are_rounded_up_to_blocks_of_rows() -> None:
    assert aligned((256, 257, 384), 48) == (288, 384)
    assert aligned(BUDGETS, 16) == BUDGETS


def test_points_are_kept_and_found_again(tmp_path: Path) -> None:
    path, what = tmp_path / "points.jsonl", {"streams": 8, "lengths": (1, 2)}
    kept = Kept(path, what)
    kept.add(ELBOW[0])
    kept.add(point(9, 1.0, 2.0, 60.0))
    assert Kept(path, what).points == [ELBOW[0], point(9, 1.0, 2.0, 60.0)]
    with pytest.raises(ConfigError, match="points of another sweep"):
        Kept(path, {**what, "streams": 4})
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ConfigError, match="is no file of points"):
        Kept(path, what)
    kept.forget()
    assert not path.exists() and Kept(path, what).points == []


def test_the_least_chunk_keeps_its_share_as_the_next_one_does() -> None:
    efficiency = Efficiency({16: 1.6, 19: 1.0, 23: 1.5, 27: 1.35, 32: 1.28, 38: 1.5, 39: 1.0, 64: 1.6})
    assert efficiency.best == 64 / 1.6
    assert efficiency.least(0.3) == 19
    assert efficiency.least(0.45) == 27, "19 keeps it, and 23 does not"
    assert efficiency.least(0.9) == 64
    assert efficiency.share(19) == 19 / 40
    assert Efficiency({16: 1.0, 19: 1.0, 500: 1.0}).least(0.9) is None


def test_a_block_that_is_begun_shows_as_a_step() -> None:
    cost = StepCost(Attention(), Curve((1,), (0.001,), 0.0), tile=64, tile_s=0.01)
    efficiency = predicted(cost, sizes(300))
    assert {255, 256, 257} <= set(steps(300)) <= set(efficiency.seconds)
    assert efficiency.seconds[257] - efficiency.seconds[256] == pytest.approx(0.01)
    assert efficiency.seconds[256] == pytest.approx(efficiency.seconds[255])
    looks_back = StepCost(Attention(), Curve((1,), (0.001,), 0.001), pair_s=1e-6)
    rates = [predicted(looks_back, sizes(300)).rate(rows) for rows in (16, 64, 256)]
    assert rates == pytest.approx([rates[0]] * 3, rel=0.01), "rows look back equally far, whatever their chunk"
    assert efficiency.to_dict()["around"] == [64, 128, 256]
