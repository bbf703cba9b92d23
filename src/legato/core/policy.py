"""Who goes first. A policy is four small functions; `plan_step` does the rest, so no policy can break a promise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from legato.core.view import Progress


@dataclass(frozen=True, slots=True)
class Policy:
    """Orders, each from first to last.

    `prefills`: which prefill in progress gets tokens first. `admissions`: which waiting request enters first; lazy,
    since the queue may be long, of which `lookahead` are read a step at most. `victims`: which running request is
    preempted first; the last one never is.
    `spare_blocks`: free blocks that an admission leaves to so many requests already admitted, so that their next
    decodes need not preempt whoever has just come in.
    `overtakes`: how often a request that does not fit may see one behind it admitted; never, once it was preempted.
    """

    name: str
    prefills: Callable[[Sequence[Progress]], Iterable[Progress]]
    admissions: Callable[[Collection[Progress]], Iterable[Progress]]
    victims: Callable[[Sequence[Progress]], Iterable[Progress]]
    spare_blocks: Callable[[int], int]
    lookahead: int = 32
    overtakes: int = 8


def as_admitted(requests: Collection[Progress]) -> Iterable[Progress]:
    """In the order of the view."""
    return requests


def important_first(requests: Sequence[Progress]) -> Iterable[Progress]:
    """By priority, then in the order of admission."""
    return sorted(requests, key=lambda r: r.priority)


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


FCFS = Policy(
    "fcfs", prefills=important_first, admissions=as_admitted, victims=newest_first, spare_blocks=one_block_each
)
