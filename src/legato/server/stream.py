"""From token events to an HTTP response: one SSE write a step and client, or one JSON document at the end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from legato.engine.params import MAX_SEQUENCES, SamplingParams, random_seed
from legato.engine.service import EngineService
from legato.engine.stop import TextStream
from legato.engine.stream import TokenEvent, TokenStream
from legato.engine.terms import Terms
from legato.engine.wire import LogprobEntry
from legato.errors import LegatoError, RequestError
from legato.server.problems import Problem, error_body
from legato.server.prompt_logprobs import PromptLogprob
from legato.server.served import ServedModel

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]
DONE = b"data: [DONE]\n\n"
_json = msgspec.json.encode


class ClientGone(LegatoError):
    """The client closed its connection: nothing is left to answer."""


TokenLogprob = tuple[int, LogprobEntry]
"""A token and its log-probabilities."""

Usage = dict[str, Any]
"""Token counts, as OpenAI writes them."""


class Format(Protocol):
    """How an endpoint writes its answer. One object a request: what repeats is made once."""

    def opening(self, sequence: Choice) -> bytes:
        """The first chunk of a sequence, or nothing. `sequence.prompt_logprobs` are there, if wanted."""

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """A chunk of text."""

    def closing(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str) -> bytes:
        """The last chunk of a sequence."""

    def usage(self, usage: Usage) -> bytes:
        """The chunk with the token counts."""

    def document(self, sequences: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer of a request that does not stream."""


