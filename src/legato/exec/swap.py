"""What it costs to copy a KV block, and what to compute it: measured on this machine, with this model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from legato.exec.batch import Batch
from legato.exec.executor import Backend
from legato.exec.host_pool import HostPool

MEASURED_TOKENS = 128
_COPIES = 32


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Seconds for one block: out of the pool and back again, and computed as part of a prompt."""

    copy_s: float
    compute_s: float

    @property
    def is_worthwhile(self) -> bool:
        """Whether a block that will be needed again should be copied rather than computed."""
        return self.copy_s < self.compute_s

    def __str__(self) -> str:
        return f"copying a block takes {1e3 * self.copy_s:.2f} ms, computing it {1e3 * self.compute_s:.2f} ms"


def measure_swap(backend: Backend, host: HostPool, *, block_tokens: int, kv_blocks: int, max_rows: int) -> SwapCost:
    """Runs two short prompts through `backend` and some copies; overwrites the first blocks of an unused pool.

    `max_rows`: of a step, and of a prompt. Takes the better of two runs of 128 tokens, or as many as fit, and of copies
    of several blocks: what is touched for the first time costs more.
    """
    rows = min(MEASURED_TOKENS, max_rows, kv_blocks * block_tokens)
    blocks = -(-rows // block_tokens)
    batch = Batch(
        tokens=np.zeros(rows, np.int32),
        positions=np.arange(rows, dtype=np.int32),
        seq_row_starts=np.array([0, rows], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32).reshape(1, blocks),
        logit_rows=np.array([rows - 1], np.int32),
    )
    compute_s = min(_seconds(lambda: backend.run(batch)) for _ in range(2)) * block_tokens / rows

    def copy() -> None:
        for i in range(_COPIES):
            host.save(i % kv_blocks, i % host.slots)
            host.restore(i % host.slots, i % kv_blocks)

    return SwapCost(min(_seconds(copy) for _ in range(2)) / _COPIES, compute_s)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
