"""KV blocks in ordinary memory: room for what the KV pool has to give up."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class BlockMemory(Protocol):
    """Whose blocks can be copied out and in as bytes: the native `KvCache`."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers."""
        ...

    def copy_out(self, block: int, into: Bytes) -> None:
        """Fills `into` `[block_nbytes]`."""
        ...

    def copy_in(self, block: int, source: Bytes) -> None:
        """Makes the block what `copy_out` gave."""
        ...


class HostPool:
    """Host memory for `slots` blocks of `kv`. Which slot holds what is the caller's table.

    All of it is taken from the system at once: a page that is first written in a step can make that step wait. Each
    copy costs one block's bytes of memory traffic each way and releases the GIL; no step may write the block meanwhile.
    """

    def __init__(self, kv: BlockMemory, slots: int) -> None:
        self._kv = kv
        self._rows: Bytes = np.empty((slots, kv.block_nbytes), np.uint8)
        self._rows.fill(0)

    @property
    def slots(self) -> int:
        """How many blocks there is room for."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self._rows.nbytes

    def save(self, block: int, slot: int) -> None:
        """Copies a block of the KV pool into a slot."""
        self._kv.copy_out(block, self.read(slot))

    def restore(self, slot: int, block: int) -> None:
        """Copies a slot into a block of the KV pool: it is what was saved, to the bit."""
        self._kv.copy_in(block, self.read(slot))

    def read(self, slot: int) -> Bytes:
        """The slot's bytes `[block_nbytes]`: a view, what it shows changes with the slot."""
        assert 0 <= slot < self.slots, f"slot {slot} is not in [0, {self.slots})"
        row: Bytes = self._rows[slot]
        return row

    def write(self, slot: int, data: bytes) -> None:
        """Fills a slot with a block's bytes from elsewhere."""
        assert len(data) == self._kv.block_nbytes, f"a block has {self._kv.block_nbytes} bytes, got {len(data)}"
        self.read(slot)[:] = np.frombuffer(data, np.uint8)
