"""`WaitingQueue`: requests that are not admitted, by priority, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import takewhile

from legato.core.slot import Slot


class WaitingQueue(Collection[Slot]):
    """In order of (`priority`, `rank`). O(1) an operation for a handful of priorities, however many wait."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, Slot]] = {}

    def __iter__(self) -> Iterator[Slot]:
        for priority in sorted(self._queues):
            yield from self._queues[priority].values()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, Slot) and slot.request_id in self._queues.get(slot.priority, ())

    def push(self, slot: Slot) -> None:
        """Adds a request that came after all others."""
        self._queues.setdefault(slot.priority, OrderedDict())[slot.request_id] = slot

    def put_back(self, slot: Slot) -> None:
        """Adds a request that was admitted once: its place is that of its arrival, near the front.

        Cost: O(requests that came earlier and still wait): those it overtook.
        """
        queue = self._queues.setdefault(slot.priority, OrderedDict())
        earlier = list(takewhile(lambda other: other.rank < slot.rank, queue.values()))
        for other in (slot, *reversed(earlier)):
            queue[other.request_id] = other
            queue.move_to_end(other.request_id, last=False)

    def remove(self, slot: Slot) -> None:
        """Takes out a request that waits."""
        queue = self._queues[slot.priority]
        del queue[slot.request_id]
        if not queue:
            del self._queues[slot.priority]
