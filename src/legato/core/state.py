"""`SchedulerState`: the one object that changes. `apply` takes blocks and moves cursors; `commit` takes in tokens."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

from legato.core.blocks import BlockPool
from legato.core.flight import Flight
from legato.core.plan import StepPlan, StepResult
from legato.core.request import Finished, FinishReason, Request
from legato.core.slot import Slot
from legato.errors import ConfigError, PromptTooLong, RequestError


class SchedulerState:
    """Requests, KV blocks and cursors. Implements `SchedulerView` for planning and `RowSource` for execution.

    Steps are applied in the order planned, executed in the order applied and committed in the order executed. Several
    may be in flight. Blocks given up by a request that is in flight (aborted, finished or preempted) can be taken
    again only once the steps that still write them are committed.

    `kv_blocks`, `block_tokens`: blocks of KV, and positions each holds. `max_model_len`: tokens a model can attend to.
    A request ends with "length" at `context` tokens, the smaller of `max_model_len` and the whole pool: alone it always
    fits, so that preempting the others always lets the oldest go on. Raises ConfigError for sizes that serve nothing.
    """

    def __init__(self, kv_blocks: int, block_tokens: int, max_model_len: int) -> None:
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
        self.next_step = 0
        self.returning_blocks = 0
        self.preemptions = 0
        self.emitted = StepResult(-1, (), ())
        self._pool = BlockPool(kv_blocks)
        self._reserved_blocks = 0
        self._slots: dict[int, Slot] = {}
        self._running: list[Slot] = []
        self._waiting: OrderedDict[int, Slot] = OrderedDict()
        self._flights: deque[Flight] = deque()

    # ── SchedulerView ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> Sequence[Slot]:
        """Admitted requests, in order of admission."""
        return self._running

    @property
    def waiting(self) -> Collection[Slot]:
        """Requests not admitted yet, in order of arrival, preempted ones in front."""
        return self._waiting.values()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and no admitted prefill has reserved."""
        return self._pool.free - self._reserved_blocks

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

    # ── what an engine asks ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a step in flight."""
        return bool(self._slots or self._flights)

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.blocks

    @property
    def in_flight(self) -> int:
        """Steps applied and not committed yet."""
        return len(self._flights)

    # ── the verbs ──────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request) -> None:
        """Puts `request` at the end of the queue.

        Raises PromptTooLong, with both numbers, for one that could never run; RequestError for one that makes no sense
        (no prompt, no token wanted, an id that is in use). Nothing else is disturbed, and nothing is kept of it.
        """
        prompt_tokens = len(request.prompt)
        if request.request_id in self._slots:
            raise RequestError(f"request id {request.request_id} is in use; ids may come back once finished")
        if not prompt_tokens:
            raise RequestError("the prompt is empty; it needs at least 1 token", field="prompt")
        if request.stop.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.stop.max_tokens}; it must be at least 1", field="max_tokens")
        if prompt_tokens >= self.context:
            whose = "the context" if self.context == self.max_model_len else "the whole KV cache"
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens and {whose} holds {self.context}, 1 of them for the answer;"
                f" shorten the prompt to {self.context - 1} tokens or serve with a larger limit",
                field="prompt",
            )
        slot = Slot(request, self.context)
        self._slots[slot.request_id] = slot
        self._waiting[slot.request_id] = slot

    def apply(self, plan: StepPlan) -> None:
        """Puts `plan` in flight: preempts, admits, takes blocks, moves `scheduled`. Cost: O(rows of the plan).

        Cannot fail for a plan made from this state: planning has counted every block that is taken here. Nothing may
        come between `plan_step` and `apply`; that it did is asserted.
        """
        assert self._is_current(plan), f"step {plan.step} was planned from another state than this one"
        self._preempt(plan.preempt)
        self._admit(plan.admit)
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
                self._extend(slot, stop)
            if sample and stop + 1 < slot.limit:
                slot.known = stop + 1
            slots.append(slot)
            stops.append(stop)
        self._flights.append(Flight(plan, slots, stops))
        self.next_step += 1

    def commit(self, result: StepResult) -> tuple[Finished, ...]:
        """Takes in the tokens of the oldest step in flight, moves `computed`; returns the requests that end with it.

        `emitted` is then the part of `result` to hand out: all of it, but for requests that ended meanwhile.
        Cost: O(rows of the plan). Raises EngineError, and changes nothing, if `result` is not that step's.
        """
        flight = self._flights[0]
        flight.verify(result)
        self._flights.popleft()
        finished: list[Finished] = []
        stale: list[int] = []
        column = 0
        for slot, stop, sample in zip(flight.slots, flight.stops, flight.plan.samples, strict=True):
            slot.in_flight -= 1
            if slot.request_id not in flight.preempted:
                slot.computed = stop
            if sample:
                # Also for a request that has ended: a step planned ahead may compute this token.
                slot.tokens.append(result.token_ids[column])
            if slot.ended:
                if sample:
                    stale.append(column)
                if not slot.in_flight:
                    self._forget(slot)
            elif sample:
                reason = slot.end_reason()
                if reason is not None:
                    finished.append(self._end(slot, reason))
            column += sample
        self._land(flight)
        if finished:
            self._running = [slot for slot in self._running if not slot.ended]
        self.emitted = result if not stale else _without_columns(result, stale)
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

    def abort_steps(self, message: str) -> tuple[Finished, ...]:
        """Gives up all steps in flight, the oldest of which failed: their requests end with "error" and `message`.

        A step planned ahead is given up too: it computes tokens that never came. All other requests go on undisturbed.
        """
        finished: list[Finished] = []
        while self._flights:
            flight = self._flights.popleft()
            for slot in flight.slots:
                slot.in_flight -= 1
                if not slot.ended:
                    finished.append(self._end(slot, "error", message))
                elif not slot.in_flight:
                    self._forget(slot)
            self._land(flight)
        self._running = [slot for slot in self._running if not slot.ended]
        self.emitted = StepResult(self.next_step - 1, (), ())
        return tuple(finished)

    # ── invariants ─────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Asserts every invariant. Cost: O(requests + blocks): each step in tests, when idle in production."""
        self._pool.check()
        holders: dict[int, int] = {}
        ended = [slot for slot in self._slots.values() if slot.ended]
        for slot in self._slots.values():
            self._check_slot(slot)
            for block in slot.blocks:
                holders[block] = holders.get(block, 0) + 1
        for flight in self._flights:
            for block in flight.returning:
                holders[block] = holders.get(block, 0) + 1
        for block in range(self._pool.blocks):
            assert self._pool.references(block) == holders.get(block, 0), f"block {block} is held by nobody we know"
        returning = sum(len(f.returning) for f in self._flights) + sum(len(slot.blocks) for slot in ended)
        covered = sum(slot.covered for slot in self._running) // self.block_tokens
        assert returning == self.returning_blocks, f"{returning} blocks return, {self.returning_blocks} counted"
        assert self.free_blocks >= 0, f"{-self.free_blocks} reserved blocks do not exist"
        assert self.free_blocks + returning + covered == self._pool.blocks, "blocks do not add up to the pool"
        assert len(self._running) + len(self._waiting) + len(ended) == len(self._slots), "a request is lost"
        assert not ended or self._flights, "an ended request outlived its steps"

    def _check_slot(self, slot: Slot) -> None:
        name = f"request {slot.request_id}"
        held_tokens = len(slot.blocks) * self.block_tokens
        assert 0 <= slot.computed <= slot.scheduled <= slot.known < slot.limit <= self.context, f"{name}: cursors"
        assert slot.in_flight == sum(slot in f.slots for f in self._flights), f"{name}: steps in flight"
        assert slot.in_flight or slot.computed == slot.scheduled, f"{name}: scheduled, but nothing in flight"
        assert slot.in_flight or slot.known == len(slot.tokens), f"{name}: a token is promised, but nothing in flight"
        assert slot.scheduled <= held_tokens < slot.scheduled + self.block_tokens, f"{name}: too many or too few blocks"
        if slot.ended:
            assert slot.in_flight, f"{name}: ended and kept"
        elif slot.request_id in self._waiting:
            assert not (slot.scheduled or slot.covered), f"{name}: waits and holds blocks"
        else:
            assert slot in self._running, f"{name}: neither waiting nor running"
            assert slot.covered >= held_tokens and slot.covered % self.block_tokens == 0, f"{name}: reservation"
            assert slot.covered >= slot.known or slot.known - slot.scheduled <= 1, f"{name}: prompt is not reserved"

    # ── steps of the verbs ─────────────────────────────────────────────────────────────────────────────────────────

    def _is_current(self, plan: StepPlan) -> bool:
        slots = self._slots
        if plan.step != self.next_step or not all(i in slots for i in (*plan.request_ids, *plan.preempt)):
            return False
        return all(
            slots[request_id].scheduled == start and start + count <= slots[request_id].known
            for request_id, start, count in zip(plan.request_ids, plan.starts, plan.counts, strict=True)
        )

    def _preempt(self, request_ids: Sequence[int]) -> None:
        """Back to the front of the queue, without KV. Newest first, so that the oldest of them ends up foremost."""
        if not request_ids:
            return
        for request_id in request_ids:
            slot = self._slots[request_id]
            self._cancel_reservation(slot)
            if slot.in_flight:
                for flight in self._flights:
                    flight.preempted.add(request_id)
                self._flights[-1].returning.extend(slot.blocks)
                self.returning_blocks += len(slot.blocks)
            else:
                self._pool.release(slot.blocks)
            slot.blocks = []
            slot.scheduled = slot.computed = slot.covered = 0
            slot.preemptions += 1
            self._waiting[request_id] = slot
            self._waiting.move_to_end(request_id, last=False)
        self.preemptions += len(request_ids)
        gone = set(request_ids)
        self._running = [slot for slot in self._running if slot.request_id not in gone]

    def _admit(self, request_ids: Sequence[int]) -> None:
        """Out of the queue, with blocks reserved for every token known."""
        for request_id in request_ids:
            slot = self._waiting.pop(request_id)
            blocks = -(-slot.known // self.block_tokens)
            slot.covered = blocks * self.block_tokens
            self._reserved_blocks += blocks
            self._running.append(slot)

    def _extend(self, slot: Slot, stop: int) -> None:
        """Takes blocks up to position `stop`: reserved ones, then free ones."""
        while (held_tokens := len(slot.blocks) * self.block_tokens) < stop:
            if held_tokens < slot.covered:
                self._reserved_blocks -= 1
            else:
                slot.covered += self.block_tokens
            slot.blocks.append(self._pool.take())

    def _cancel_reservation(self, slot: Slot) -> None:
        held_tokens = len(slot.blocks) * self.block_tokens
        if slot.covered > held_tokens:
            self._reserved_blocks -= (slot.covered - held_tokens) // self.block_tokens
            slot.covered = held_tokens

    def _end(self, slot: Slot, reason: FinishReason, message: str = "") -> Finished:
        """Marks it ended and gives back its blocks, if no step writes them. The caller takes it out of `_running`."""
        slot.ended = True
        self._waiting.pop(slot.request_id, None)
        self._cancel_reservation(slot)
        self.returning_blocks += len(slot.blocks)
        if not slot.in_flight:
            self._forget(slot)
        return slot.finished(reason, message)

    def _forget(self, slot: Slot) -> None:
        self.returning_blocks -= len(slot.blocks)
        self._pool.release(slot.blocks)
        del self._slots[slot.request_id]

    def _land(self, flight: Flight) -> None:
        self.returning_blocks -= len(flight.returning)
        self._pool.release(flight.returning)


def _without_columns(result: StepResult, columns: Sequence[int]) -> StepResult:
    gone = set(columns)
    keep = [i for i in range(len(result.request_ids)) if i not in gone]
    return StepResult(
        result.step,
        tuple(result.request_ids[i] for i in keep),
        tuple(result.token_ids[i] for i in keep),
        tuple(result.logprobs[i] for i in keep) if result.logprobs else (),
    )
