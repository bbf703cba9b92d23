"""The widths that steps may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.ladder import Ladder
from legato.errors import ConfigError


@pytest.mark.parametrize(
    ("max_tokens", "widths"),
    [
        (512, (171, 342, 512)),
        (1024, (342, 684, 1024)),
        (48, (16, 32, 48)),
        (40, (16, 32, 40)),
        (17, (16, 17)),
        (16, (16,)),
        (5, (5,)),
        (1, (1,)),
    ],
)
def test_chunks_have_three_widths_at_least_16_apart_and_the_last_is_the_budget(
    max_tokens: int, widths: tuple[int, ...]
) -> None:
    assert Ladder.of(max_tokens, 1).mixed == widths


@pytest.mark.parametrize(("max_seqs", "widths"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))])
def test_decodes_double_up_to_the_number_of_sequences(max_seqs: int, widths: tuple[int, ...]) -> None:
    assert Ladder.of(512, max_seqs).decodes == widths


@given(st.integers(1, 3000), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 3000)))
def test_every_step_has_a_width_that_holds_it_and_one_row_is_never_padded(
    max_tokens: int, max_seqs: int, capacity: int | None
) -> None:
    ladder = Ladder.of(max_tokens, max_seqs, capacity)
    for kind, decodes in ((ladder.mixed, False), (ladder.decodes, True)):
        assert list(kind) == sorted(set(kind))
        assert capacity is None or kind[-1] <= capacity
        for rows in {1, 2, 3, *kind, *(w + 1 for w in kind), *(w - 1 for w in kind)}:
            if 1 <= rows <= kind[-1]:
                width = ladder.width(rows, decodes=decodes)
                assert rows <= width and width in ladder.widths
                assert rows > 1 or width == 1
        assert ladder.waste(decodes=decodes) >= 0.0


def test_a_width_over_the_cache_is_clamped() -> None:
    assert Ladder.of(512, 8, capacity=300).mixed == (171, 300)
    assert Ladder.of(512, 64, capacity=20).decodes == (1, 2, 4, 8, 16, 20)


def test_waste_is_what_padding_adds() -> None:
    assert Ladder((4,), (1,)).waste(decodes=False) == pytest.approx((1 + 4 + 4 + 4) / 10 - 1)
    assert Ladder((1, 2, 3, 4), (1,)).waste(decodes=False) == 0.0


def test_under_a_cap_those_go_whose_absence_pads_least_and_are_named() -> None:
    whole = Ladder.of(512, 64)
    assert whole.widths == (1, 2, 4, 8, 16, 32, 64, 171, 342, 512) and not whole.dropped
    assert Ladder.of(512, 64, cap=10) == whole
    tight = Ladder.of(512, 64, cap=7)
    assert len(tight.widths) == 7 and tight.dropped == (2, 4, 8)
    assert tight.mixed == whole.mixed, "each of these saves more"
    least = Ladder.of(512, 64, cap=3)
    assert least.widths == (1, 64, 512)
    assert least.waste(decodes=False) > whole.waste(decodes=False)


def test_a_cap_that_nothing_fits_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="one row, 64 decodes, 512 rows; raise the cap to 3"):
        Ladder.of(512, 64, cap=2)
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        Ladder.of(0, 1)
