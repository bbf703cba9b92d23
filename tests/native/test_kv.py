import numpy as np
import pytest

from legato._native import KvCache
from legato.exec.kv import KvDtype, KvLayout
from native.replay import AttentionRig, Shape

SHAPES = [(32, 3, 64, "f16"), (32, 3, 64, "f32"), (16, 1, 72, "f16"), (48, 2, 8, "f32")]


@pytest.mark.parametrize(("block_tokens", "kv_heads", "head_dim", "dtype"), SHAPES)
def test_a_block_copied_out_and_into_another_cache_reads_the_same_to_the_bit(
    block_tokens: int, kv_heads: int, head_dim: int, dtype: KvDtype
) -> None:
    """And no other block changes. Caches of one shape may differ in how many blocks they have."""
    layout = KvLayout(3, kv_heads, head_dim, block_tokens, dtype)
    first, second = (KvCache(3, blocks, block_tokens, kv_heads, head_dim, dtype) for blocks in (5, 7))
    assert first.block_nbytes == layout.block_bytes == first.nbytes // 5
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (5, layout.block_bytes), np.uint8)
    for block in range(5):
        first.copy_in(block, blocks[block])
    held = np.zeros(layout.block_bytes, np.uint8)
    first.copy_out(3, held)
    np.testing.assert_array_equal(held, blocks[3])
    second.copy_in(6, held)
    for layer in range(3):
        for wanted, got in zip(first.read(layer, 3), second.read(layer, 6), strict=True):
            np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
    for block in range(6):
        second.copy_out(block, held)
        assert not held.any()
    for block in range(5):
        first.copy_out(block, held)
        np.testing.assert_array_equal(held, blocks[block])


def test_a_sequence_goes_on_from_blocks_that_were_away(isa: str) -> None:
    """Attention over a block that was overwritten and put back gives the bits it gave before."""
    shape = Shape(heads=2, kv_heads=1, dtype="f16")
    qkv = np.random.default_rng(1).standard_normal((100, shape.cols)).astype(np.float32)
    rig = AttentionRig(shape, qkv, sequences=1)
    tokens = np.arange(90)
    (wanted,) = rig.step([(0, 0, tokens)])
    away = np.empty((3, rig.kv.block_nbytes), np.uint8)
    for row, block in zip(away, rig.tables[0], strict=False):
        rig.kv.copy_out(int(block), row)
        rig.kv.copy_in(int(block), np.full(rig.kv.block_nbytes, 0x3C, np.uint8))
    for row, block in zip(away, rig.tables[0], strict=False):
        rig.kv.copy_in(int(block), row)
    (got,) = rig.step([(0, 89, tokens[89:])])
    np.testing.assert_array_equal(got, wanted[89:])


def test_a_copy_of_a_wrong_size_or_a_block_that_is_not_there_is_refused() -> None:
    kv = KvCache(2, 3, 16, 1, 8)
    right = np.zeros(kv.block_nbytes, np.uint8)
    for wrong in (right[:-1], np.zeros(kv.block_nbytes + 1, np.uint8), right[:0]):
        with pytest.raises(ValueError, match=f"a block has {kv.block_nbytes} bytes, got {len(wrong)}"):
            kv.copy_out(0, wrong)
        with pytest.raises(ValueError, match=f"a block has {kv.block_nbytes} bytes, got {len(wrong)}"):
            kv.copy_in(0, wrong)
    for block in (-1, 3):
        with pytest.raises(ValueError, match=rf"block {block} is not in \[0, 3\)"):
            kv.copy_out(block, right)
        with pytest.raises(ValueError, match=rf"block {block} is not in \[0, 3\)"):
            kv.copy_in(block, right)


def test_a_copy_is_of_the_memory_given() -> None:
    """Never of a converted copy of it: what is copied out would be lost with that."""
    kv = KvCache(2, 3, 16, 1, 8)
    for not_memory in (np.zeros(kv.block_nbytes, np.int8), np.zeros(2 * kv.block_nbytes, np.uint8)[::2]):
        with pytest.raises(TypeError):
            kv.copy_out(0, not_memory)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            kv.copy_in(0, not_memory)  # type: ignore[arg-type]
    frozen = np.zeros(kv.block_nbytes, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        kv.copy_out(0, frozen)
    kv.copy_in(0, frozen)
