"""What a user asked for, frozen: prompt, sampling, and when to stop. And how it ended: `Finished`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from legato.errors import PromptTooLong, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn from the logits. Defaults are greedy decoding without penalties.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 mean "off". Random numbers are counter-based,
    keyed by (`seed`, position), so a sampled text depends on nothing but its own request. `logprobs` None means "not
    wanted", 0 "of the chosen token only", n "and of the n most likely". `prompt_logprobs`: the same, of each token of
    the prompt after those before it, from position `prompt_logprobs_start` on; the first token has none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a request ends, as far as token ids can tell. Stop strings are matched on text, outside the core.

    `max_tokens`: generated tokens, at least 1. `token_ids`: end the request when generated (finish reason "stop");
    with `ignore_eos` the model's end-of-sequence ids are not among them. `min_tokens`: no id stops before that many.
    """

    max_tokens: int = 16
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to complete. `prompt`: token ids, at least one. `arrival_s`: on the caller's clock.

    `priority`: the lower, the earlier it is admitted and the later it is preempted. `cache_salt`: cached prefixes are
    shared among requests of one salt only. `attachments`: (position, digest) of what the prompt holds besides tokens.
    `itl_s`: the longest gap wanted between its tokens; None: as everybody's. `due_s`: when its first token is wanted,
    on the same clock; endless if whenever. `tenant`: who is served by it, where tenants share.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stop: StopRule = field(default_factory=StopRule)
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: bytes = b""
    attachments: tuple[tuple[int, bytes], ...] = ()
    itl_s: float | None = None
    due_s: float = math.inf
    tenant: str = ""

    @property
    def scored_rows(self) -> tuple[int, int]:
        """Positions `[start, stop)` whose logits score the token of the prompt after each; (0, 0) if there are none."""
        start, stop = max(self.sampling.prompt_logprobs_start - 1, 0), len(self.prompt) - 1
        return (start, stop) if self.sampling.prompt_logprobs is not None and start < stop else (0, 0)

    def verify(self, context: int, whose: str) -> None:
        """Raises PromptTooLong, with both numbers, if it could never run where `context` tokens fit, which are `whose`;
        RequestError if it makes no sense: no prompt, no token wanted.
        """
        prompt_tokens = len(self.prompt)
        if not prompt_tokens:
            raise RequestError("the prompt is empty; it needs at least 1 token", field="prompt")
        if self.stop.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.stop.max_tokens}; it must be at least 1", field="max_tokens")
        if prompt_tokens >= context:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens and {whose} holds {context}, 1 of them for the answer;"
                f" shorten the prompt to {context - 1} tokens or serve with a larger limit",
                field="prompt",
            )


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended. Every accepted request ends in exactly one of these.

    `reason`: "stop" a stop id was generated (it is the last token emitted); "length" `max_tokens`, the model's context
    or the KV pool was reached; "abort" the caller took it back; "error" its step failed, and `message` says why.
    `generated_tokens`: tokens emitted. `preemptions`: how often its KV was given up and computed again.
    `cached_tokens`: of the prompt, found in the prefix cache when it was first admitted.
    """

    request_id: int
    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    preemptions: int = 0
    message: str = ""
    cached_tokens: int = 0
