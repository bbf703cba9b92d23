"""Many steps at once, where all are alike: for a clock that need not wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from legato.core.cost import StepCost
from legato.core.request import Finished
from legato.core.shape import Attention, StepShape
from legato.core.slot import Slot
from legato.core.state import SchedulerState


def quiet_steps(state: SchedulerState, max_seqs: int, attention: Attention) -> int:
    """How many steps, from the next one on, decode all that runs and do nothing else.

    Each of these is what `plan_step` would plan as long as nobody comes: the same requests one position further, and
    its shape grows by as much as that of the one before. Requests may end with the last one. Then a block would be
    missing, or a window of attention begins to slide. 0 if something is in flight, somebody has a prompt to compute, or
    somebody waits and could enter. Cost: O(running). Not for a state with host memory or stop ids: that is not looked
    at.
    """
    running = state.running
    if state.in_flight or not running or (state.waiting and len(running) < max_seqs):
        return 0
    steps = 1 << 30
    for slot in running:
        if slot.known - slot.scheduled != 1:
            return 0
        left = slot.limit - slot.known
        if left < steps:
            steps = left
    for _, window in attention.layers:
        if window is not None:
            for slot in running:
                if slot.scheduled < window:
                    steps = min(steps, window - slot.scheduled)
    while steps > 0 and _more_blocks(running, steps, state.block_tokens) > state.free_blocks:
        steps //= 2
    return steps


def quiet_seconds(running: Sequence[Slot], steps: int, cost: StepCost) -> tuple[StepShape, list[float]]:
    """The shape of the first of so many of them, and what each takes. Cost: O(running + steps).

    Shapes grow by a constant and `cost` is a sum of products with them, so the first and the last say it all.
    """
    starts, attention = [slot.scheduled for slot in running], cost.attention
    n, seen = len(starts), attention.decoded(starts)
    shape = StepShape(n, n, seen, seen, n)
    first_s = cost.predict(shape)
    if steps == 1:
        return shape, [first_s]
    last = seen + (steps - 1) * (attention.decoded([start + 1 for start in starts]) - seen)
    more_s = (cost.predict(StepShape(n, n, last, last, n)) - first_s) / (steps - 1)
    return shape, [first_s + more_s * step for step in range(steps)]


def leap(state: SchedulerState, steps: int, now_s: float) -> tuple[Finished, ...]:
    """Carries out the first `steps` of `quiet_steps`, the last of which ends at `now_s`: as if each had been planned,
    applied and committed. Returns the requests that end with it. Every token is its request's id.
    Cost: O(running), and O(1) a block.
    """
    memory, block_tokens = state.memory, state.block_tokens
    if state.policy.by_tenant:
        for step in range(steps):  # one after the other, as sums are rounded
            for slot in state.running:
                slot.tenant.charge(slot.scheduled + step, 1, decode=True)
    ending = False
    for slot in state.running:
        stop = slot.computed = slot.scheduled = slot.scheduled + steps
        if stop + 1 < slot.limit:
            slot.known = stop + 1
        else:
            slot.known, ending = stop, True
        slot.tokens.extend([slot.request_id] * steps)
        slot.last_token_s = now_s
        if stop > len(slot.blocks) * block_tokens:
            memory.extend(slot, stop, [])
        if stop >= (slot.published + 1) * block_tokens:
            memory.pool.release(memory.publish(slot))
    state.next_step += steps
    return state.retire() if ending else ()


def _more_blocks(running: Sequence[Slot], steps: int, block_tokens: int) -> int:
    """Blocks that these take within so many steps, beside those reserved for them."""
    return sum(-(-max(slot.scheduled + steps - slot.covered, 0) // block_tokens) for slot in running)
