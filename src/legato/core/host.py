"""`HostIndex`: which blocks are kept in host memory after the pool had to give them up, by number and key."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Move(NamedTuple):
    """A copy between pool and host memory, to be made before the rows of a step. Moves are made in their order.

    `saves`: from `block` to `slot`, else back. `key`: what the block is found by.
    """

    saves: bool
    block: int
    slot: int
    key: bytes


class HostIndex:
    """Slots 0 … `slots` - 1 of host memory, each empty or with the content of one block. The oldest makes room."""

    __slots__ = ("_empty", "_slots", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._empty = list(range(slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._slots)

    def put(self, key: bytes) -> int | None:
        """The slot that is to hold `key` from now on; None if there is no slot at all, or one holds it already."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        if self._empty:
            slot = self._empty.pop()
        elif self._slots:
            _, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[key] = slot
        return slot

    def pop(self, key: bytes) -> int:
        """Takes `key` out; its slot is not used again before `release`."""
        return self._slots.pop(key)

    def release(self, slot: int) -> None:
        """The content of a popped slot has been copied, as far as the order of moves goes."""
        self._empty.append(slot)

    def forget(self, key: bytes) -> None:
        """`key` was put and never copied."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._empty.append(slot)

    def check(self) -> None:
        """Asserts that each slot is empty or has one key."""
        assert sorted([*self._empty, *self._slots.values()]) == list(range(self.slots)), "a slot is lost or used twice"
