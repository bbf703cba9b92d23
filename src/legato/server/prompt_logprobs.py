"""Log-probabilities of a prompt, as vLLM writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from legato.engine.wire import LogprobEntry

PromptLogprob = tuple[int, LogprobEntry | None]
"""A token of a prompt and its log-probabilities: None for the first one."""


def prompt_scores(
    entries: Sequence[PromptLogprob], token_name: Callable[[int], str]
) -> list[dict[int, dict[str, Any]] | None]:
    """One entry a token: null, or by token id the token itself, then the most likely ones, with their ranks from 1."""
    return [None if entry is None else _scores(token, entry, token_name) for token, entry in entries]


def _scores(token: int, entry: LogprobEntry, token_name: Callable[[int], str]) -> dict[int, dict[str, Any]]:
    chosen, top, rank = entry
    ranked = [(token, chosen, rank), *((other, value, place) for place, (other, value) in enumerate(top, 1))]
    return {t: {"logprob": value, "rank": place, "decoded_token": token_name(t)} for t, value, place in ranked}
