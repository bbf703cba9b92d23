"""Arithmetic of the paged KV pool: tokens, blocks and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legato.errors import ConfigError, ModelUnsupported
from legato.exec.spec import ModelSpec

KvDtype = Literal["f16", "f32"]

ITEM_BYTES: dict[KvDtype, int] = {"f16": 2, "f32": 4}
DEFAULT_POOL_BYTES = 1 << 30
BLOCK_TOKENS_MULTIPLE = 16
HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one model's KV pool. A block holds keys and values of `block_tokens` positions in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KvDtype

    @classmethod
    def of(cls, spec: ModelSpec, *, block_tokens: int, dtype: KvDtype) -> KvLayout:
        """Layout for a model. Raises ConfigError unless `block_tokens` is a positive multiple of 16."""
        if spec.head_dim % HEAD_DIM_MULTIPLE:
            raise ModelUnsupported(
                f"{spec.name}: head_dim {spec.head_dim} is not a multiple of {HEAD_DIM_MULTIPLE}, as the kernels need"
            )
        if block_tokens <= 0 or block_tokens % BLOCK_TOKENS_MULTIPLE:
            raise ConfigError(
                f"block_tokens {block_tokens} is not a positive multiple of {BLOCK_TOKENS_MULTIPLE}: use 32"
            )
        if dtype not in ITEM_BYTES:
            raise ConfigError(f"kv_dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        return cls(len(spec.layers), spec.kv_heads, spec.head_dim, block_tokens, dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one position's keys and values over all layers; values are padded to a multiple of 16 elements."""
        elements = self.head_dim + -(-self.head_dim // 16) * 16
        return self.layers * self.kv_heads * elements * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.token_bytes * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions of one sequence."""
        return -(-tokens // self.block_tokens)

    def blocks_in(self, nbytes: int) -> int:
        """Blocks that fit in `nbytes`."""
        return max(0, nbytes // self.block_bytes)


def default_pool_blocks(layout: KvLayout, *, max_model_len: int, max_num_seqs: int, available_bytes: int) -> int:
    """Blocks of an automatic pool: as many as 1 GiB holds, and at least one sequence at full length.

    Never more than all sequences can use, nor than a quarter of the available memory. May be too few for even one
    sequence of `max_model_len`, or none: the caller compares and refuses.
    """
    one = layout.blocks_for(max_model_len)
    wanted = min(one * max_num_seqs, max(one, layout.blocks_in(DEFAULT_POOL_BYTES)))
    return min(wanted, layout.blocks_in(available_bytes // 4))
