"""`BlockPool`: blocks are held, idle or blank, and found by name only while their content is there."""

from __future__ import annotations

import pytest

from legato.core.blocks import BlockPool, Name


def named(pool: BlockPool, key: bytes, parent: bytes = b"") -> int:
    """A held block with a name."""
    block, _ = pool.take()
    assert pool.publish(block, Name(key, parent)) == block
    return block


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take()[0] for _ in range(5)) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    pool.check()


def test_a_block_is_free_again_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(2)
    block, _ = pool.take()
    pool.share(block)
    pool.release([block])
    assert (pool.references(block), pool.free) == (1, 1)
    pool.release([block])
    assert (pool.references(block), pool.free) == (0, 2)
    pool.check()


def test_the_block_released_last_is_taken_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.take()[0] for _ in range(3)]
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    assert pool.take()[0] == blocks[0]


def test_an_idle_block_is_found_and_shared_again_without_a_copy() -> None:
    pool = BlockPool(3)
    block = named(pool, b"k")
    pool.release([block])
    assert pool.free == 3
    assert b"k" in pool
    pool.share(pool.find(b"k"))
    assert (pool.references(block), pool.free) == (1, 2)
    pool.check()


def test_blank_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(3)
    old, new = named(pool, b"old"), named(pool, b"new")
    pool.release([old])
    pool.release([new])
    assert pool.take()[1] is None, "a blank one was left"
    assert pool.take() == (old, b"old")
    assert b"old" not in pool
    assert pool.take() == (new, b"new")
    assert pool.evictions == 2
    pool.check()


def test_a_block_that_is_used_again_is_evicted_later() -> None:
    pool = BlockPool(2)
    first, second = named(pool, b"1"), named(pool, b"2")
    pool.release([first, second])
    pool.share(first)
    pool.release([first])
    assert pool.take() == (second, b"2")


def test_content_that_somebody_holds_already_keeps_its_block() -> None:
    pool = BlockPool(3)
    first = named(pool, b"k")
    duplicate, _ = pool.take()
    assert pool.publish(duplicate, Name(b"k", b"")) == first
    assert pool.find(b"k") == first


def test_content_that_lies_idle_hands_its_name_to_the_block_that_is_held() -> None:
    pool = BlockPool(3)
    idle = named(pool, b"k")
    pool.release([idle])
    duplicate, _ = pool.take()
    free = pool.free
    assert pool.publish(duplicate, Name(b"k", b"")) == duplicate
    assert pool.find(b"k") == duplicate
    assert pool.free == free, "nobody gained or lost a block"
    pool.check()


def test_what_is_free_cannot_be_released_or_shared() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([0])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(0)


def test_check_finds_a_block_that_is_lost_or_outlives_its_parent() -> None:
    pool = BlockPool(3)
    pool.take()
    pool._references[0] = 0
    with pytest.raises(AssertionError, match="free or lost"):
        pool.check()
    pool = BlockPool(3)
    named(pool, b"child", b"parent")
    with pytest.raises(AssertionError, match="outlived"):
        pool.check()
