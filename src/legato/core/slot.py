"""`Slot`: what changes about one request while it is served, as plain integers."""

from __future__ import annotations

from array import array

from legato.core.request import Finished, FinishReason, Request


class Slot:
    """One unfinished request: its tokens, its KV blocks, and the cursors that tell how far it is.

        0 ───────── computed ───────── scheduled ───────── known ───────── limit
          KV is there         in flight           to plan         to sample

    `scheduled` moves in `apply`, `computed` in `commit`. `known` is one past the last position that may be computed:
    every token there is, and the one that a step in flight will sample, but never the final one, which nobody reads
    (so `known < limit`). `tokens` only ever grows: preemption sets back `scheduled` and `computed`, nothing else.
    """

    __slots__ = (
        "blocks",
        "computed",
        "covered",
        "ended",
        "first_stop",
        "in_flight",
        "known",
        "limit",
        "preemptions",
        "request",
        "request_id",
        "scheduled",
        "stop_ids",
        "tokens",
    )

    def __init__(self, request: Request, context: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.tokens = array("i", request.prompt)
        self.blocks: list[int] = []
        self.known = len(request.prompt)
        self.scheduled = 0
        self.computed = 0
        self.covered = 0  # positions that the blocks held and reserved hold
        self.in_flight = 0  # steps applied and not committed that contain it
        self.preemptions = 0
        self.ended = False  # finished or aborted, and kept only until its steps in flight are committed
        self.limit = min(len(request.prompt) + request.stop.max_tokens, context)  # tokens in all, at the end
        self.stop_ids = request.stop.token_ids
        self.first_stop = len(request.prompt) + request.stop.min_tokens  # tokens in all before a stop id counts

    def end_reason(self) -> FinishReason | None:
        """Why the newest token is the last one, or None if it is not."""
        if self.tokens[-1] in self.stop_ids and len(self.tokens) >= self.first_stop:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def finished(self, reason: FinishReason, message: str = "") -> Finished:
        """The account of a request that ends now."""
        prompt_tokens = len(self.request.prompt)
        generated_tokens = len(self.tokens) - prompt_tokens
        return Finished(self.request_id, reason, prompt_tokens, generated_tokens, self.preemptions, message)
