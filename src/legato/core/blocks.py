"""`BlockPool`: the KV cache as numbered blocks with reference counts. A block table is the only way to KV."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class Name(NamedTuple):
    """What a computed block is found by, and the key of the block before it (empty for the first of a sequence)."""

    key: bytes
    parent: bytes


class BlockPool:
    """Hands out the block ids 0 … `blocks` - 1. Cost: O(1) a block.

    A block is held (as many references as holders), idle (nobody holds it, but it has a name: its content may be asked
    for again) or blank. Idle and blank blocks are free. Blank ones are taken first, the one released last before the
    others, since it is still warm in the caches of the processor; then idle ones, the least recently used first.
    """

    __slots__ = ("_blank", "_by_key", "_idle", "_names", "_references", "evictions")

    def __init__(self, blocks: int) -> None:
        self._references = array("i", bytes(array("i").itemsize * blocks))
        self._blank = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._names: dict[int, Name] = {}
        self._by_key: dict[bytes, int] = {}
        self.evictions = 0

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks without a holder."""
        return len(self._blank) + len(self._idle)

    @property
    def named(self) -> int:
        """Blocks that can be found by their key, held or idle."""
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        """Whether a computed block has this key."""
        return key in self._by_key

    def find(self, key: bytes) -> int:
        """The block of that key, which is there."""
        return self._by_key[key]

    def references(self, block: int) -> int:
        """Holders of `block`."""
        return self._references[block]

    def take(self) -> tuple[int, bytes | None]:
        """A free block, now with one holder, and the key under which it can no longer be found, if it had one.

        Plans count blocks beforehand, so an empty pool here is a bug.
        """
        lost = None
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            lost = self._forget(block)
            self.evictions += 1
        self._references[block] = 1
        return block, lost

    def share(self, block: int) -> None:
        """One more holder for `block`, which has a holder or a name."""
        if not self._references[block]:
            assert block in self._idle, f"block {block} is blank and cannot be shared"
            del self._idle[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder fewer for each of `blocks`; those that become idle will be evicted in this order."""
        for block in blocks:
            references = self._references[block]
            assert references > 0, f"block {block} is released more often than taken"
            self._references[block] = references - 1
            if references == 1:
                if block in self._names:
                    self._idle[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, name: Name) -> int:
        """Gives a held, computed block its name; returns the block that has it from now on.

        That is another one if somebody else holds the same content already: the caller does well to share that one.
        """
        other = self._by_key.get(name.key, block)
        if other != block:
            if self._references[other]:
                return other
            del self._idle[other]
            self._forget(other)
            self._blank.append(other)
        self._names[block] = name
        self._by_key[name.key] = block
        return block

    def _forget(self, block: int) -> bytes:
        key = self._names.pop(block).key
        del self._by_key[key]
        return key

    def check(self) -> None:
        """Asserts that each block is held, idle or blank, and that no name is there without its parent. O(blocks)."""
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a block is free twice"
        assert not blank & self._idle.keys(), "a block is blank and idle"
        for block, references in enumerate(self._references):
            assert references >= 0, f"block {block} has {references} holders"
            is_free = block in blank or block in self._idle
            assert (references == 0) == is_free, f"block {block}: {references} holders, yet it is free or lost"
        assert not blank & self._names.keys(), "a blank block has a name"
        assert self._idle.keys() <= self._names.keys(), "an idle block has no name"
        assert self._by_key == {name.key: block for block, name in self._names.items()}, "names and keys differ"
        orphans = [name for name in self._names.values() if name.parent and name.parent not in self._by_key]
        assert not orphans, "a named block outlived the one before it"
