"""`ModelText`: what the engine's callers need to know of a model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelText:
    """Text to tokens and back, as functions, so that neither the engine nor the server depends on a tokenizer.

    `vocab`: ids go from 0 to `vocab` - 1. `eos_ids`: tokens that end an answer. `token_bytes[i]`: the bytes of token i,
    empty for special ones. `token_name(i)`: what to call it in logprobs. `encode(text)`: tokens of a bare prompt,
    special tokens in the text taken as text. `render(messages)`: a conversation as the chat template writes it, ready
    for the answer; RequestError if the template refuses. `encode_chat(text)`: its tokens.
    """

    vocab: int
    eos_ids: frozenset[int]
    token_bytes: Sequence[bytes]
    token_name: Callable[[int], str]
    encode: Callable[[str], Sequence[int]]
    render: Callable[[list[dict[str, str]]], str]
    encode_chat: Callable[[str], Sequence[int]]
