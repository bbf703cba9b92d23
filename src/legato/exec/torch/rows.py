"""`Rows`: a batch on a device, with what attention wants to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from legato.exec.batch import Batch
from legato.exec.ops import IntArray


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of n rows each. `rows`, `positions` `[sequences, n]`: which, and where; `blocks [sequences, width]`."""

    rows: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """`tokens`, `positions`, `blocks`, `offsets` `[rows]`: the last two say where a row's keys are kept."""

    tokens: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    logit_rows: torch.Tensor
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, batch: Batch, block_tokens: int, device: torch.device) -> Rows:
        """Decodes are one group, for they have a row each; prompts mostly a group of their own."""

        def put(values: IntArray) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values, np.int64)).to(device)

        first, counts = batch.seq_row_starts[:-1], np.diff(batch.seq_row_starts)
        owners = np.repeat(np.arange(len(counts)), counts)
        groups = []
        for count in np.unique(counts[counts > 0]):
            members = np.flatnonzero(counts == count)
            rows = first[members, None] + np.arange(count)
            groups.append(Group(put(rows), put(batch.positions[rows]), put(batch.block_tables[members])))
        return cls(
            put(batch.tokens),
            put(batch.positions),
            put(batch.block_tables[owners, batch.positions // block_tokens]),
            put(batch.positions % block_tokens),
            put(batch.logit_rows),
            tuple(groups),
        )
