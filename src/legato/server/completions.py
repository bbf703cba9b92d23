"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from legato.engine.service import EngineService
from legato.server.prompt_logprobs import PromptLogprob, prompt_scores
from legato.server.schema import completion_params, parse_completion, prompts_of, wants_usage
from legato.server.served import ServedModel
from legato.server.stream import Choice, Generation, TokenLogprob, Usage, dump, new_id, now_unix_s, read_json_body
from legato.server.terms import Admission, terms_of


class CompletionFormat:
    """OpenAI's `text_completion`, whole or in chunks. The fixed parts of a chunk are encoded once."""

    def __init__(
        self,
        model: ServedModel,
        *,
        include_usage: bool,
        echo: Sequence[str] = (),
        echo_logprobs: bool = False,
        prompt_logprobs: bool = False,
    ) -> None:
        """`echo`: the prompt of each sequence, if its text is to begin with it, and `echo_logprobs`: its logprobs too.

        `prompt_logprobs`: they are to be in the answer in a field of their own.
        """
        self._model = model
        self._echo = echo
        self._echo_logprobs = echo_logprobs
        self._prompt_logprobs = prompt_logprobs
        self._base = {"id": new_id("cmpl"), "object": "text_completion", "created": now_unix_s()}
        self._base["model"] = model.name
        self._head = b"data: " + dump(self._base)[:-1] + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._offsets: dict[int, int] = {}

    def opening(self, sequence: Choice) -> bytes:
        """The prompt, if it is to be echoed."""
        if not self._echo:
            return b""
        logprobs = sequence.prompt_logprobs if self._echo_logprobs else ()
        return self.piece(sequence.index, self._echo[sequence.index], logprobs)

    def piece(self, index: int, text: str, logprobs: Sequence[PromptLogprob]) -> bytes:
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
        choices = [self._choice(sequence) for sequence in sequences]
        return dump({**self._base, "choices": choices, "usage": usage})

    def _choice(self, sequence: Choice) -> dict[str, Any]:
        logprobs = [*(sequence.prompt_logprobs if self._echo_logprobs else ()), *sequence.logprobs]
        choice = {
            "index": sequence.index,
            "text": "".join([self._echo[sequence.index] if self._echo else "", *sequence.text_parts]),
            "logprobs": self._logprobs(sequence.index, logprobs) if logprobs else None,
            "finish_reason": sequence.reason,
        }
        if self._prompt_logprobs:
            choice["prompt_logprobs"] = prompt_scores(sequence.prompt_logprobs, self._model.text.token_name)
        return choice

    def _logprobs(self, index: int, entries: Sequence[PromptLogprob]) -> dict[str, Any]:
        """Columns, as this endpoint has them. Offsets count characters of the text, an echoed prompt included."""
        offset, offsets = self._offsets.get(index, 0), []
        for token_id, _ in entries:
            offsets.append(offset)
            offset += len(self._model.text.token_bytes[token_id].decode("utf-8", "ignore"))
        self._offsets[index] = offset
        name = self._model.text.token_name
        return {
            "tokens": [name(token_id) for token_id, _ in entries],
            "token_logprobs": [entry and entry[0] for _, entry in entries],
            "top_logprobs": [entry and {name(other): value for other, value in entry[1]} for _, entry in entries],
            "text_offset": offsets,
        }


class CompletionEndpoint:
    """The ASGI application of the path."""

    def __init__(self, service: EngineService, model: ServedModel, body_limit_bytes: int, admission: Admission) -> None:
        self._service = service
        self._admission = admission
        self._model = model
        self._body_limit_bytes = body_limit_bytes

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads, checks, generates, answers. Raises LegatoError as long as nothing was sent."""
        body = parse_completion(await read_json_body(scope, receive, self._body_limit_bytes))
        self._model.check_name(body.model)
        include_usage = wants_usage(body)
        params = completion_params(body)
        terms = terms_of(body, scope, params, self._service.info, self._admission)
        context = self._service.info.context
        given = prompts_of(body)
        since_s = self._service.now_s()
        prompts = [await self._model.prompt_tokens(prompt, context) for prompt in given]
        tokenized_s = since_s, self._service.now_s()
        generation = Generation(self._service, self._model, prompts, params, "prompt", terms, tokenized_s)
        self._admission.check(self._service, generation.first_token_seconds, terms)
        output = CompletionFormat(
            self._model,
            include_usage=include_usage,
            echo=[self._model.prompt_text(prompt) for prompt in given for _ in range(params.n)] if body.echo else (),
            echo_logprobs=bool(body.echo) and body.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        await generation.respond(receive, send, output, stream=bool(body.stream), include_usage=include_usage)
