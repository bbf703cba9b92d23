"""`BlockPool`: the KV cache as numbered blocks with reference counts. A block table is the only way to KV."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class BlockPool:
    """Hands out the block ids 0 … `blocks` - 1. Cost: O(1) a block.

    A block is free, or it has as many references as holders; it is free again when the last holder releases it. The
    block released last is taken first: it is the one still warm in the caches of the processor.
    """

    __slots__ = ("_free", "_references")

    def __init__(self, blocks: int) -> None:
        self._references = array("i", bytes(array("i").itemsize * blocks))
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    def references(self, block: int) -> int:
        """Holders of `block`."""
        return self._references[block]

    def take(self) -> int:
        """A free block, now with one holder. Plans count blocks beforehand, so an empty pool here is a bug."""
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of `blocks`, which have one already."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free and cannot be shared"
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder fewer for each of `blocks`."""
        for block in blocks:
            references = self._references[block]
            assert references > 0, f"block {block} is released more often than taken"
            self._references[block] = references - 1
            if references == 1:
                self._free.append(block)

    def check(self) -> None:
        """Asserts that the free blocks are exactly those without a holder. Cost: O(blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, references in enumerate(self._references):
            assert references >= 0, f"block {block} has {references} holders"
            assert (references == 0) == (block in free), f"block {block}: {references} holders, yet it is free or lost"
