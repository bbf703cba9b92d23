"""`StepBudget`: how much one step may do, in tokens and in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from legato.core.cost import StepCost
from legato.core.policy import Moment
from legato.core.view import Progress
from legato.errors import ConfigError

Prefer = Literal["itl", "ttft"]

_last_token_s, _in_flight, _own_itl_s = attrgetter("last_token_s"), attrgetter("in_flight"), attrgetter("itl_s")


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long the next step may take. Seconds; `now_s` on the clock that `Progress.last_token_s` is read from.

    `now_s`: when the step will begin, which is when the tokens of a step still in flight are there.
    `cost`: predictions to plan with, their margin included. `itl_s`: the longest gap wanted between two tokens of a
    stream. `prefill_share`: of that gap, what prompts are to have at least. `prefer`: which of the two gives way when
    both cannot hold: with "itl" prompts do, down to `least_rows` a step, with "ttft" the gap does. `token_s`: what a
    token of a prompt takes at present, steps' other work included; 0 if nobody knows.
    """

    cost: StepCost
    now_s: float
    itl_s: float
    prefill_share: float = 0.2
    prefer: Prefer = "itl"
    least_rows: int = 1
    token_s: float = 0.0

    def step_seconds(self, decodes: Sequence[Progress], decode_s: float) -> float:
        """Seconds until the first of `decodes`, which alone take `decode_s`, is late. Endless if nobody decodes.

        Or longer, if prompts would have less than their share and are to have it. A gap that a request wants for
        itself and that is below everybody's never takes their share from prompts.
        """
        if not decodes:
            return math.inf
        itl_s, now_s = self.itl_s, self.now_s
        due_s = itl_s + (
            min(map(_last_token_s, decodes))
            if not any(map(_in_flight, decodes))
            else min(now_s if r.in_flight else r.last_token_s for r in decodes)
        )
        own_due_s = math.inf
        if any(map(_own_itl_s, decodes)):
            lasts = [(now_s if r.in_flight else r.last_token_s, r.itl_s) for r in decodes]
            due_s = min(last_s + (itl_s if own_s is None else max(own_s, itl_s)) for last_s, own_s in lasts)
            own_due_s = min(last_s + own_s for last_s, own_s in lasts if own_s is not None)
        with_share_s = decode_s + self.prefill_share * self.itl_s
        left_s, own_left_s = due_s - now_s, own_due_s - now_s
        if self.prefer == "ttft":
            left_s = max(left_s, with_share_s)
        return min(left_s, max(own_left_s, with_share_s))

    @property
    def most_decode_s(self) -> float:
        """What a step of decodes alone may take, so that both the gap and the share of prompts can hold."""
        return (1.0 - self.prefill_share) * self.itl_s


@dataclass(frozen=True, slots=True)
class StepBudget:
    """`max_tokens`: rows a step may compute, decodes and prefill chunks together. `max_seqs`: requests running at once.

    `max_seqs <= max_tokens`, so that every decode fits in every step, and one token is left for a prefill whenever
    there is one. `prompt_logit_rows`: rows whose logits a step may compute for the log-probabilities of prompts, at
    least 1: memory for logits does not grow with a prompt. Raises ConfigError, with the numbers, otherwise.
    `time`: how long the step may take; None: as long as its tokens do.
    `chunk_tokens`: of one prompt, at most. `partial_prefills`: prompts that a step may compute a part of, at most.
    """

    max_tokens: int = 512
    max_seqs: int = 64
    prompt_logit_rows: int = 64
    time: StepTime | None = None
    chunk_tokens: int | None = None
    partial_prefills: int | None = None

    def __post_init__(self) -> None:
        if self.max_seqs < 1:
            raise ConfigError(f"max_seqs is {self.max_seqs}; at least 1 request must be able to run")
        if self.max_tokens < self.max_seqs:
            raise ConfigError(
                f"a step of {self.max_tokens} tokens cannot hold one for each of {self.max_seqs} running requests;"
                f" raise max_tokens to {self.max_seqs} or lower max_seqs to {max(self.max_tokens, 1)}"
            )
        if self.prompt_logit_rows < 1:
            raise ConfigError(f"prompt_logit_rows is {self.prompt_logit_rows}; 1 is the least that scores a prompt")

        for name in ("chunk_tokens", "partial_prefills"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; no prompt would ever be computed: 1 is the least")

    @property
    def moment(self) -> Moment:
        """What policies may know of time; nothing where it does not count."""
        return Moment() if self.time is None else Moment(self.time.now_s, self.time.token_s)

    @property
    def logit_rows(self) -> int:
        """Rows whose logits a step computes at most: one a request, and those of prompts."""
        return min(self.max_seqs + self.prompt_logit_rows, self.max_tokens)
