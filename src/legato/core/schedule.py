"""`plan_step`: the whole scheduler, as one pure function from a view to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from legato.core.budget import StepBudget
from legato.core.draft import Draft
from legato.core.plan import StepPlan
from legato.core.policy import Policy
from legato.core.view import Progress, SchedulerView
from legato.errors import ConfigError


def plan_step(view: SchedulerView, budget: StepBudget, policy: Policy) -> StepPlan:
    """Tokens each request computes in the next step. Reads `view`, changes nothing; equal views give equal plans.

    Decodes first, one token each; then prompts, running or waiting, as the policy orders them. Every decode is in the
    plan or in `plan.preempt`: a decode never waits for a prefill. (Planned ahead of a commit it may wait for a block
    that the step in flight still holds.) With work and nothing in flight the plan is never empty.
    A waiting request whose next block is computed by somebody who stands before it is not admitted before that is
    there: it would compute it a second time, and later. A chunk of a prompt that is scored ends where the step's logits
    end: such a request may get no rows, and is not admitted when there are none left; no other request waits for it.
    Units: tokens and blocks. Cost: O(running + admitted), whatever the number waiting.
    Raises ConfigError if more requests run than `budget` has tokens: it was lowered below what was admitted under it.
    """
    running = view.running
    if len(running) > budget.max_tokens:
        raise ConfigError(
            f"{len(running)} requests are running and a step has {budget.max_tokens} tokens;"
            f" keep max_tokens at {len(running)} or more until some have finished"
        )
    decodes = [r for r in running if r.known - r.scheduled == 1]
    prefills = [r for r in running if r.known - r.scheduled > 1] if len(decodes) < len(running) else []
    growing = [r for r in decodes if r.scheduled >= r.covered]
    free_blocks = view.free_blocks

    # Victims first, then pack: nothing that is given out below is taken back.
    victims: list[int] = []
    if len(growing) > free_blocks + view.returning_blocks:
        victims, freed_blocks = _choose_victims(view, policy, growing)
        free_blocks += freed_blocks
        decodes, prefills, growing = (_without(victims, part) for part in (decodes, prefills, growing))
    if len(growing) > free_blocks:
        # Only ahead of a commit: the blocks exist, but the step in flight still writes them.
        decodes = _without([r.request_id for r in growing[free_blocks:]], decodes)
        growing = growing[:free_blocks]
    free_blocks -= len(growing)

    draft = Draft(budget, decodes, prefills)
    room = draft.room
    admitted: list[int] = []
    misfits: list[int] = []
    overtaken: tuple[int, ...] = ()
    entering: set[bytes] = set()  # the first block that each of `admitted` does not find in the pool
    behind = {r.request_id for r in prefills}  # whose turn has not come
    # Whoever was just preempted stands near the front of the queue: nobody enters over his head.
    left_seqs = 0 if victims else budget.max_seqs - len(running)
    queue = list(islice(view.waiting, policy.lookahead)) if left_seqs > 0 and room.tokens else []
    moment = budget.moment
    missed = [r.request_id for part in (prefills, queue) for r in part if moment.is_too_late_for(r)]
    candidates = len(prefills) + len(queue)
    for request in policy.prompts(prefills, queue, moment) if room.tokens else ():
        draft.turn_to(request.priority)
        if not room.tokens:
            break
        candidates -= 1
        leaves = policy.leaves if candidates else 0.0
        if request.covered:
            behind.discard(request.request_id)
            draft.pack(request, request.scheduled, leaves)
            continue
        if not left_seqs or (request.scored < request.score_stop and not room.scores):
            continue  # it enters when those before it are done, or scored
        prefix = view.prefix(request.request_id)
        if prefix.next_key in entering or (prefix.maker is not None and prefix.maker not in behind):
            continue  # somebody before it computes what it needs next: it enters when that is there
        # The whole prompt is reserved at once: two half-computed prompts can never wait for each other's blocks.
        blocks = -(-request.known // view.block_tokens) - prefix.blocks + prefix.idle_blocks
        inside = len(running) + len(admitted)
        if blocks + (policy.spare_blocks(inside) if inside else 0) > free_blocks:
            if request.preemptions or request.overtaken >= policy.overtakes:
                left_seqs = 0
            else:
                misfits.append(request.request_id)
            continue
        # A block that is copied back counts as a row: it takes about the time of one.
        stored_blocks = min(prefix.stored_blocks, room.tokens - 1)
        start = (prefix.blocks + stored_blocks) * view.block_tokens
        room.tokens -= stored_blocks
        if room.stop(request, start) > draft.stop(request, start) == start:
            room.tokens += stored_blocks
            continue  # prompts that a step computes a part of are limited in number
        if not room.lets_in(request, start):
            left_seqs = 0
            continue
        free_blocks -= blocks
        admitted.append(request.request_id)
        if prefix.next_key is not None:
            entering.add(prefix.next_key)
        draft.pack(request, start, leaves)
        overtaken = tuple(misfits)
        left_seqs = 0 if misfits else left_seqs - 1

    return draft.finish(view.next_step, admitted, victims, overtaken, missed)


def _choose_victims(view: SchedulerView, policy: Policy, growing: Sequence[Progress]) -> tuple[list[int], int]:
    """Ids to preempt until each remaining decode of `growing` has its block, and the blocks that are free at once then.

    Ends before the last of the policy's order: `SchedulerState.submit` accepts nothing that the pool cannot hold alone.
    """
    missing = len(growing) - view.free_blocks - view.returning_blocks
    grows = {r.request_id for r in growing}
    order = list(policy.victims(view.running))
    freed = view.freed_blocks(r.request_id for r in order)
    victims: list[int] = []
    freed_blocks = 0
    for request, (at_once, in_all) in zip(order, freed, strict=True):
        victims.append(request.request_id)
        missing -= request.request_id in grows
        freed_blocks = at_once
        if missing <= in_all:
            break
    return victims, freed_blocks


def _without(request_ids: Sequence[int], requests: Sequence[Progress]) -> list[Progress]:
    gone = set(request_ids)
    return [r for r in requests if r.request_id not in gone]
