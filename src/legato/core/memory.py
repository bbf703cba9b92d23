"""`KvMemory`: who holds which block: tables, reservations, and the prefix cache with its copies in host memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from legato.core.blocks import BlockPool
from legato.core.host import HostIndex, Move
from legato.core.prefix import NOTHING, Prefix, leading
from legato.core.slot import Slot


class KvMemory:
    """The KV side of `SchedulerState`. What planning has counted cannot run out here.

    A block enters the prefix cache when it is computed, and stays there, held or idle, until its memory is needed; its
    content may then go to one of `host_blocks` slots of host memory. Blocks of equal content are kept once: what makes
    them exchangeable is that no schedule changes a bit of them.
    """

    __slots__ = ("_promised", "block_tokens", "fresh", "host", "pool", "reserved_blocks", "restored_blocks")

    def __init__(self, blocks: int, block_tokens: int, host_blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.host = HostIndex(host_blocks)
        self.block_tokens = block_tokens
        self.reserved_blocks = 0
        self.restored_blocks = 0
        self.fresh: list[tuple[bytes, int]] | None = None
        """(key, block) of what was published, for an archive to take; None: nobody wants to know."""
        self._promised: dict[bytes, int] = {}  # keys that are not there yet, and the running request that makes them

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and no admitted prefill has reserved."""
        return self.pool.free - self.reserved_blocks

    def prefix(self, slot: Slot) -> Prefix:
        """What of a waiting request is there already. Never a row whose logits are needed, such as the last one.

        Reads only. Cost: O(log blocks), and O(blocks) for those in host memory.
        """
        chain = slot.chain
        if chain is None:
            return NOTHING
        keys, pool = chain.keys, self.pool
        limit = min(slot.cacheable // self.block_tokens, len(keys))
        hits = leading(keys, pool, limit)
        # Whoever holds a block holds those before it.
        held = bisect_left(keys, True, hi=hits, key=lambda key: not pool.references(pool.find(key))) if hits else 0
        stored = hits
        while stored < limit and keys[stored] in self.host:
            stored += 1
        next_key = keys[hits] if hits < limit else None
        maker = None if next_key is None else self._promised.get(next_key)
        return Prefix(hits, hits - held, stored - hits, next_key, maker)

    def admit(self, slots: Sequence[Slot], starts: Sequence[int], moves: list[Move]) -> None:
        """Shares what is cached of each request up to its start, copies back the rest, reserves for all known tokens.

        What is found is secured for all of them before the first block is taken: taking one may evict another.
        """
        popped = [self._share(slot, start // self.block_tokens) for slot, start in zip(slots, starts, strict=True)]
        for slot, host_slots in zip(slots, popped, strict=True):
            for host_slot in host_slots:
                assert slot.chain is not None
                key = slot.chain.keys[len(slot.blocks)]
                self._extend_by_one(slot, moves)
                moves.append(Move(False, slot.blocks[-1], host_slot, key))
                self.host.release(host_slot)
            self.restored_blocks += len(host_slots)

    def extend(self, slot: Slot, stop: int, moves: list[Move]) -> None:
        """Takes blocks up to position `stop`: reserved ones, then free ones."""
        while len(slot.blocks) * self.block_tokens < stop:
            self._extend_by_one(slot, moves)

    def publish(self, slot: Slot) -> list[int]:
        """Enters the whole blocks that `slot` has computed in the cache; returns those it no longer holds.

        Those are duplicates: it shares the ones that were there before instead.
        """
        chain, surplus = slot.chain, list[int]()
        if chain is None:
            return surplus
        chain.extend(slot.tokens)
        for index in range(slot.published, slot.computed // self.block_tokens):
            name, block = chain.name(index), slot.blocks[index]
            found = self.pool.publish(block, name)
            if self._promised.get(name.key) == slot.request_id:
                del self._promised[name.key]
            if found != block:
                if slot.ended:  # it has given up its blocks, and is nobody to hold another
                    break
                self.pool.share(found)
                slot.blocks[index] = found
                surplus.append(block)
            elif self.fresh is not None:
                self.fresh.append((name.key, block))
            slot.published = index + 1
        return surplus

    def missing(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The rest of `keys` from the first that is neither in the pool nor in host memory."""
        hits = leading(keys, self.pool, len(keys))
        while hits < len(keys) and keys[hits] in self.host:
            hits += 1
        return keys[hits:]

    def give_up(self, slot: Slot) -> list[int]:
        """The blocks that `slot` holds, for the caller to release, the last one first: a chain is cached head first.

        Its reservation and its promises end here.
        """
        if slot.chain is not None:
            for key in slot.chain.keys[slot.published : slot.promised]:
                if self._promised.get(key) == slot.request_id:
                    del self._promised[key]
            slot.chain.extend(slot.tokens)
        slot.promised = 0
        held_tokens = len(slot.blocks) * self.block_tokens
        if slot.covered > held_tokens:
            self.reserved_blocks -= (slot.covered - held_tokens) // self.block_tokens
            slot.covered = held_tokens
        return slot.blocks[::-1]

    def freed_blocks(self, slots: Iterable[Slot], returning: Iterable[int]) -> Iterator[tuple[int, int]]:
        """For each of `slots`, blocks that are free once it and those before it have given up theirs.

        At once, and after the commit of what is in flight: then `returning` will have been released too. Reads only.
        """
        pool, at_once, in_all = self.pool, 0, 0
        released_now: Counter[int] = Counter()
        released = Counter(returning)
        for slot in slots:
            reserved = slot.covered // self.block_tokens - len(slot.blocks)
            at_once += reserved
            in_all += reserved
            for block in slot.blocks:
                released[block] += 1
                in_all += released[block] == pool.references(block)
                if not slot.in_flight:
                    released_now[block] += 1
                    at_once += released_now[block] == pool.references(block)
            yield at_once, in_all

    def undo(self, moves: Iterable[Move]) -> None:
        """Forgets what was to be saved by a step that failed or is given up."""
        for move in moves:
            if move.saves:
                self.host.forget(move.key)

    def check(self, slots: Iterable[Slot], returning: Iterable[int]) -> None:
        """Asserts that `slots`, which are admitted, and the blocks that return account for everything. O(blocks)."""
        self.pool.check()
        self.host.check()
        holders, reserved, makers = Counter(returning), 0, dict[int, Slot]()
        for slot in slots:
            holders.update(slot.blocks)
            reserved += slot.covered // self.block_tokens - len(slot.blocks)
            makers[slot.request_id] = slot
            for index in range(slot.published):
                assert slot.chain is not None
                found = self.pool.find(slot.chain.keys[index])
                assert found == slot.blocks[index], f"request {slot.request_id} holds a copy of a cached block"
        for block in range(self.pool.blocks):
            assert self.pool.references(block) == holders[block], f"block {block} is held by nobody we know"
        assert reserved == self.reserved_blocks, f"{reserved} blocks are reserved, {self.reserved_blocks} counted"
        assert self.free_blocks >= 0, f"{-self.free_blocks} reserved blocks do not exist"
        for key, request_id in self._promised.items():
            maker = makers[request_id]
            assert maker.chain is not None
            assert key in maker.chain.keys[maker.published : maker.promised], "a promise that nobody keeps"

    def _share(self, slot: Slot, blocks: int) -> list[int]:
        """Gives `slot` the first of its `blocks` that are in the pool; the host slots of the others, taken out."""
        known_blocks = -(-slot.known // self.block_tokens)
        slot.covered = known_blocks * self.block_tokens
        host_slots: list[int] = []
        if slot.chain is not None:
            keys = slot.chain.keys
            hits = leading(keys, self.pool, blocks)
            slot.blocks = [self.pool.find(key) for key in keys[:hits]]
            for block in slot.blocks:
                self.pool.share(block)
            host_slots = [self.host.pop(key) for key in keys[hits:blocks]]
            slot.published = hits
            # One whose prompt is scored is slow, and computes what may be there: nobody is to wait for it.
            slot.promised = 0 if slot.scored < slot.score_stop else min(slot.known // self.block_tokens, len(keys))
            for key in keys[hits : slot.promised]:
                self._promised.setdefault(key, slot.request_id)
        self.reserved_blocks += known_blocks - len(slot.blocks)
        slot.computed = len(slot.blocks) * self.block_tokens
        return host_slots

    def _extend_by_one(self, slot: Slot, moves: list[Move]) -> None:
        if len(slot.blocks) * self.block_tokens < slot.covered:
            self.reserved_blocks -= 1
        else:
            slot.covered += self.block_tokens
        block, lost = self.pool.take()
        if lost is not None:
            host_slot = self.host.put(lost)
            if host_slot is not None:
                moves.append(Move(True, block, host_slot, lost))
        slot.blocks.append(block)
