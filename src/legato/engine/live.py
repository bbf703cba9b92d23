"""`Live`: a sequence that the engine works on, as the server's side knows it."""

from __future__ import annotations

from legato.engine.forecast import Pending
from legato.engine.metrics import EngineMetrics, Served
from legato.engine.stream import TokenStream
from legato.engine.terms import Terms


class Live:
    """When its tokens came, and what it had asked for. `served`: where its tenant's tokens are counted."""

    __slots__ = ("arrival_s", "last_token_s", "pending", "served", "stream", "terms", "worst_gap_s")

    def __init__(self, stream: TokenStream, arrival_s: float, pending: Pending, terms: Terms, served: Served) -> None:
        self.stream = stream
        self.arrival_s = arrival_s
        self.pending = pending
        self.terms = terms
        self.served = served
        self.last_token_s = -1.0
        self.worst_gap_s = 0.0

    def record_token(self, metrics: EngineMetrics, now_s: float) -> None:
        """Counts one that came now. Runs once a token."""
        if self.last_token_s < 0.0:
            ttft_s, prompt_tokens = now_s - self.arrival_s, self.pending.prompt_tokens
            metrics.ttft_seconds.observe(ttft_s)
            metrics.prompt_tokens += prompt_tokens
            self.served.prompt_tokens += prompt_tokens
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
        """Counts its end, and the wishes of a request that was served."""
        elapsed_s, terms = now_s - self.arrival_s, self.terms
        metrics.record_finish(reason, elapsed_s)
        if reason not in ("stop", "length"):
            return
        if terms.deadline_s is not None:
            metrics.record_wish("deadline", kept=elapsed_s <= terms.deadline_s)
        if terms.itl_s is not None:
            metrics.record_wish("itl", kept=self.worst_gap_s <= terms.itl_s)
