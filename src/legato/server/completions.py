"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from legato.engine.service import EngineService
from legato.server.schema import (
    completion_params,
    parse_completion,
    priority_of,
    prompts_of,
    salt_of,
    wants_usage,
)
from legato.server.served import ServedModel
from legato.server.stream import Choice, Generation, TokenLogprob, Usage, dump, new_id, now_unix_s, read_json_body


class CompletionFormat:
    """OpenAI's `text_completion`, whole or in chunks. The fixed parts of a chunk are encoded once."""

    def __init__(self, model: ServedModel, *, include_usage: bool) -> None:
        self._model = model
        self._base = {"id": new_id("cmpl"), "object": "text_completion", "created": now_unix_s()}
        self._base["model"] = model.name
        self._head = b"data: " + dump(self._base)[:-1] + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        """Nothing: a completion has no role."""
        return b""

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """A chunk of text."""
        head = b'%b%d,"text":%b' % (self._head, index, dump(text))
        if not logprobs:
            return head + self._plain_tail
        return head + b',"logprobs":%b,"finish_reason":null}]' % dump(self._logprobs(index, logprobs)) + self._tail

    def closing(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str) -> bytes:
        """The last text, with the reason."""
        columns = dump(self._logprobs(index, logprobs) if logprobs else None)
        end = b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b}]' % (
            self._head,
            index,
            dump(text),
            columns,
            dump(reason),
        )
        return end + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that carries the counts."""
        return b"data: " + dump({**self._base, "choices": [], "usage": usage}) + b"\n\n"

    def document(self, sequences: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer."""
        choices = [
            {
                "index": choice.index,
                "text": "".join(choice.text_parts),
                "logprobs": self._logprobs(choice.index, choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.reason,
            }
            for choice in sequences
        ]
        return dump({**self._base, "choices": choices, "usage": usage})

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Columns, as this endpoint has them. Offsets count characters of the completion."""
        offset, offsets = self._offsets.get(index, 0), []
        for token_id, _ in entries:
            offsets.append(offset)
            offset += len(self._model.text.token_bytes[token_id].decode("utf-8", "ignore"))
        self._offsets[index] = offset
        name = self._model.text.token_name
        return {
            "tokens": [name(token_id) for token_id, _ in entries],
            "token_logprobs": [chosen for _, (chosen, _) in entries],
            "top_logprobs": [{name(other): value for other, value in top} for _, (_, top) in entries],
            "text_offset": offsets,
        }


class CompletionEndpoint:
    """The ASGI application of the path."""

    def __init__(self, service: EngineService, model: ServedModel, body_limit_bytes: int) -> None:
        self._service = service
        self._model = model
        self._body_limit_bytes = body_limit_bytes

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads, checks, generates, answers. Raises LegatoError as long as nothing was sent."""
        body = parse_completion(await read_json_body(scope, receive, self._body_limit_bytes))
        self._model.check_name(body.model)
        include_usage = wants_usage(body)
        params = completion_params(body)
        context = self._service.info.context
        prompts = [await self._model.prompt_tokens(prompt, context) for prompt in prompts_of(body)]
        generation = Generation(
            self._service, self._model, prompts, params, "prompt", priority=priority_of(body), cache_salt=salt_of(body)
        )
        output = CompletionFormat(self._model, include_usage=include_usage)
        await generation.respond(receive, send, output, stream=bool(body.stream), include_usage=include_usage)
