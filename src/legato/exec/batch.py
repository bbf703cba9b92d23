"""The rows of one step as columns of integers: what a backend computes from."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from legato.core.plan import StepPlan
from legato.core.view import RowSource
from legato.exec.ops import IntArray


@dataclass(frozen=True, slots=True)
class Batch:
    """One ragged batch; all arrays int32. Sequence s owns rows `[seq_row_starts[s], seq_row_starts[s + 1])`.

    `tokens`, `positions` `[rows]`: positions of a sequence are consecutive. `block_tables [sequences, width]`: ids of
    the KV blocks in order of position, zero-filled past those the step needs. `logit_rows`: rows to give logits for,
    those that sample, in plan order, then those of `plan.scores`.
    """

    tokens: IntArray
    positions: IntArray
    seq_row_starts: IntArray
    block_tables: IntArray
    logit_rows: IntArray


def build_batch(plan: StepPlan, source: RowSource, block_tokens: int) -> Batch:
    """Rows of the plan, in plan order. Cost: a few memory copies a sequence, nothing that grows with its history.

    Token and block sequences that are `array('i')` are copied as memory; any other sequence of ints works, slower.
    """
    starts = np.array(plan.starts, np.int32)
    counts = np.array(plan.counts, np.int32)
    row_starts = np.zeros(len(plan.counts) + 1, np.int32)
    np.cumsum(counts, out=row_starts[1:])
    width = int((starts + counts).max(initial=0) + block_tokens - 1) // block_tokens
    padding = array("i", bytes(4 * width))
    tokens, blocks = array("i"), array("i")
    for request_id, start, count in zip(plan.request_ids, plan.starts, plan.counts, strict=True):
        known = source.tokens(request_id)
        if count == 1:
            tokens.append(known[start])
        else:
            tokens.extend(known[start : start + count])
        needed = (start + count + block_tokens - 1) // block_tokens
        blocks.extend(source.blocks(request_id)[:needed])
        blocks.extend(padding[needed:])
    rows = int(row_starts[-1])
    assert len(tokens) == rows, "the source lacks tokens of the plan"
    assert len(blocks) == width * len(plan.counts), "the source lacks blocks of the plan"
    sampled = row_starts[1:][np.array(plan.samples, bool)] - 1
    return Batch(
        tokens=np.frombuffer(tokens, np.int32) if rows else np.empty(0, np.int32),
        positions=np.arange(rows, dtype=np.int32) + np.repeat(starts - row_starts[:-1], counts),
        seq_row_starts=row_starts,
        block_tables=np.array(blocks, np.int32).reshape(len(plan.counts), width),
        logit_rows=np.concatenate([sampled, *_scored_rows(plan, row_starts)]) if plan.scores else sampled,
    )


def _scored_rows(plan: StepPlan, row_starts: IntArray) -> Iterator[IntArray]:
    """For each of `plan.scores`, the rows of the batch where its positions are."""
    first_rows = dict(zip(plan.request_ids, row_starts[:-1] - np.array(plan.starts, np.int32), strict=True))
    for request_id, start, stop in plan.scores:
        yield np.arange(start, stop, dtype=np.int32) + first_rows[request_id]
