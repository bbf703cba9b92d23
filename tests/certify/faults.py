"""Faults to plant: each is a mistake that an engine could well have, and that no text shows at a glance."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from legato.core.host import Move
from legato.core.memory import KvMemory
from legato.core.plan import StepPlan
from legato.core.prefix import Prefix
from legato.core.slot import Slot
from legato.core.state import SchedulerState
from legato.core.view import RowSource
from legato.exec import batch as batches
from legato.exec import sampler
from legato.exec.batch import Batch
from legato.exec.host_pool import HostPool
from legato.exec.ops import FloatArray
from legato.exec.reference.ops import ReferenceOps, Rows
from legato.exec.sampler import Sampler


class MaskOffByOne(ReferenceOps):
    """A row of a chunk that does not start at 0 does not see its own position, only those before it."""

    def attention(self, q: Rows, layer: int, **options: Any) -> Rows:
        batch = self.batch
        counts = np.diff(batch.seq_row_starts)
        starts = np.repeat(batch.positions[batch.seq_row_starts[:-1]], counts)
        late = (starts > 0) & (np.repeat(counts, counts) > 1)
        whole = batch.positions
        self.batch = Batch(batch.tokens, whole - late, batch.seq_row_starts, batch.block_tables, batch.logit_rows)
        try:
            return super().attention(q, layer, **options)
        finally:
            self.batch = batch


class SumsInAnotherOrder(ReferenceOps):
    """With more than one row in the step, linear layers add the second half of each sum first."""

    def linear(
        self, x: Rows, weights: Sequence[Rows], bias: FloatArray | None = None, residual: Rows | None = None
    ) -> Rows:
        if len(x) > 1:
            half = x.shape[1] // 2
            order = np.r_[half : x.shape[1], :half]
            x, weights = x[:, order], [weight[:, order] for weight in weights]
        return super().linear(x, weights, bias, residual)


def last_token_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """A last chunk of one row computes the token before it once more."""
    build_batch = batches.build_batch

    def build(plan: StepPlan, source: RowSource, block_tokens: int) -> Batch:
        batch = build_batch(plan, source, block_tokens)
        tokens, positions = batch.tokens.copy(), batch.positions.copy()
        rows = zip(plan.request_ids, plan.starts, plan.counts, batch.seq_row_starts[:-1], strict=True)
        for request_id, start, count, row in rows:
            if count == 1 and 0 < start == len(source.request(request_id).prompt) - 1:
                tokens[row], positions[row] = source.tokens(request_id)[start - 1], start - 1
        return Batch(tokens, positions, batch.seq_row_starts, batch.block_tables, batch.logit_rows)

    patch.setattr("legato.exec.executor.build_batch", build)


def blocks_are_published_early(patch: pytest.MonkeyPatch) -> None:
    """The block that a chunk ends in counts as computed, and nobody checks."""
    publish = KvMemory.publish

    def early(self: KvMemory, slot: Slot) -> list[int]:
        computed, width = slot.computed, self.block_tokens
        slot.computed = min(-(-computed // width), len(slot.tokens) // width, len(slot.blocks)) * width
        try:
            return publish(self, slot)
        finally:
            slot.computed = computed

    patch.setattr(KvMemory, "publish", early)
    patch.setattr(SchedulerState, "check", lambda self: None)


def keys_ignore_what_comes_before(patch: pytest.MonkeyPatch) -> None:
    """A block is found by its own tokens alone."""

    def key(parent: bytes, tokens: bytes, attachments: Iterable[tuple[int, bytes]] = ()) -> bytes:
        return sha256(tokens).digest()

    patch.setattr("legato.core.prefix.block_key", key)


def keys_ignore_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """Two blocks that differ in their last token are taken for the same."""
    from legato.core.prefix import block_key

    def key(parent: bytes, tokens: bytes, attachments: Iterable[tuple[int, bytes]] = ()) -> bytes:
        return block_key(parent, tokens[: -array("i").itemsize], attachments)

    patch.setattr("legato.core.prefix.block_key", key)


def a_preempted_request_keeps_a_block(patch: pytest.MonkeyPatch) -> None:
    """It goes on from a block that it gave back, whatever that holds by then; nobody checks."""
    preempt, prefix, share = SchedulerState._preempt, KvMemory.prefix, KvMemory._share
    kept: dict[Slot, int] = {}

    def keep(self: SchedulerState, request_ids: Sequence[int]) -> None:
        slots = [self._slots[request_id] for request_id in request_ids]
        kept.update({slot: slot.blocks[0] for slot in slots if slot.computed >= self.block_tokens and slot.chain})
        preempt(self, request_ids)

    def first_block(self: KvMemory, slot: Slot) -> int | None:
        block = kept.get(slot)
        return None if block is None or block in self.pool._blank else block

    def with_kept(self: KvMemory, slot: Slot) -> Prefix:
        block = first_block(self, slot)
        return prefix(self, slot) if block is None else Prefix(1, not self.pool.references(block))

    def share_kept(self: KvMemory, slot: Slot, blocks: int) -> list[int]:
        block = first_block(self, slot)
        if block is None:
            return share(self, slot, blocks)
        share(self, slot, 0)
        self.pool.share(block)
        slot.blocks, slot.computed = [block], self.block_tokens
        self.reserved_blocks -= 1
        return []

    patch.setattr(SchedulerState, "_preempt", keep)
    patch.setattr(KvMemory, "prefix", with_kept)
    patch.setattr(KvMemory, "_share", share_kept)
    patch.setattr(SchedulerState, "check", lambda self: None)


def restored_blocks_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    """Host memory gives back a block's name, and not its content."""
    patch.setattr(HostPool, "restore", lambda self, slot, block: None)


def saved_after_it_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    """The content of a block is saved one step late."""
    moves, late = SchedulerState.moves, dict[SchedulerState, list[Move]]()

    def one_step_late(self: SchedulerState, step: int) -> Sequence[Move]:
        due = [*late.get(self, ()), *(move for move in moves(self, step) if not move.saves)]
        late[self] = [move for move in moves(self, step) if move.saves]
        return due

    patch.setattr(SchedulerState, "moves", one_step_late)


def the_draw_depends_on_the_company(patch: pytest.MonkeyPatch) -> None:
    """Random numbers are taken in the order of the draws, not by position."""
    draw, uniform = Sampler._draw, sampler.uniform
    draws: Counter[Sampler] = Counter()
    number = 0

    def counted(self: Sampler, *args: Any) -> int | None:
        nonlocal number
        draws[self] += 1
        number = draws[self]
        return draw(self, *args)

    patch.setattr(Sampler, "_draw", counted)
    patch.setattr(sampler, "uniform", lambda seed, position: uniform(seed, number))
