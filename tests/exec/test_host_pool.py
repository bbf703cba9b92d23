from __future__ import annotations

import numpy as np
import pytest

from exec.backends import ISAS, needs_native
from legato.exec.host_pool import Bytes, HostPool

if ISAS:
    from legato._native import KvCache


class ListedBlocks:
    """A KV pool of four blocks of three bytes."""

    block_nbytes = 3

    def __init__(self) -> None:
        self.blocks = np.arange(12, dtype=np.uint8).reshape(4, 3)

    def copy_out(self, block: int, into: Bytes) -> None:
        into[:] = self.blocks[block]

    def copy_in(self, block: int, source: Bytes) -> None:
        self.blocks[block] = source


def test_a_block_comes_back_from_the_slot_it_was_saved_in() -> None:
    kv = ListedBlocks()
    pool = HostPool(kv, 2)
    pool.save(3, 0)
    pool.save(1, 1)
    pool.restore(0, 1)
    pool.restore(1, 2)
    assert kv.blocks.tolist() == [[0, 1, 2], [9, 10, 11], [3, 4, 5], [9, 10, 11]]


def test_a_slot_can_be_filled_with_bytes_from_elsewhere() -> None:
    kv = ListedBlocks()
    pool = HostPool(kv, 2)
    pool.write(1, b"abc")
    pool.restore(1, 0)
    assert bytes(kv.blocks[0]) == bytes(pool.read(1)) == b"abc"


def test_a_slot_that_is_not_there_or_bytes_of_another_size_are_our_bug() -> None:
    """NumPy would take slot -1 for the last, and spread one byte over a whole slot."""
    pool = HostPool(ListedBlocks(), 2)
    assert (pool.slots, pool.nbytes) == (2, 6)
    for slot in (-1, 2):
        with pytest.raises(AssertionError, match=rf"slot {slot} is not in \[0, 2\)"):
            pool.save(0, slot)
    with pytest.raises(AssertionError, match="a block has 3 bytes, got 1"):
        pool.write(0, b"a")


@needs_native
def test_native_blocks_are_saved_and_restored_to_the_bit() -> None:
    kv = KvCache(2, 3, 16, 1, 8, "f32")
    pool = HostPool(kv, 4)
    data = np.random.default_rng(0).integers(0, 256, kv.block_nbytes, np.uint8)
    kv.copy_in(2, data)
    pool.save(2, 3)
    pool.restore(3, 0)
    np.testing.assert_array_equal(pool.read(3), data)
    for layer in range(2):
        for wanted, got in zip(kv.read(layer, 2), kv.read(layer, 0), strict=True):
            np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
