"""Paged keys and values as torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from legato.exec.kv import KvLayout

_STORED = {"f16": torch.float16, "f32": torch.float32}


class TorchKv:
    """Keys and values `[layers, blocks, block_tokens, kv_heads, head_dim]`, as `layout.dtype` says, on `device`."""

    def __init__(self, layout: KvLayout, blocks: int, device: torch.device) -> None:
        shape = (layout.layers, blocks, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.layout = layout
        self.keys = torch.zeros(shape, dtype=_STORED[layout.dtype], device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return int(self.keys.nbytes + self.values.nbytes)

    def write(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores a position a row: `k`, `v` `[rows, kv_heads, head_dim]`, rounded to the stored type."""
        self.keys[layer, blocks, offsets] = k.to(self.keys.dtype)
        self.values[layer, blocks, offsets] = v.to(self.values.dtype)

    def sequences(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored in `blocks [sequences, width]`: `[sequences, kv_heads, width * block_tokens, head_dim]` each."""
        keys, values = (part[layer, blocks].flatten(1, 2).transpose(1, 2) for part in (self.keys, self.values))
        return keys, values

    def read(self, layer: int, block: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of one block, float32 `[block_tokens, kv_heads, head_dim]` each."""
        keys, values = (part[layer, block].float().cpu().numpy() for part in (self.keys, self.values))
        return keys, values
