"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from legato.engine.service import EngineService
from legato.server.prompt_logprobs import prompt_scores
from legato.server.schema import chat_params, messages_of, parse_chat, wants_usage
from legato.server.served import ServedModel
from legato.server.stream import Choice, Generation, TokenLogprob, Usage, dump, new_id, now_unix_s, read_json_body
from legato.server.terms import Admission, terms_of


class ChatFormat:
    """OpenAI's `chat.completion` and `chat.completion.chunk`. The fixed parts of a chunk are encoded once."""

    def __init__(self, model: ServedModel, *, include_usage: bool) -> None:
        self._model = model
        self._base = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk", "created": now_unix_s()}
        self._base["model"] = model.name
        self._head = b"data: " + dump(self._base)[:-1] + b',"choices":[{"index":'
        # With include_usage OpenAI's chunks carry a null usage, and clients check for it.
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self, sequence: Choice) -> bytes:
        """The chunk that names the role."""
        return b'%b%d,"delta":{"role":"assistant","content":""' % (self._head, sequence.index) + self._plain_tail

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """A chunk of text."""
        head = b'%b%d,"delta":{"content":%b' % (self._head, index, dump(text))
        if not logprobs:
            return head + self._plain_tail
        return head + b'},"logprobs":%b,"finish_reason":null}]' % dump(self._logprobs(logprobs)) + self._tail

    def closing(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str) -> bytes:
        """The last text of the sequence, if any, then the chunk with the reason."""
        last = self.piece(index, text, logprobs) if text or logprobs else b""
        end = b'%b%d,"delta":{},"logprobs":null,"finish_reason":%b}]' % (self._head, index, dump(reason))
        return last + end + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that carries the counts."""
        return b"data: " + dump({**self._base, "choices": [], "usage": usage}) + b"\n\n"

    def document(self, sequences: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.text_parts), "refusal": None},
                "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.reason,
            }
            for choice in sequences
        ]
        answer = {**self._base, "object": "chat.completion", "choices": choices, "usage": usage}
        if sequences[0].prompt_logprobs:  # of the one prompt, as vLLM has it here
            answer["prompt_logprobs"] = prompt_scores(sequences[0].prompt_logprobs, self._model.text.token_name)
        return dump(answer)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        content = []
        for token_id, (chosen, top, _) in entries:
            content.append(
                {**self._token(token_id, chosen), "top_logprobs": [self._token(other, value) for other, value in top]}
            )
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = self._model.text.token_name(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(self._model.text.token_bytes[token_id])}


class ChatEndpoint:
    """The ASGI application of the path."""

    def __init__(self, service: EngineService, model: ServedModel, body_limit_bytes: int, admission: Admission) -> None:
        self._service = service
        self._admission = admission
        self._model = model
        self._body_limit_bytes = body_limit_bytes

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads, checks, generates, answers. Raises LegatoError as long as nothing was sent."""
        body = parse_chat(await read_json_body(scope, receive, self._body_limit_bytes))
        self._model.check_name(body.model)
        include_usage = wants_usage(body)
        params = chat_params(body)
        terms = terms_of(body, scope, params, self._service.info, self._admission)
        since_s = self._service.now_s()
        prompt = await self._model.chat_tokens(messages_of(body), self._service.info.context)
        tokenized_s = since_s, self._service.now_s()
        generation = Generation(self._service, self._model, [prompt], params, "messages", terms, tokenized_s)
        self._admission.check(self._service, generation.first_token_seconds, terms)
        output = ChatFormat(self._model, include_usage=include_usage)
        await generation.respond(receive, send, output, stream=bool(body.stream), include_usage=include_usage)
