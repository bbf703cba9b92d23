"""What a server understands beyond the least that all do, found out by asking."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from legato.bench.client import NO_TOKEN, Client, Reply
from legato.bench.load import WordScale, words
from legato.errors import ServerUnreachable

Prompt = str | list[int]

_IDS = 24
_WORDS = (64, 256)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to ask one server. `words`: how many tokens it makes of words, where it takes no token ids."""

    model: str
    is_chat: bool = False
    takes_ids: bool = False
    ignores_eos: bool = False
    tells_usage: bool = False
    words: WordScale = field(default_factory=WordScale)

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/chat/completions" if self.is_chat else "/completions"

    def body(self, prompt: Prompt, max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
        """A greedy request for `max_tokens` tokens."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.tells_usage and stream:
            body["stream_options"] = {"include_usage": True}
        return body


class Answers(Protocol):
    """What the measurements need of a server."""

    async def complete(self, prompt: Prompt, max_tokens: int, reply: Reply) -> None:
        """Fills `reply` until the answer is over; cancelling gives it up. Raises nothing of the server's doing."""


class Server:
    """A server whose dialect is known."""

    def __init__(self, client: Client, dialect: Dialect) -> None:
        self.dialect = dialect
        self._client = client

    async def complete(self, prompt: Prompt, max_tokens: int, reply: Reply) -> None:
        """Fills `reply` until the answer is over; cancelling gives it up."""
        await self._client.stream(self.dialect.path, self.dialect.body(prompt, max_tokens), reply)


async def learn_dialect(client: Client, model: str | None, ids: Sequence[int]) -> Dialect:
    """The dialect of the server, by a handful of tiny requests. `ids`: tokens any model has.

    Raises ServerUnreachable if it does not even take the least.
    """
    dialect = Dialect(model or await _first_model(client))
    refusal = await _refusal(client, dialect, "Hello")
    if refusal is not None:
        chat = dataclasses.replace(dialect, is_chat=True)
        if await _refusal(client, chat, "Hello") is not None:
            raise ServerUnreachable(
                f"{client.address}{client.address.root} does not complete a prompt of one word ({refusal});"
                f" is it an OpenAI server, and '{dialect.model}' a model of it? say so with --model"
            )
        dialect = chat
    bolder = dataclasses.replace(dialect, tells_usage=True)
    if await _refusal(client, bolder, "Hello") is None:
        dialect = bolder
    bolder = dataclasses.replace(dialect, ignores_eos=True)
    if await _refusal(client, bolder, "Hello") is None:
        dialect = bolder
    if await _takes_ids(client, dialect, ids[:_IDS]):
        return dataclasses.replace(dialect, takes_ids=True)
    return dataclasses.replace(dialect, words=await _scale(client, dialect))


async def _first_model(client: Client) -> str:
    status, content = await client.fetch("/models")
    try:
        document = msgspec.json.decode(content)
        return str(document["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        raise ServerUnreachable(
            f"{client.address}{client.address.root}/models does not list a model (status {status});"
            f" is it an OpenAI server? name its model with --model"
        ) from None


async def _refusal(client: Client, dialect: Dialect, prompt: Prompt) -> str | None:
    """Why a request of one token was refused; None if it was answered."""
    reply = Reply()
    await client.stream(dialect.path, dialect.body(prompt, 1), reply)
    # An answer that is over at once is an answer: of what follows "Hello" the end may be the likeliest.
    return None if reply.error in (None, NO_TOKEN) else reply.error


async def _takes_ids(client: Client, dialect: Dialect, ids: Sequence[int]) -> bool:
    if dialect.is_chat:
        return False
    status, content = await client.fetch(dialect.path, dialect.body(list(ids), 1, stream=False))
    # A server that takes the list for something else is found out by its count; one token may begin the text.
    return status == 200 and abs((_prompt_tokens(content) or 0) - len(ids)) <= 1


async def _scale(client: Client, dialect: Dialect) -> WordScale:
    """Tokens a word, by two prompts of which one is longer."""
    counts = []
    for count in _WORDS:
        status, content = await client.fetch(dialect.path, dialect.body(words(count, count), 1, stream=False))
        tokens = _prompt_tokens(content)
        if status != 200 or tokens is None:
            return WordScale()
        counts.append(tokens)
    tokens_per_word = (counts[1] - counts[0]) / (_WORDS[1] - _WORDS[0])
    return WordScale(max(tokens_per_word, 0.1), max(counts[0] - _WORDS[0] * tokens_per_word, 0.0))


def _prompt_tokens(content: bytes) -> int | None:
    try:
        return int(msgspec.json.decode(content)["usage"]["prompt_tokens"])
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return None
