"""How long a request that comes now waits for its first token: from what is known outside the engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from legato.core.policy import AGEING_TOKENS_S

_FINISHES = 32


@dataclass(frozen=True, slots=True)
class Pending:
    """A request without a first token. `place`: the lower, the earlier its turn."""

    place: tuple[float, ...]
    prompt_tokens: int


def place_of(policy: str, priority: int, arrival_s: float, due_s: float, prompt_tokens: int) -> tuple[float, ...]:
    """Where a request stands among others, as `core.policy` has it, but for the tenants that `fair` tells apart."""
    if policy == "fcfs":
        return priority, arrival_s
    return priority, due_s if due_s < math.inf else arrival_s + prompt_tokens / AGEING_TOKENS_S, arrival_s


def first_token_seconds(
    own: Pending,
    others: Iterable[Pending],
    *,
    token_s: float,
    pending_tokens: int,
    free_places: int,
    waiting: int,
    finish_interval_s: float,
) -> float:
    """Seconds until the first token of `own`: the work of those whose turn comes first, and its own.

    Or, if that is longer, until a place is free for it. `token_s`: what a token of a prompt takes at present.
    `pending_tokens`: what is left of all prompts, which some have begun. `free_places`: requests that may come in
    before somebody ends; then one does every `finish_interval_s`. `waiting`: how many are not in. Cost: O(others).
    """
    before = [other for other in others if other.place < own.place]
    tokens = min(sum(other.prompt_tokens for other in before), pending_tokens)
    enters_s = max(min(len(before), waiting) + 1 - free_places, 0) * finish_interval_s
    return max(tokens * token_s, enters_s) + own.prompt_tokens * token_s


class FinishRate:
    """How often a request ends at present."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_FINISHES)

    def record(self, now_s: float) -> None:
        """One has ended."""
        self._ends_s.append(now_s)

    def interval_s(self, now_s: float) -> float:
        """Seconds between two ends, over the last 32; 0 if too few have ended to tell."""
        if len(self._ends_s) < 2:
            return 0.0
        return (now_s - self._ends_s[0]) / len(self._ends_s)
