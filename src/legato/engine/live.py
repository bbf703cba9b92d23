"""`Live`: a sequence that the engine works on, as the server's side knows it."""

from __future__ import annotations

import dataclasses

from legato.engine.forecast import Pending
from legato.engine.metrics import EngineMetrics, Served
from legato.engine.stream import TokenStream
from legato.engine.terms import Terms


class Live:
    """When its tokens came, and what it had asked for. `served`: where its tenant's tokens are counted."""

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "first_token_s",
        "last_token_s",
        "pending",
        "prompt_tokens",
        "served",
        "stream",
        "terms",
        "worst_gap_s",
    )

    def __init__(
        self,
        stream: TokenStream,
        arrival_s: float,
        prompt_tokens: int,
        pending: Pending,
        terms: Terms,
        served: Served,
    ) -> None:
        self.stream = stream
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.pending = pending
        self.terms = terms
        self.served = served
        self.cached_tokens = 0
        self.first_token_s = self.last_token_s = -1.0
        self.worst_gap_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether its first token has come."""
        return self.first_token_s >= 0.0

    def found(self, tokens: int) -> None:
        """So many of its prompt need not be computed."""
        self.cached_tokens = tokens
        left = min(self.pending.prompt_tokens, self.prompt_tokens - tokens)
        self.pending = dataclasses.replace(self.pending, prompt_tokens=left)

    def record_token(self, metrics: EngineMetrics, now_s: float) -> None:
        """Counts one that came now. Runs once a token."""
        if self.first_token_s < 0.0:
            self.first_token_s = now_s
            ttft_s = now_s - self.arrival_s
            metrics.ttft_seconds.observe(ttft_s)
            metrics.prompt_tokens += self.prompt_tokens
            self.served.prompt_tokens += self.prompt_tokens - self.cached_tokens
            if self.terms.ttft_s is not None:
                metrics.record_wish("ttft", kept=ttft_s <= self.terms.ttft_s)
        else:
            gap_s = now_s - self.last_token_s
            metrics.itl_seconds.observe(gap_s)
            if gap_s > self.worst_gap_s:
                self.worst_gap_s = gap_s
        self.last_token_s = now_s
        metrics.generated_tokens += 1
        self.served.generated_tokens += 1

    def record_end(self, metrics: EngineMetrics, reason: str, now_s: float) -> None:
        """Counts its end, and its wishes: of one that was not served, only those that it did not get while it was here.

        A client that has waited longer than it wanted and leaves is the case that the counters are for.
        """
        elapsed_s, terms = now_s - self.arrival_s, self.terms
        metrics.record_finish(reason, elapsed_s)
        served = reason in ("stop", "length")
        if terms.ttft_s is not None and not self.has_begun and elapsed_s > terms.ttft_s:
            metrics.record_wish("ttft", kept=False)
        if terms.deadline_s is not None and (served or elapsed_s > terms.deadline_s):
            metrics.record_wish("deadline", kept=elapsed_s <= terms.deadline_s)
        if terms.itl_s is not None:
            gap_s = max(self.worst_gap_s, now_s - self.last_token_s if self.has_begun else 0.0)
            if served or gap_s > terms.itl_s:
                metrics.record_wish("itl", kept=gap_s <= terms.itl_s)
