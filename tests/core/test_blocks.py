"""`BlockPool`: a block is free, or has as many references as holders."""

import pytest

from legato.core.blocks import BlockPool


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take() for _ in range(5)) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share([block])
    pool.release([block])
    assert (pool.free, pool.references(block)) == (1, 1)
    pool.release([block])
    assert (pool.free, pool.references(block)) == (2, 0)
    pool.check()


def test_the_block_released_last_is_taken_first() -> None:
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    pool.release([second, first])
    assert pool.take() == first


def test_releasing_a_free_block_is_a_bug() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release([block])


def test_sharing_a_free_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="cannot be shared"):
        BlockPool(1).share([0])


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="free or lost"):
        pool.check()