class Choice:
    """One sequence of a request: its text so far, and how it ended."""

    __slots__ = ("index", "logprobs", "opened", "prompt_logprobs", "reason", "text", "text_parts")

    def __init__(self, index: int, text: TextStream) -> None:
        self.index = index
        self.prompt_logprobs: list[PromptLogprob] = []
        """One a token of the prompt, once its first token has come; empty if they are not wanted."""
        self.text = text
        self.text_parts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.opened = False
        self.reason = ""

    def feed(self, event: TokenEvent) -> str:
        """Text to show after this event. Sets `reason` when the sequence is over."""
        reason = event.finish
        if reason == "stop":  # the token that stops is no part of the text
            self.text.tokens += 1
            self.reason = "stop"
            return self.text.finish()
        shown = self.text.feed(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append((event.token_id, event.logprobs))
        if self.text.stop_hit is not None:
            self.reason = "stop"
        elif reason is not None:
            self.reason = reason
            shown += self.text.finish()
        return shown


class Generation:
    """One validated client request: prompts in, a response out."""

    def __init__(
        self,
        service: EngineService,
        model: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        field: str,
        terms: Terms,
        tokenized_s: tuple[float, float],
    ) -> None:
        """Raises RequestError (PromptTooLong with both numbers) if a prompt cannot be served.

        `tokenized_s`: when their text was turned into tokens.
        """
        count = len(prompts) * params.n
        if count > MAX_SEQUENCES:
            raise RequestError(f"{count} sequences in one request; at most {MAX_SEQUENCES} are allowed", field="n")
        self._service = service
        self._model = model
        self._prompts = prompts
        self._params = params
        self._terms = terms
        self._tokenized_s = tokenized_s
        self._rooms = [model.room(prompt, params, service.info, field) for prompt in prompts]

    def first_token_seconds(self) -> float:
        """Until all its sequences had a first token, if it were sent now. What n of one prompt share counts once."""
        copies = 1 if self._service.info.prefix_caching else self._params.n
        scored = self._params.prompt_logprobs is not None
        return self._service.first_token_seconds([*self._prompts] * copies, self._terms, scored=scored)

    async def respond(self, receive: Receive, send: Send, output: Format, *, stream: bool, include_usage: bool) -> None:
        """Runs the sequences and sends the answer. When the client leaves, they are aborted at once."""
        tokens = self._service.open_stream()
        watch = asyncio.create_task(_watch(receive, tokens))
        try:
            sequences = self._submit(tokens, stream)
            if stream:
                await self._stream(tokens, sequences, send, output, include_usage)
            else:
                await self._answer(tokens, sequences, send, output)
        except ClientGone:
            pass
        finally:
            watch.cancel()
            tokens.close()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    def _submit(self, tokens: TokenStream, stream: bool) -> dict[int, Choice]:
        params, model, sequences = self._params, self._model, {}
        seed = random_seed()
        for i, (prompt, room) in enumerate(zip(self._prompts, self._rooms, strict=True)):
            rule = params.stop_rule(eos_ids=model.text.eos_ids, room=room)
            for j in range(params.n):
                # Of n sequences the first speaks of the prompt for all, but in a stream they do not wait for it.
                sampling = params.sampling(j, seed=seed, score_prompt=stream or j == 0)
                request_id = self._service.submit(tokens, prompt, sampling, rule, self._terms, self._tokenized_s)
                text = TextStream(model.text.token_bytes, params.stop, params.min_tokens)
                sequences[request_id] = Choice(i * params.n + j, text)
        return sequences

    async def _stream(
        self, tokens: TokenStream, sequences: dict[int, Choice], send: Send, output: Format, include_usage: bool
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        open_count = len(sequences)
        try:
            while open_count:
                chunks = []
                for event in await tokens.take():
                    seq = sequences[event.request_id]
                    if seq.reason:
                        continue
                    text = seq.feed(event)
                    if not seq.opened:
                        seq.opened = True
                        seq.prompt_logprobs = self._prompt_logprobs(tokens, event.request_id, seq)
                        chunks.append(output.opening(seq))
                    if seq.reason:
                        open_count -= 1
                        tokens.finish(event.request_id)
                        chunks.append(output.closing(seq.index, text, seq.logprobs, seq.reason))
                    elif text or seq.logprobs:
                        chunks.append(output.piece(seq.index, text, seq.logprobs))
                        if seq.logprobs:
                            seq.logprobs = []
                if chunks and open_count:
                    await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
        except ClientGone:
            raise
        except LegatoError as error:  # the status is sent: the error becomes the stream's last event
            chunks = [b"data: " + error_body(error)[1] + b"\n\n"]
        else:
            if include_usage:
                chunks.append(output.usage(self._usage(tokens, sequences)))
        chunks.append(DONE)
        await send({"type": "http.response.body", "body": b"".join(chunks)})

    async def _answer(self, tokens: TokenStream, sequences: dict[int, Choice], send: Send, output: Format) -> None:
        open_count = len(sequences)
        while open_count:
            for event in await tokens.take():
                seq = sequences[event.request_id]
                if seq.reason:
                    continue
                text = seq.feed(event)
                if text:
                    seq.text_parts.append(text)
                if seq.reason:
                    open_count -= 1
                    tokens.finish(event.request_id)
        ordered = list(sequences.values())
        firsts = [request_id for request_id, seq in sequences.items() if seq.index % self._params.n == 0]
        for seq in ordered:
            seq.prompt_logprobs = self._prompt_logprobs(tokens, firsts[seq.index // self._params.n], seq)
        await send_json(send, 200, output.document(ordered, self._usage(tokens, sequences)))

    def _prompt_logprobs(self, tokens: TokenStream, request_id: int, seq: Choice) -> list[PromptLogprob]:
        """Those of the prompt of `seq`, as they came for sequence `request_id` of the same one."""
        if self._params.prompt_logprobs is None:
            return []
        prompt = self._prompts[seq.index // self._params.n]
        return list(zip(prompt, [None, *tokens.prompt_logprobs.get(request_id, ())], strict=True))

    def _usage(self, tokens: TokenStream, sequences: dict[int, Choice]) -> Usage:
        prompt = sum(len(prompt) for prompt in self._prompts)
        generated = sum(seq.text.tokens for seq in sequences.values())
        # Of n sequences of one prompt the first tells what was there before the request came.
        firsts = [request_id for request_id, seq in sequences.items() if seq.index % self._params.n == 0]
        cached = sum(tokens.cached_tokens.get(request_id, 0) for request_id in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def send_json(send: Send, status: int, body: bytes, extra: Mapping[str, str] | None = None) -> None:
    """One JSON document as the whole response."""
    headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in (extra or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_json_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The body of a JSON request. Problem 415 for another content type, 413 over the limit; ClientGone."""
    headers = {name: value for name, value in scope["headers"] if name in (b"content-type", b"content-length")}
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json":
        shown = kind.decode("latin-1")[:80]
        raise Problem(415, f"the content type is '{shown}'; send application/json", code="unsupported_media_type")
    length = headers.get(b"content-length", b"0")
    too_large = Problem(413, f"the body is larger than {limit_bytes} bytes", code="body_too_large")
    if length.isdigit() and int(length) > limit_bytes:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise too_large
        if not message.get("more_body"):
            return b"".join(parts)


def new_id(prefix: str) -> str:
    """A fresh id for an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now_unix_s() -> int:
    """`created`, in seconds since 1970."""
    return int(time.time())


def dump(value: Any) -> bytes:
    """JSON."""
    return _json(value)


async def _watch(receive: Receive, tokens: TokenStream) -> None:
    """Ends the stream when the client is gone, while we write as well as while we wait."""
    while (await receive())["type"] != "http.disconnect":
        pass
    tokens.fail(ClientGone())
