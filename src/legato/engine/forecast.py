"""How long a request that comes now waits for its first token: from what is known outside the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from legato.core.policy import AGEING_TOKENS_S


@dataclass(frozen=True, slots=True)
class Pending:
    """A request without a first token. `place`: priority first; the lower, the earlier its turn.

    `prompt_tokens`: those that have to be computed for it, as far as one knows.
    """

    place: tuple[float, ...]
    prompt_tokens: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine is. `token_s`: what a token of a prompt takes at present, its company included.

    `pending_tokens`: what is left of all prompts, which some have begun. `waiting`: requests that hold no slot;
    `running` ones do, each for `stay_s` after its first token. `free_places`: slots for more. `free_tokens`,
    `held_tokens`: room in the KV pool that is free, and taken by the running ones.
    """

    token_s: float
    pending_tokens: int
    waiting: int
    running: int
    free_places: int
    free_tokens: int
    held_tokens: int
    stay_s: float


def place_of(policy: str, priority: int, arrival_s: float, due_s: float, prompt_tokens: int) -> tuple[float, ...]:
    """Where a request stands among others of its tenant, as `core.policy` has it."""
    if policy == "fcfs":
        return priority, arrival_s
    return priority, due_s if due_s < math.inf else arrival_s + prompt_tokens / AGEING_TOKENS_S, arrival_s


def first_token_seconds(
    own: Pending, others: Iterable[Pending], load: Load, weights: Mapping[str, float] | None = None
) -> float:
    """Seconds until the first token of `own`: the work of those whose turn comes first, and its own.

    Or, if that is longer, until so many have ended that there is a slot and room in the KV pool. `weights`: of tenants
    that share, 1.0 for those not in it; None if they do not. Cost: O(others).
    """
    others = list(others)
    requests, tokens = _before(own, others) if weights is None else _before_in_shares(own, others, weights)
    tokens = min(tokens, load.pending_tokens)
    outside = min(requests, load.waiting)
    ends = outside + 1 - load.free_places
    missing_tokens = own.prompt_tokens + tokens * outside / max(requests, 1) - load.free_tokens
    if load.running and missing_tokens > 0 and load.held_tokens:
        ends = max(ends, math.ceil(missing_tokens * load.running / load.held_tokens))
    enters_s = max(ends, 0) * load.stay_s / max(load.running, 1)
    return max(tokens * load.token_s, enters_s) + own.prompt_tokens * load.token_s


def _before(own: Pending, others: Iterable[Pending]) -> tuple[float, float]:
    """Requests and prompt tokens whose turn comes before `own`."""
    before = [other.prompt_tokens for other in others if other.place < own.place]
    return len(before), sum(before)


def _before_in_shares(own: Pending, others: Iterable[Pending], weights: Mapping[str, float]) -> tuple[float, float]:
    """The same, where tenants share: of the others', as much as they are served until it is `own`'s turn among its
    tenant's. That all begin with equal counters is not so for one that has been ahead: its work is overestimated.
    """
    priority = own.place[0]
    requests, tokens = _before(own, (o for o in others if o.tenant == own.tenant or o.place[0] < priority))
    mine = own.prompt_tokens + sum(o.prompt_tokens for o in others if o.tenant == own.tenant and o.place < own.place)
    theirs: dict[str, tuple[int, int]] = {}
    for other in others:
        if other.tenant != own.tenant and other.place[0] == priority:
            count, total = theirs.get(other.tenant, (0, 0))
            theirs[other.tenant] = count + 1, total + other.prompt_tokens
    for tenant, (count, total) in theirs.items():
        served = min(total, mine * weights.get(tenant, 1.0) / weights.get(own.tenant, 1.0))
        requests += math.ceil(count * served / max(total, 1))
        tokens += served
    return requests, tokens
