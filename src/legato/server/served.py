"""The model as the server sees it: names, limits, and text to tokens and back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from legato.engine.params import SamplingParams
from legato.engine.text import ModelText
from legato.engine.wire import EngineInfo
from legato.errors import PromptTooLong, RequestError
from legato.server.problems import Problem

INLINE_CHARACTERS = 4000
"""Longer texts are tokenised in a thread (the tokenizer releases the GIL): 4,000 take about a millisecond."""

LONGEST_SPECIAL_NAME = 32

_T = TypeVar("_T")


@dataclass(frozen=True)
class ServedModel:
    """Everything about the model that is not in the engine's process.

    `names`: what a client may call it; the first is the one we answer with. `created`: seconds since 1970.
    """

    names: tuple[str, ...]
    created: int
    text: ModelText

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises a 404 if the client means another model. None and "default" mean this one."""
        if name is not None and name != "default" and name not in self.names:
            raise Problem(
                404,
                f"the model '{name}' is not served here; '{self.name}' is",
                param="model",
                code="model_not_found",
            )

    async def prompt_tokens(self, prompt: str | Sequence[int], context: int) -> tuple[int, ...]:
        """Tokens of a bare prompt. RequestError if it is empty or an id is out of range."""
        if not isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; it needs at least 1 token", field="prompt")
            low, high = min(prompt), max(prompt)
            if low < 0 or high >= self.text.vocab:
                bad = low if low < 0 else high
                raise RequestError(f"token id {bad} in prompt; ids go from 0 to {self.text.vocab - 1}", field="prompt")
            return tuple(prompt)
        self._check_length(len(prompt), context, "prompt")
        tokens = await _off_loop(len(prompt), lambda: tuple(self.text.encode(prompt)))
        if not tokens:
            raise RequestError("the prompt is empty; it needs at least 1 token", field="prompt")
        return tokens

    def prompt_text(self, prompt: str | Sequence[int]) -> str:
        """A bare prompt as text, to be echoed."""
        if isinstance(prompt, str):
            return prompt
        return b"".join(self.text.token_bytes[token] for token in prompt).decode("utf-8", "replace")

    async def chat_tokens(self, messages: list[dict[str, str]], context: int) -> tuple[int, ...]:
        """Tokens of a conversation, ready for the answer."""
        size = sum(len(message["content"]) for message in messages)
        self._check_length(size, context, "messages")
        return await _off_loop(size, lambda: tuple(self.text.encode_chat(self.text.render(messages))))

    def _check_length(self, characters: int, context: int, field: str) -> None:
        """Refuses a text that cannot fit however it is tokenised, without doing so: seconds for megabytes."""
        least = -(-characters // self._longest_token)
        if least >= context:
            raise PromptTooLong(
                f"the prompt has {characters} characters, at least {least} tokens; {context} fit, of which the answer"
                " needs at least 1",
                field=field,
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of a token, at most: those of its bytes, or of the name of a special one."""
        return max(LONGEST_SPECIAL_NAME, max(map(len, self.text.token_bytes)))

    def room(self, prompt: Sequence[int], params: SamplingParams, info: EngineInfo, field: str) -> int:
        """Tokens that fit after the prompt, at least 1. PromptTooLong with both numbers if there are none."""
        params.check_vocabulary(self.text.vocab)
        context = info.context
        if len(prompt) >= context:
            whose = "the context" if context == info.max_model_len else "the whole KV cache"
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; {whose} holds {context}, of which the answer needs at least 1",
                field=field,
            )
        return context - len(prompt)


async def _off_loop(characters: int, work: Callable[[], _T]) -> _T:
    return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
