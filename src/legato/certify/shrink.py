"""`shrink`: from a schedule that fails to a small one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from legato.certify.schedule import Arrival, Schedule

DEFAULT_RUNS, DEFAULT_SECONDS = 300, 60.0


def shrink(
    schedule: Schedule,
    fails: Callable[[Schedule], bool],
    *,
    most_blocks: int,
    block_tokens: int,
    clock: Callable[[], float],
    runs: int = DEFAULT_RUNS,
    seconds: float = DEFAULT_SECONDS,
) -> tuple[Schedule, int]:
    """The smallest schedule found, and how many times `fails` was asked: at most `runs` times, for about `seconds`.

    Greedy delta debugging: the first simpler variant that still fails is taken, and the search begins anew.
    `most_blocks`: the largest pool, which is the simplest.
    """
    asked, deadline_s = 0, clock() + seconds
    tried = {schedule}
    progress = True
    while progress:
        progress = False
        for candidate in simpler(schedule, most_blocks, block_tokens):
            if candidate in tried:
                continue
            if asked >= runs or clock() >= deadline_s:
                return schedule, asked
            tried.add(candidate)
            asked += 1
            if fails(candidate):
                schedule, progress = candidate, True
                break
    return schedule, asked


def simpler(schedule: Schedule, most_blocks: int, block_tokens: int) -> Iterator[Schedule]:
    """Variants with less in them, those that leave out most first."""
    yield from _fewer_arrivals(schedule)
    yield from _plainer(schedule, most_blocks)
    for index, arrival in enumerate(schedule.arrivals):
        for variant in _plainer_arrival(arrival):
            yield _with_arrival(schedule, index, variant)
    yield from _smaller_chunks(schedule)
    for index, arrival in enumerate(schedule.arrivals):
        for length in _smaller(arrival.length, block_tokens):
            yield _with_arrival(schedule, index, replace(arrival, length=length))
        for max_tokens in _smaller(arrival.max_tokens, 2):
            yield _with_arrival(schedule, index, replace(arrival, max_tokens=max_tokens))
        for delay_steps in _smaller(arrival.delay_steps + 1, 2):
            yield _with_arrival(schedule, index, replace(arrival, delay_steps=delay_steps - 1))
    for number, (step, which) in enumerate(schedule.preempt):
        others = schedule.preempt[:number] + schedule.preempt[number + 1 :]
        for earlier in _smaller(step + 1, 2):
            yield replace(schedule, preempt=tuple(sorted((*others, (earlier - 1, which)))))
        if which:
            yield replace(schedule, preempt=tuple(sorted((*others, (step, 0)))))


def _fewer_arrivals(schedule: Schedule) -> Iterator[Schedule]:
    count = len(schedule.arrivals)
    if count > 3:
        half = count // 2
        yield _without(schedule, set(range(half)))
        yield _without(schedule, set(range(half, count)))
    if count > 1:
        for index in range(count):
            yield _without(schedule, {index})


def _without(schedule: Schedule, gone: set[int]) -> Schedule:
    """Those left are renumbered; who came after one that is gone comes at the beginning, and follows nobody."""
    number = {old: new for new, old in enumerate(i for i in range(len(schedule.arrivals)) if i not in gone)}

    def renumbered(index: int | None) -> int | None:
        return None if index is None else number.get(index)

    kept = [
        replace(arrival, follows=renumbered(arrival.follows), after=renumbered(arrival.after))
        for index, arrival in enumerate(schedule.arrivals)
        if index not in gone
    ]
    return replace(schedule, arrivals=tuple(kept))


def _plainer(schedule: Schedule, most_blocks: int) -> Iterator[Schedule]:
    if schedule.preempt:
        yield replace(schedule, preempt=())
        for number in range(len(schedule.preempt)):
            yield replace(schedule, preempt=schedule.preempt[:number] + schedule.preempt[number + 1 :])
    plain: list[dict[str, Any]] = [
        {"threads": 1},
        {"ahead": False},
        {"policy": "fcfs"},
        {"cache": False, "host_blocks": 0},
        {"host_blocks": 0},
        {"pool_blocks": most_blocks},
        {"max_seqs": 1},
    ]
    for change in plain:
        if any(getattr(schedule, name) != value for name, value in change.items()):
            yield replace(schedule, **change)


def _plainer_arrival(arrival: Arrival) -> Iterator[Arrival]:
    plain: list[dict[str, Any]] = [
        {"abort_steps": None},
        {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 0},
        {"follows": None},
        {"after": None, "delay_steps": 0},
        {"after": None},
        {"delay_steps": 0},
        {"priority": 0},
        {"salt": ""},
        {"head": 0},
        {"tail": 0},
        {"document": 0},
    ]
    for change in plain:
        if any(getattr(arrival, name) != value for name, value in change.items()):
            yield replace(arrival, **change)


def _smaller_chunks(schedule: Schedule) -> Iterator[Schedule]:
    """Smaller steps with prompts that end as far from a chunk's edge as before, then with the prompts as they are."""
    chunk = schedule.step_tokens
    for smaller in _smaller(chunk, 16):
        seqs = min(schedule.max_seqs, smaller)
        scaled = [_scaled(arrival.length, chunk, smaller) for arrival in schedule.arrivals]
        arrivals = (replace(a, length=n) for a, n in zip(schedule.arrivals, scaled, strict=True))
        yield replace(schedule, step_tokens=smaller, max_seqs=seqs, arrivals=tuple(arrivals))
        yield replace(schedule, step_tokens=smaller, max_seqs=seqs)


def _scaled(length: int, chunk: int, smaller: int) -> int:
    chunks = (length + chunk // 2) // chunk
    return max(1, min(length, chunks * smaller + length - chunks * chunk))


def _smaller(number: int, unit: int) -> Iterator[int]:
    """Positive numbers below `number`, the smallest first."""
    if number > 1:
        yield from sorted({1, number // 2, number - number // 4, max(1, number - unit), number - 1} - {number})


def _with_arrival(schedule: Schedule, index: int, arrival: Arrival) -> Schedule:
    arrivals = schedule.arrivals
    return replace(schedule, arrivals=(*arrivals[:index], arrival, *arrivals[index + 1 :]))
