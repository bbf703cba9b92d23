"""Who goes first. A policy is a few small functions; `plan_step` does the rest, so no policy can break a promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Any

from legato.core.view import Progress

AGEING_TOKENS_S = 500.0


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step is planned, and what a token of a prompt takes then, in seconds; 0 if nobody knows."""

    now_s: float = 0.0
    token_s: float = 0.0

    def is_too_late_for(self, request: Progress) -> bool:
        """Whether its first token is wanted at some time, and will not be there even if nobody goes before it."""
        if request.due_s == math.inf:
            return False
        return self.now_s + self.token_s * (request.known - request.scheduled) > request.due_s


@dataclass(frozen=True, slots=True)
class Policy:
    """Orders, each from first to last.

    `prompts`: prefills in progress and the front of the queue, `lookahead` of it at most, in the order in which they
    get the step's tokens.
    `turn`: by which the queue is sorted, after priority; no two requests have the same, and it does not change while a
    request waits. `by_tenant`: those of the tenant that was served least come first.
    `leaves`: of its rows, what a prompt that a step does not finish leaves to those behind it.
    `victims`: which running request is preempted first; the last one never is.
    `spare_blocks`: free blocks that an admission leaves to so many requests already admitted, so that their next
    decodes need not preempt whoever has just come in.
    `overtakes`: how often a request that does not fit may see one behind it admitted; never, once it was preempted.
    """

    name: str
    prompts: Callable[[Sequence[Progress], Iterable[Progress], Moment], Iterable[Progress]]
    turn: Callable[[Progress], tuple[Any, ...]]
    victims: Callable[[Sequence[Progress]], Iterable[Progress]]
    spare_blocks: Callable[[int], int]
    by_tenant: bool = False
    leaves: float = 0.0
    lookahead: int = 32
    overtakes: int = 8


def first_come(prefills: Sequence[Progress], waiting: Iterable[Progress], moment: Moment) -> Iterable[Progress]:
    """What is in progress by priority, then in the order of admission; then the queue as it stands."""
    return chain(sorted(prefills, key=lambda r: r.priority), waiting)


def arrival(request: Progress) -> tuple[Any, ...]:
    """In the order of arrival."""
    return (request.rank,)


def earliest_due(prefills: Sequence[Progress], waiting: Iterable[Progress], moment: Moment) -> Iterable[Progress]:
    """By priority; whoever was preempted; then whose first token is due first.

    That is when the request wants it, as long as that is possible; else when it has waited a second for each
    `AGEING_TOKENS_S` tokens that it has left. So a short prompt does not wait for a long one, and a long one is first
    among all that come later than its length over `AGEING_TOKENS_S`: nobody starves.
    """

    def place(request: Progress) -> tuple[Any, ...]:
        if moment.is_too_late_for(request):
            return (request.priority, not request.preemptions, _aged_s(request), request.rank)
        return (request.priority, *turn_by_due(request))

    return sorted(chain(prefills, waiting), key=place)


def turn_by_due(request: Progress) -> tuple[Any, ...]:
    """The same, for a queue: what will be too late is found when it comes to the front."""
    due_s = _aged_s(request) if request.due_s == math.inf else request.due_s
    return (not request.preemptions, due_s, request.rank)


def least_served(prefills: Sequence[Progress], waiting: Iterable[Progress], moment: Moment) -> Iterator[Progress]:
    """By priority; then the tenant that has been served least for its weight, its requests as `earliest_due` has them.

    What was handed out before counts in: in one step too, tenants take turns.
    """
    shares: dict[tuple[int, str], list[Progress]] = {}
    for request in earliest_due(prefills, waiting, moment):
        shares.setdefault((request.priority, request.tenant.name), []).append(request)
    heap = [(share[0].priority, share[0].tenant.service, share[0].rank, share[::-1]) for share in shares.values()]
    heapify(heap)
    while heap:
        priority, service, _, share = heap[0]
        request = share.pop()
        yield request
        if not share:
            heappop(heap)
            continue
        service += request.tenant.price(request.scheduled, request.known - request.scheduled)
        heapreplace(heap, (priority, service, share[-1].rank, share))


def newest_first(requests: Sequence[Progress]) -> Iterable[Progress]:
    """Least important first; of equals, who was preempted least often, then who came last: it has the least to lose.

    The oldest of the most important comes last of all, whatever the others went through: it always goes on.
    """
    oldest = min(requests, key=lambda r: (r.priority, r.rank))
    return sorted(requests, key=lambda r: (r is oldest, -r.priority, r.preemptions, -r.rank))


def one_block_each(admitted: int) -> int:
    """A block for each request that is already in.

    Rows computed for each needed, and steps: 1.33, 13,182 without; 1.13, 13,269 with one; 1.06, 13,833 with two each
    (400 requests of 50-400 + 50-300 tokens, 64 blocks of 32: `benchmarks/scheduler.py --overload`).
    """
    return admitted


def _aged_s(request: Progress) -> float:
    return request.arrival_s + (request.known - request.scheduled) / AGEING_TOKENS_S


FCFS = Policy("fcfs", first_come, arrival, newest_first, one_block_each)
SLO = Policy("slo", earliest_due, turn_by_due, newest_first, one_block_each, leaves=0.25)
FAIR = Policy("fair", least_served, turn_by_due, newest_first, one_block_each, by_tenant=True, leaves=0.25)
POLICIES = {policy.name: policy for policy in (FCFS, SLO, FAIR)}
