"""`StepBudget` refuses what it could not keep."""

import pytest

from legato.core.budget import StepBudget
from legato.errors import ConfigError


def test_the_default_is_512_tokens() -> None:
    assert StepBudget().max_tokens == 512


def test_a_budget_with_fewer_tokens_than_requests_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"16 tokens .* 17 running"):
        StepBudget(max_tokens=16, max_seqs=17)


@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(0, 0), (8, 0), (8, -1)])
def test_a_budget_that_runs_nothing_is_refused(max_tokens: int, max_seqs: int) -> None:
    with pytest.raises(ConfigError):
        StepBudget(max_tokens, max_seqs)


@pytest.mark.parametrize("option", ["chunk_tokens", "partial_prefills"])
def test_a_budget_that_computes_no_prompt_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 0"):
        StepBudget(**{option: 0})  # type: ignore[arg-type]
