"""`Terms`: how a request wants to be served, beside what it wants."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """`priority`, `cache_salt`, `tenant`, `itl_s`: as `core.request.Request` has them.

    `ttft_s`: from arrival to the first token, at most; `deadline_s`: to the last one. `answer_tokens`: those the answer
    may have, 0 if the request does not say.
    """

    priority: int = 0
    cache_salt: bytes = b""
    tenant: str = ""
    itl_s: float | None = None
    ttft_s: float | None = None
    deadline_s: float | None = None
    answer_tokens: int = 0

    def due_s(self, arrival_s: float, decode_s: float) -> float:
        """When the first token is wanted, if the others come `decode_s` apart. Endless if whenever."""
        due_s = math.inf if self.ttft_s is None else arrival_s + self.ttft_s
        if self.deadline_s is not None:
            answer_s = max(self.answer_tokens - 1, 0) * decode_s
            due_s = min(due_s, arrival_s + max(self.deadline_s - answer_s, 0.0))
        return due_s
