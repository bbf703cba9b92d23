"""`SchedulerState`: the one object that changes. `apply` takes blocks and moves cursors; `commit` takes in tokens."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from legato.core.flight import Flight
from legato.core.host import Move
from legato.core.memory import KvMemory
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import FCFS, Policy
from legato.core.prefix import KeyChain, Prefix, root_key
from legato.core.queue import WaitingQueue
from legato.core.request import Finished, FinishReason, Request
from legato.core.slot import Slot
from legato.core.tenants import Tenants
from legato.errors import ConfigError, RequestError


class SchedulerState:
    """Requests, KV blocks and cursors. Implements `SchedulerView` for planning and `RowSource` for execution.

    Steps are applied in the order planned, executed in the order applied and committed in the order executed. Several
    may be in flight. Blocks given up by a request that is in flight (aborted, finished or preempted) can be taken
    again only once the steps that still write them are committed.

    `kv_blocks`, `block_tokens`: blocks of KV, and positions each holds. `max_model_len`: tokens a model can attend to.
    A request ends with "length" at `context` tokens, the smaller of `max_model_len` and the whole pool: alone it always
    fits, so that preempting the others always lets the oldest go on. Raises ConfigError for sizes that serve nothing.
    `cache_root`: names the model with every option that changes bits; None: no prefix cache. `host_blocks`: blocks of
    host memory that take what the pool has to give up. `policy`: the one to plan with: it orders the queue. `tenants`:
    their weights, and what work counts for.
    """

    def __init__(
        self,
        kv_blocks: int,
        block_tokens: int,
        max_model_len: int,
        *,
        cache_root: bytes | None = b"",
        host_blocks: int = 0,
        policy: Policy = FCFS,
        tenants: Tenants | None = None,
    ) -> None:
        for name, value, least in (
            ("kv_blocks", kv_blocks, 1),
            ("block_tokens", block_tokens, 1),
            ("max_model_len", max_model_len, 2),
            ("kv_blocks * block_tokens", kv_blocks * block_tokens, 2),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}; the least that can serve a request is {least}")
        self.block_tokens = block_tokens
        self.max_model_len = max_model_len
        self.context = min(max_model_len, kv_blocks * block_tokens)
        self.policy = policy
        self.tenants = tenants or Tenants()
        self.next_step = 0
        self.preemptions = 0
        self.overtakes = 0
        self.queried_tokens = 0
        """Prompt tokens of requests that were admitted."""
        self.cached_tokens = 0
        """How many of them were in the prefix cache."""
        self.emitted = StepResult(-1, (), ())
        self.memory = KvMemory(kv_blocks, block_tokens, host_blocks)
        self._cache_root = cache_root
        self._submitted = 0
        self._slots: dict[int, Slot] = {}
        self._running: list[Slot] = []
        self._waiting = WaitingQueue(policy.turn, by_tenant=policy.by_tenant)
        self._flights: deque[Flight] = deque()

    # ── SchedulerView ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> Sequence[Slot]:
        """Admitted requests, in order of admission."""
        return self._running

    @property
    def waiting(self) -> Collection[Slot]:
        """Requests not admitted, by priority, then in the order of the policy."""
        return self._waiting

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and no admitted prefill has reserved. Cached ones are among them."""
        return self.memory.free_blocks

    @property
    def returning_blocks(self) -> int:
        """Blocks that will be free when the steps in flight are committed. Cost: O(those), O(1) when there are none."""
        pool = self.memory.pool
        return sum(pool.references(block) == count for block, count in Counter(self._returning()).items())

    def freed_blocks(self, request_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
        """For each of these, in turn: blocks free if it and those before it are preempted, at once and in all."""
        return self.memory.freed_blocks((self._slots[i] for i in request_ids), self._returning())

    def prefix(self, request_id: int) -> Prefix:
        """What of a waiting request is cached, or being computed by somebody else."""
        return self.memory.prefix(self._slots[request_id])

    # ── RowSource ──────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, request_id: int) -> Request:
        """The frozen request. Known until it has ended and no step in flight contains it."""
        return self._slots[request_id].request

    def tokens(self, request_id: int) -> Sequence[int]:
        """Prompt and generated token ids (an `array('i')` that grows; do not keep it)."""
        return self._slots[request_id].tokens

    def blocks(self, request_id: int) -> Sequence[int]:
        """Ids of its KV blocks in order of position, as many as its scheduled positions need."""
        return self._slots[request_id].blocks

    def moves(self, step: int) -> Sequence[Move]:
        """Copies between the pool and host memory that come before the rows of that step, in order."""
        return next((flight.moves for flight in self._flights if flight.plan.step == step), ())

    # ── what an engine asks ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a step in flight."""
        return bool(self._slots or self._flights)

    @property
    def pending_tokens(self) -> int:
        """Tokens that no step was planned for yet, but for the one next to come of each stream. Cost: O(running)."""
        return self._waiting.tokens + sum(max(slot.known - slot.scheduled - 1, 0) for slot in self._running)

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self.memory.pool.blocks

    @property
    def in_flight(self) -> int:
        """Steps applied and not committed yet."""
        return len(self._flights)

    def cached_prompt_tokens(self, request_id: int) -> int:
        """Tokens of an admitted request's prompt that were in the prefix cache when it came in."""
        return self._slots[request_id].cached_tokens

    def waited_since(self, plan: StepPlan) -> list[tuple[float, bool]]:
        """When each request that `plan` samples for got its newest token, and whether it had to be recomputed since.

        Those that wait for their first token are left out. Between `apply` and `commit`.
        """
        waited = []
        for n, (request_id, sample) in enumerate(zip(plan.request_ids, plan.samples, strict=True)):
            since_s = self._slots[request_id].last_token_s
            if sample and since_s < math.inf:
                waited.append((since_s, n >= plan.decodes))
        return waited

    def missing_keys(self, request: Request) -> Sequence[bytes]:
        """Keys of the whole blocks that `request` would have to compute if it came now, from the first one on."""
        chain = self._chain(request)
        if chain is None:
            return ()
        slot = Slot(request, self.context, self._submitted, chain)
        return self.memory.missing(chain.keys[: slot.cacheable // self.block_tokens])

    # ── the verbs ──────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request) -> None:
        """Puts `request` at the end of the queue. Raises as `verify`; then nothing is kept of it."""
        self.verify(request)
        tenant = self.tenants.join(request.tenant)
        slot = Slot(request, self.context, self._submitted, self._chain(request), tenant)
        self._submitted += 1
        self._slots[slot.request_id] = slot
        self._waiting.push(slot)

    def verify(self, request: Request) -> None:
        """Raises PromptTooLong, with both numbers, for a request that could never run; RequestError for one that makes
        no sense: no prompt, no token wanted, an id that is in use.
        """
        if request.request_id in self._slots:
            raise RequestError(f"request id {request.request_id} is in use; ids may come back once finished")
        request.verify(self.context, "the context" if self.context == self.max_model_len else "the whole KV cache")

    def apply(self, plan: StepPlan) -> None:
        """Puts `plan` in flight: preempts, admits, takes blocks, moves `scheduled`. Cost: O(rows of the plan).

        Cannot fail for a plan made from this state: planning has counted every block that is taken here. Nothing may
        come between `plan_step` and `apply`; that it did is asserted.
        """
        assert self._is_current(plan), f"step {plan.step} was planned from another state than this one"
        moves: list[Move] = []
        self._preempt(plan.preempt)
        self._forget_due(plan.missed)
        self._admit(plan, moves)
        slots: list[Slot] = []
        stops: list[int] = []
        block_tokens = self.block_tokens
        for request_id, start, count, sample in zip(
            plan.request_ids, plan.starts, plan.counts, plan.samples, strict=True
        ):
            slot = self._slots[request_id]
            stop = start + count
            slot.scheduled = stop
            slot.in_flight += 1
            if stop > len(slot.blocks) * block_tokens:
                self.memory.extend(slot, stop, moves)
            if sample and stop + 1 < slot.limit:
                slot.known = stop + 1
            slots.append(slot)
            stops.append(stop)
        for request_id, _, stop in plan.scores:
            self._slots[request_id].scored = stop
        if self.policy.by_tenant:
            for n, slot in enumerate(slots):
                slot.tenant.charge(plan.starts[n], plan.counts[n], decode=n < plan.decodes)
        self._flights.append(Flight(plan, slots, stops, moves))
        self.next_step += 1

    def commit(self, result: StepResult, now_s: float = 0.0) -> tuple[Finished, ...]:
        """Takes in the tokens of the oldest step in flight, moves `computed`; returns the requests that end with it.

        `now_s`: when the tokens are there; where time does not count, any number.

        `emitted` is then the part of `result` to hand out: all of it, but for requests that ended meanwhile.
        Cost: O(rows of the plan). Raises EngineError, and changes nothing, if `result` is not that step's.
        """
        flight = self._flights[0]
        flight.verify(result)
        self._flights.popleft()
        block_tokens = self.block_tokens
        finished: list[Finished] = []
        stale: list[int] = []  # requests that had ended before
        column = 0
        for slot, stop, sample in zip(flight.slots, flight.stops, flight.plan.samples, strict=True):
            slot.in_flight -= 1
            if sample:
                # Also for a request that has ended: a step planned ahead may compute this token.
                slot.tokens.append(result.token_ids[column])
                slot.last_token_s = now_s
            if slot.request_id not in flight.preempted:
                slot.computed = stop
                if stop >= (slot.published + 1) * block_tokens:
                    self._release(self.memory.publish(slot), slot.in_flight)
            if slot.ended:
                stale.append(slot.request_id)
                if not slot.in_flight:
                    del self._slots[slot.request_id]
            elif sample:
                reason = slot.end_reason()
                if reason is not None:
                    finished.append(self._end(slot, reason))
            column += sample
        self.memory.pool.release(flight.returning)
        if finished:
            self._running = [slot for slot in self._running if not slot.ended]
        self.emitted = result.without(stale) if stale else result
        return tuple(finished)

    def abort(self, request_id: int) -> Finished | None:
        """Ends a request now, wherever it stands; None if there is none of that id (any more).

        At any time but between `plan_step` and `apply`. Its blocks are free at once, or with the commit of the last
        step in flight that writes them; what those steps sample for it is not emitted.
        """
        slot = self._slots.get(request_id)
        if slot is None or slot.ended:
            return None
        finished = self._end(slot, "abort")
        self._running = [slot for slot in self._running if not slot.ended]
        return finished

    def retire(self) -> tuple[Finished, ...]:
        """Ends the requests that have all their tokens. While nothing is in flight; `commit` does so by itself."""
        ended = [(slot, reason) for slot in self._running if (reason := slot.end_reason()) is not None]
        finished = tuple(self._end(slot, reason) for slot, reason in ended)
        self._running = [slot for slot in self._running if not slot.ended]
        return finished

    def abort_steps(self, message: str) -> tuple[Finished, ...]:
        """Gives up all steps in flight, the oldest of which failed: their requests end with "error" and `message`.

        A step planned ahead is given up too: it computes tokens that never came. All other requests go on undisturbed.
        """
        finished: list[Finished] = []
        while self._flights:
            flight = self._flights.popleft()
            self.memory.undo(flight.moves)
            for slot in flight.slots:
                slot.in_flight -= 1
                if not slot.ended:
                    finished.append(self._end(slot, "error", message))
                elif not slot.in_flight:
                    del self._slots[slot.request_id]
            self.memory.pool.release(flight.returning)
        self._running = [slot for slot in self._running if not slot.ended]
        self.emitted = StepResult(self.next_step - 1, (), ())
        return tuple(finished)

    # ── invariants ─────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Asserts every invariant. Cost: O(requests + blocks): each step in tests, when idle in production."""
        self.memory.check(self._running, self._returning())
        ended = [slot for slot in self._slots.values() if slot.ended]
        for slot in self._slots.values():
            slot.check(self.block_tokens, self.context, sum(slot in flight.slots for flight in self._flights))
            if not slot.ended:
                assert (slot in self._waiting) != (slot in self._running), "neither waiting nor running, or both"
                assert slot in self._running or not (slot.scheduled or slot.covered), "one that waits holds blocks"
        assert len(self._running) + len(self._waiting) + len(ended) == len(self._slots), "a request is lost"
        assert not ended or self._flights, "an ended request outlived its steps"
        self._waiting.check()

    # ── steps of the verbs ─────────────────────────────────────────────────────────────────────────────────────────

    def _chain(self, request: Request) -> KeyChain | None:
        if self._cache_root is None:
            return None
        return KeyChain(root_key(self._cache_root, request.cache_salt), self.block_tokens, request.attachments)

    def _is_current(self, plan: StepPlan) -> bool:
        slots, admitted = self._slots, frozenset(plan.admit)
        if plan.step != self.next_step or not all(i in slots for i in (*plan.request_ids, *plan.preempt)):
            return False
        if any(slots[request_id].scored != start for request_id, start, _ in plan.scores):
            return False
        return all(
            (request_id in admitted or slots[request_id].scheduled == start)
            and start + count <= slots[request_id].known
            for request_id, start, count in zip(plan.request_ids, plan.starts, plan.counts, strict=True)
        )

    def _preempt(self, request_ids: Sequence[int]) -> None:
        """Back to the queue, without KV, but with everything generated."""
        if not request_ids:
            return
        for request_id in request_ids:
            slot = self._slots[request_id]
            if slot.in_flight:
                for flight in self._flights:
                    flight.preempted.add(request_id)
            self._release(self.memory.give_up(slot), slot.in_flight)
            slot.blocks = []
            slot.scheduled = slot.computed = slot.covered = slot.published = 0
            slot.preemptions += 1
            self._waiting.push(slot)
        self.preemptions += len(request_ids)
        gone = set(request_ids)
        self._running = [slot for slot in self._running if slot.request_id not in gone]

    def _forget_due(self, request_ids: Sequence[int]) -> None:
        """What cannot be there in time goes on as if it were wanted whenever: it holds up nobody who can be in time."""
        for request_id in request_ids:
            slot = self._slots[request_id]
            waits = slot in self._waiting
            if waits:
                self._waiting.remove(slot)
            slot.due_s = math.inf
            if waits:
                self._waiting.push(slot)

    def _admit(self, plan: StepPlan, moves: list[Move]) -> None:
        """Out of the queue, with what is cached, and with blocks reserved for every token known."""
        for request_id in plan.overtaken:
            self._slots[request_id].overtaken += 1
        self.overtakes += bool(plan.overtaken)
        if not plan.admit:
            return
        start_of = dict(zip(plan.request_ids, plan.starts, strict=True))
        slots = [self._slots[request_id] for request_id in plan.admit]
        starts = [start_of[request_id] for request_id in plan.admit]
        self.memory.admit(slots, starts, moves)
        for slot, start in zip(slots, starts, strict=True):
            self._waiting.remove(slot)
            self._running.append(slot)
            if slot.cached_tokens < 0:
                slot.cached_tokens = start
                self.cached_tokens += start
                self.queried_tokens += len(slot.request.prompt)

    def _end(self, slot: Slot, reason: FinishReason, message: str = "") -> Finished:
        """Marks it ended and gives back its blocks, if no step uses them. The caller takes it out of `_running`."""
        slot.ended = True
        self.tenants.leave(slot.tenant)
        if slot in self._waiting:
            self._waiting.remove(slot)
        self._release(self.memory.give_up(slot), slot.in_flight)
        if not slot.in_flight:
            del self._slots[slot.request_id]
        return slot.finished(reason, message)

    def _release(self, blocks: Sequence[int], in_flight: int) -> None:
        """One holder fewer for each of `blocks`: now, or when the steps that use them are committed."""
        if in_flight and self._flights:
            self._flights[-1].returning.extend(blocks)
        else:
            self.memory.pool.release(blocks)

    def _returning(self) -> Iterator[int]:
        return (block for flight in self._flights for block in flight.returning)
