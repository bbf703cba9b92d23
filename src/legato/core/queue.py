"""`WaitingQueue`: requests that are not admitted, in the order in which a policy wants to see them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Any

from legato.core.slot import Slot

Turn = Callable[[Slot], tuple[Any, ...]]

_PAGE = 256


class WaitingQueue(Collection[Slot]):
    """By `priority`, then by `turn`, which must not change while a request waits.

    With `by_tenant`, each tenant has a queue of its own; the next request comes from the tenant that has been served
    least, those of its requests that were read before it counted in. O(sqrt(waiting)) an operation, in practice the
    same for ten and for a hundred thousand; beginning to read costs O(tenants that wait).
    """

    __slots__ = ("_places", "_queues", "_turn", "by_tenant", "tokens")

    def __init__(self, turn: Turn, *, by_tenant: bool = False) -> None:
        self.by_tenant = by_tenant
        self._turn = turn
        self._queues: dict[str, _SortedPages] = {}
        self._places: dict[int, tuple[Any, ...]] = {}
        self.tokens = 0
        """Known tokens of all that wait."""

    def __iter__(self) -> Iterator[Slot]:
        if self.by_tenant:
            return self._least_served_first()
        return iter(self._queues.get("", ()))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, Slot) and slot.request_id in self._places

    def push(self, slot: Slot) -> None:
        """Adds a request: one that has just come, or was preempted."""
        place = self._places[slot.request_id] = (slot.priority, *self._turn(slot))
        name = slot.request.tenant if self.by_tenant else ""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = _SortedPages()
        queue.add(place, slot)
        self.tokens += slot.known

    def remove(self, slot: Slot) -> None:
        """Takes out a request that waits."""
        name = slot.request.tenant if self.by_tenant else ""
        queue = self._queues[name]
        queue.discard(self._places.pop(slot.request_id))
        self.tokens -= slot.known
        if not queue.pages:
            del self._queues[name]

    def check(self) -> None:
        """Asserts that every request stands where its turn is. O(waiting)."""
        for name, queue in self._queues.items():
            slots = list(queue)
            places = [(slot.priority, *self._turn(slot)) for slot in slots]
            assert places == sorted(places), "the queue is out of order"
            assert places == [self._places[slot.request_id] for slot in slots], "a request's turn changed as it waited"
            assert not self.by_tenant or all(slot.request.tenant == name for slot in slots), "in another's queue"
        slots = list(self)
        assert len(slots) == len(self._places), "the queue lost a request"
        assert sum(slot.known for slot in slots) == self.tokens, "the queue lost count"

    def _least_served_first(self) -> Iterator[Slot]:
        heap: list[tuple[int, float, int, Slot, Iterator[Slot]]] = []
        for queue in self._queues.values():
            rest = iter(queue)
            slot = next(rest)
            heap.append((slot.priority, slot.tenant.service, slot.rank, slot, rest))
        heapify(heap)
        while heap:
            _, service, _, slot, rest = heap[0]
            yield slot
            following = next(rest, None)
            if following is None:
                heappop(heap)
                continue
            service += slot.tenant.price(slot.scheduled, slot.known - slot.scheduled)
            heapreplace(heap, (following.priority, service, following.rank, following, rest))


class _SortedPages:
    """Slots by place, which no two share, on pages of 256 or so: an insertion moves a page, not the whole list."""

    __slots__ = ("lasts", "pages")

    def __init__(self) -> None:
        self.pages: list[list[tuple[tuple[Any, ...], Slot]]] = []
        self.lasts: list[tuple[Any, ...]] = []

    def __iter__(self) -> Iterator[Slot]:
        for page in self.pages:
            for _, slot in page:
                yield slot

    def add(self, place: tuple[Any, ...], slot: Slot) -> None:
        if not self.pages:
            self.pages.append([(place, slot)])
            self.lasts.append(place)
            return
        n = min(bisect_left(self.lasts, place), len(self.pages) - 1)
        page = self.pages[n]
        insort(page, (place, slot), key=_place)
        self.lasts[n] = page[-1][0]
        if len(page) > 2 * _PAGE:
            self.pages[n : n + 1] = [page[:_PAGE], page[_PAGE:]]
            self.lasts[n : n + 1] = [page[_PAGE - 1][0], page[-1][0]]

    def discard(self, place: tuple[Any, ...]) -> None:
        n = bisect_left(self.lasts, place)
        page = self.pages[n]
        del page[bisect_left(page, place, key=_place)]
        if page:
            self.lasts[n] = page[-1][0]
        else:
            del self.pages[n], self.lasts[n]


def _place(entry: tuple[tuple[Any, ...], Slot]) -> tuple[Any, ...]:
    return entry[0]
