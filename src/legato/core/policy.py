"""Who goes first. A policy is three small functions; `plan_step` does the rest, so no policy can break a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from legato.core.view import Progress

AGEING_TOKENS_S = 500.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Orders, each from first to last.

    `prompts`: prefills in progress and the front of the queue, `lookahead` of it at most, in the order in which they
    get the step's tokens; the third argument is the time in seconds. `victims`: which running request is preempted
    first; the last one never is.
    `spare_blocks`: free blocks that an admission leaves to so many requests already admitted, so that their next
    decodes need not preempt whoever has just come in.
    `overtakes`: how often a request that does not fit may see one behind it admitted; never, once it was preempted.
    """

    name: str
    prompts: Callable[[Sequence[Progress], Iterable[Progress], float], Iterable[Progress]]
    victims: Callable[[Sequence[Progress]], Iterable[Progress]]
    spare_blocks: Callable[[int], int]
    lookahead: int = 32
    overtakes: int = 8


def first_come(prefills: Sequence[Progress], waiting: Iterable[Progress], now_s: float) -> Iterable[Progress]:
    """What is in progress by priority, then in the order of admission; then the queue as it stands."""
    return chain(sorted(prefills, key=lambda r: r.priority), waiting)


def shortest_first(prefills: Sequence[Progress], waiting: Iterable[Progress], now_s: float) -> Iterable[Progress]:
    """By priority; whoever was preempted; then who has the fewest tokens left, less `AGEING_TOKENS_S` a second waited.

    A short prompt does not wait for a long one, and a long one is first among all that come later than its length over
    `AGEING_TOKENS_S`: nobody starves.
    """

    def turn(request: Progress) -> tuple[int, bool, float, int]:
        tokens = request.known - request.scheduled - AGEING_TOKENS_S * (now_s - request.arrival_s)
        return request.priority, not request.preemptions, tokens, request.rank

    return sorted(chain(prefills, waiting), key=turn)


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


FCFS = Policy("fcfs", prompts=first_come, victims=newest_first, spare_blocks=one_block_each)
SLO = Policy("slo", prompts=shortest_first, victims=newest_first, spare_blocks=one_block_each)
POLICIES = {policy.name: policy for policy in (FCFS, SLO)}
