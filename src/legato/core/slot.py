"""`Slot`: what changes about one request while it is served, as plain integers."""

from __future__ import annotations

import math
from array import array

from legato.core.prefix import KeyChain
from legato.core.request import Finished, FinishReason, Request
from legato.core.tenants import Price, Tenant


class Slot:
    """One unfinished request: its tokens, its KV blocks, and the cursors that tell how far it is.

        0 ───────── computed ───────── scheduled ───────── known ───────── limit
          KV is there         in flight           to plan         to sample

    `scheduled` moves in `apply`, `computed` in `commit`. `known` is one past the last position that may be computed:
    every token there is, and the one that a step in flight will sample, but never the final one, which nobody reads
    (so `known < limit`). `tokens` only ever grows: preemption sets back `scheduled` and `computed`, nothing else.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "covered",
        "due_s",
        "ended",
        "first_stop",
        "in_flight",
        "itl_s",
        "known",
        "last_token_s",
        "limit",
        "overtaken",
        "preemptions",
        "priority",
        "promised",
        "published",
        "rank",
        "request",
        "request_id",
        "scheduled",
        "score_stop",
        "scored",
        "stop_ids",
        "tenant",
        "tokens",
    )

    def __init__(
        self, request: Request, context: int, rank: int, chain: KeyChain | None, tenant: Tenant | None = None
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.priority = request.priority
        self.rank = rank  # how many were submitted before it
        self.arrival_s = request.arrival_s
        self.itl_s = request.itl_s
        self.due_s = request.due_s  # endless once its first token cannot be there in time
        self.tenant = tenant or Tenant(request.tenant, 1.0, Price())
        self.last_token_s = math.inf  # nobody waits for the token after one that there is not
        self.tokens = array("i", request.prompt)
        self.blocks: list[int] = []
        self.known = len(request.prompt)
        self.scheduled = 0
        self.computed = 0
        self.covered = 0  # positions that the blocks held and reserved hold
        self.scored, self.score_stop = request.scored_rows  # rows that score the prompt, those left: see `Progress`
        self.in_flight = 0  # steps applied and not committed that contain it
        self.preemptions = 0
        self.overtaken = 0  # requests that were admitted before it though they came after it
        self.cached_tokens = -1  # of the prompt, not computed since they were cached; -1 until it is admitted
        self.ended = False  # finished or aborted, and kept only until its steps in flight are committed
        self.limit = min(len(request.prompt) + request.stop.max_tokens, context)  # tokens in all, at the end
        self.stop_ids = request.stop.token_ids
        self.first_stop = len(request.prompt) + request.stop.min_tokens  # tokens in all before a stop id counts
        self.chain = chain  # None: neither uses cached blocks nor leaves any
        self.published = 0  # leading blocks that are in the prefix cache
        self.promised = 0  # leading blocks that others may wait for
        if chain is not None:
            chain.extend(self.tokens)

    @property
    def cacheable(self) -> int:
        """Tokens that cached blocks may stand for: of all rows from there on the logits may be needed."""
        return self.scored if self.scored < self.score_stop else self.known - 1

    def end_reason(self) -> FinishReason | None:
        """Why the newest token is the last one, or None if it is not."""
        if self.tokens[-1] in self.stop_ids and len(self.tokens) >= self.first_stop:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def finished(self, reason: FinishReason, message: str = "") -> Finished:
        """The account of a request that ends now."""
        prompt_tokens = len(self.request.prompt)
        generated_tokens = len(self.tokens) - prompt_tokens
        cached_tokens = max(self.cached_tokens, 0)
        return Finished(
            self.request_id, reason, prompt_tokens, generated_tokens, self.preemptions, message, cached_tokens
        )

    def check(self, block_tokens: int, context: int, flights: int) -> None:
        """Asserts what must hold of it between the verbs. `flights`: steps in flight that contain it."""
        name = f"request {self.request_id}"
        held_tokens = len(self.blocks) * block_tokens
        assert 0 <= self.computed <= self.scheduled <= self.known < self.limit <= context, f"{name}: cursors"
        assert self.scored >= min(self.scheduled, self.score_stop), f"{name}: a row of its prompt was not scored"
        assert self.published * block_tokens <= self.computed, f"{name}: a block is cached and not computed"
        assert self.in_flight == flights, f"{name}: steps in flight"
        assert self.in_flight or self.computed == self.scheduled, f"{name}: scheduled, but nothing in flight"
        assert self.in_flight or self.known == len(self.tokens), f"{name}: a token is promised, but nothing in flight"
        assert self.scheduled <= held_tokens < self.scheduled + block_tokens, f"{name}: too many or too few blocks"
        if self.ended:
            assert self.in_flight, f"{name}: ended and kept"
        elif self.covered:
            assert self.covered >= held_tokens and self.covered % block_tokens == 0, f"{name}: reservation"
            assert self.covered >= self.known or self.known - self.scheduled <= 1, f"{name}: prompt is not reserved"
