"""Which replica a request goes to: `Router`. A router knows what one before a fleet can know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

from legato.errors import ConfigError
from legato.sim.replica import Replica
from legato.workload.arrivals import Arrival

Router = Callable[[Arrival, Sequence[Replica]], int]
"""The index of the replica for a request that comes now."""

_MOST_PREFIXES = 200_000
# Whoever has the prefix takes the request, unless it has so many more than the least loaded, and so many times more.
_MORE, _TIMES_MORE = 4, 1.5


def round_robin() -> Router:
    """One after the other."""
    numbers = count()
    return lambda arrival, replicas: next(numbers) % len(replicas)


def least_loaded() -> Router:
    """The fewest unfinished requests; of equals, the next one after the last that was chosen."""
    last = -1

    def route(arrival: Arrival, replicas: Sequence[Replica]) -> int:
        nonlocal last
        n = len(replicas)
        last = min(range(n), key=lambda i: (replicas[i].unfinished, (i - last - 1) % n))
        return last

    return route


def prefix_aware() -> Router:
    """Where the longest beginning of the prompt was sent last, unless that one is far busier than the least loaded.

    Of prompts, those texts are known that they share with others. Memory: the last 200,000 beginnings.
    """
    by_load = least_loaded()
    owners: OrderedDict[tuple[int, int], int] = OrderedDict()

    def route(arrival: Arrival, replicas: Sequence[Replica]) -> int:
        keys, key, chosen = [], (0, 0), -1
        for text, _ in arrival.shared:
            key = (hash((key, text)), text)
            keys.append(key)
            chosen = owners.get(key, chosen)
        least = by_load(arrival, replicas)
        limit = max(_TIMES_MORE * replicas[least].unfinished, replicas[least].unfinished + _MORE)
        if chosen < 0 or replicas[chosen].unfinished > limit:
            chosen = least
        for key in keys:
            owners[key] = chosen
            owners.move_to_end(key)
        while len(owners) > _MOST_PREFIXES:
            owners.popitem(last=False)
        return chosen

    return route


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}


def router(name: str) -> Router:
    """By name. Raises ConfigError with those there are."""
    if name not in ROUTERS:
        raise ConfigError(f"router '{name}' is not known; there are {', '.join(ROUTERS)}")
    return ROUTERS[name]()
