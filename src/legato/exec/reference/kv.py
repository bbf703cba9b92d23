"""Paged keys and values in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.exec.kv import KvLayout

AnyFloat = NDArray[Any]


class ReferenceKv:
    """Keys and values `[layers, blocks, block_tokens, kv_heads, head_dim]`, stored as float16 or float32."""

    def __init__(self, layout: KvLayout, blocks: int) -> None:
        shape = (layout.layers, blocks, layout.block_tokens, layout.kv_heads, layout.head_dim)
        stored = np.float16 if layout.dtype == "f16" else np.float32
        self.layout = layout
        self.keys: AnyFloat = np.zeros(shape, stored)
        self.values: AnyFloat = np.zeros(shape, stored)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, block: int, offset: int, key: AnyFloat, value: AnyFloat) -> None:
        """Stores one position: `key`, `value` `[kv_heads, head_dim]`, rounded to the stored type."""
        self.keys[layer, block, offset] = key
        self.values[layer, block, offset] = value

    def read(self, layer: int, block: int) -> tuple[AnyFloat, AnyFloat]:
        """Keys and values of one block, float32 `[block_tokens, kv_heads, head_dim]` each."""
        return self.keys[layer, block].astype(np.float32), self.values[layer, block].astype(np.float32)

    def sequence(self, layer: int, blocks: NDArray[np.int32], start: int, stop: int) -> tuple[AnyFloat, AnyFloat]:
        """Stored keys and values of positions `[start, stop)` of the sequence that owns `blocks`."""
        positions = np.arange(start, stop)
        block, offset = blocks[positions // self.layout.block_tokens], positions % self.layout.block_tokens
        return self.keys[layer, block, offset], self.values[layer, block, offset]
