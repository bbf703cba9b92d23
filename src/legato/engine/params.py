"""`SamplingParams`: what a caller may ask of one completion, checked once and turned into the core's frozen types."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from legato.core.request import Sampling, StopRule
from legato.errors import RequestError

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
SEED_BITS = 63


def random_seed() -> int:
    """A fresh seed for a request that names none. 63 bits, so that it fits every signed 64-bit field on the way."""
    return secrets.randbits(SEED_BITS)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises RequestError naming the field unless `low <= value <= high` (NaN is refused too)."""
    if not (low <= value <= high):
        raise RequestError(f"{name} is {value}; it must be between {low:g} and {high:g}", field=name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to complete a prompt. Checked when made: RequestError names the field, its value and the bound.

    Defaults are greedy decoding of 128 tokens. `max_tokens` None: up to the end of the context. `temperature` 0 is
    greedy. `seed` None draws a fresh one; sequence i of `n` uses seed + i. `stop`: strings that end the text, never
    part of it. `stop_token_ids`: ids that do the same. Neither counts before `min_tokens` tokens. `logprobs` n: of the
    chosen token and the n most likely (0 to 20). `prompt_logprobs` n: the same of each token of the prompt but the
    first, or of those from position `prompt_logprobs_start` on; such a prompt is computed from there, cached or not.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; ask for at least 1", field="max_tokens")
        check_range("temperature", self.temperature, 0.0, 2.0)
        check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 (use temperature 0 for greedy decoding)", field="top_p")
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("top_k", self.top_k, -1, 2**31 - 1)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_range("n", self.n, 1, MAX_SEQUENCES)
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        check_range("prompt_logprobs_start", self.prompt_logprobs_start, 0, 2**31 - 1)
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must be between 0 and max_tokens ({self.max_tokens})",
                field="min_tokens",
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed}; it must fit in 64 bits", field="seed")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are matched", field="stop")
        if any(not text for text in self.stop):
            raise RequestError("stop has an empty string, which would end every text at once", field="stop")
        for token_id, bias in self.logit_bias.items():
            if not math.isfinite(bias) or abs(bias) > 100.0:
                raise RequestError(
                    f"logit_bias of token {token_id} is {bias}; it must be between -100 and 100", field="logit_bias"
                )

    def check_vocabulary(self, vocab: int) -> None:
        """Raises RequestError if an id in `logit_bias` or `stop_token_ids` is not in `[0, vocab)`."""
        for name, ids in (("logit_bias", tuple(self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab:
                    raise RequestError(f"{name} names token {token_id}; ids go from 0 to {vocab - 1}", field=name)

    def sampling(self, index: int = 0, *, seed: int | None = None, score_prompt: bool = True) -> Sampling:
        """The core's `Sampling` for sequence `index` of `n`. `seed` replaces an unset seed (shared by all n).

        `score_prompt` False: another sequence of the same prompt gives its log-probabilities, and no bit would differ.
        """
        base = self.seed if self.seed is not None else (random_seed() if seed is None else seed)
        return Sampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(base + index) & (2**SEED_BITS - 1),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if score_prompt else None,
            prompt_logprobs_start=self.prompt_logprobs_start,
        )

    def stop_rule(self, *, eos_ids: Collection[int], room: int) -> StopRule:
        """The core's `StopRule`. `room`: tokens the context still has after the prompt; `max_tokens` is cut to it."""
        limit = room if self.max_tokens is None else min(self.max_tokens, room)
        ids = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))
        return StopRule(max_tokens=limit, token_ids=ids, min_tokens=min(self.min_tokens, limit))
