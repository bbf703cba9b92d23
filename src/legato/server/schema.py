"""The bodies clients send, strictly: a field that is unknown, or known and not honoured, is refused by name.

`user`, `metadata` and `safety_identifier` are labels for the provider's records; they ask for nothing and are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from legato.engine.params import MAX_LOGPROBS, SamplingParams
from legato.errors import RequestError, UnknownField
from legato.server.problems import request_error


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage`: one more chunk at the end, with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | UnsetType | None = UNSET


class TextPart(msgspec.Struct):
    """A part of a message's content; only `type: text` is understood."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. `content`: text, or a list of text parts."""

    role: str
    content: str | list[TextPart] | None = None
    name: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. None and an absent field mean the default."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # beyond OpenAI's, named as in vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    itl_ms: float | None = None
    ttft_ms: float | None = None
    deadline_ms: float | None = None
    prompt_logprobs: int | None = None


class ChatBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    # known to OpenAI's clients, not honoured here
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`. `prompt`: a string, strings, token ids, or lists of token ids."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    # known to OpenAI's clients, not honoured here
    best_of: Any = None
    suffix: Any = None


# Values that ask for nothing; None always is one.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "annotations": ([],),
    "tool_calls": ([],),
}
_CHAT_REFUSED = (
    *("audio", "function_call", "functions", "modalities", "moderation", "parallel_tool_calls", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "response_format"),
    *("service_tier", "store", "tool_choice", "tools", "verbosity", "web_search_options"),
)
_COMPLETION_REFUSED = ("best_of", "suffix")
_MESSAGE_REFUSED = ("name", "refusal", "audio", "annotations", "tool_calls", "tool_call_id", "function_call")
_T = TypeVar("_T")
ROLES = ("system", "developer", "user", "assistant")

_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)


def parse_chat(body: bytes) -> ChatBody:
    """The body, checked for shape and for fields that are not honoured. RequestError names the field."""
    chat = _decode(_chat, body)
    _refuse(chat, _CHAT_REFUSED)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    if not chat.messages:
        raise RequestError("messages is empty; it needs at least one", field="messages")
    return chat


def parse_completion(body: bytes) -> CompletionBody:
    """The body, checked for shape and for fields that are not honoured. RequestError names the field."""
    completion = _decode(_completion, body)
    _refuse(completion, _COMPLETION_REFUSED)
    return completion


def messages_of(chat: ChatBody) -> list[dict[str, str]]:
    """Messages as the chat template takes them: role and text. `developer` is today's name for `system`."""
    out = []
    for i, message in enumerate(chat.messages):
        place = f"messages[{i}]"
        if message.role not in ROLES:
            raise RequestError(f"{place}.role is '{message.role}'; known are {', '.join(ROLES)}", field=f"{place}.role")
        _refuse(message, _MESSAGE_REFUSED, place + ".")
        role = "system" if message.role == "developer" else message.role
        out.append({"role": role, "content": _text(message.content, place + ".content")})
    return out


def chat_params(chat: ChatBody) -> SamplingParams:
    """Sampling as asked, checked. Temperature defaults to 1 and the length to the rest of the context, as OpenAI's."""
    if chat.max_tokens is not None and chat.max_completion_tokens not in (None, chat.max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ; send one", field="max_completion_tokens")
    limit = chat.max_completion_tokens if chat.max_tokens is None else chat.max_tokens
    top = chat.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs is {top}; it must be between 0 and {MAX_LOGPROBS}", field="top_logprobs")
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    if limit is not None and limit < 1:
        raise RequestError(f"{name} is {limit}; ask for at least 1", field=name)
    return _params(chat, max_tokens=limit, logprobs=top if chat.logprobs else None)


def completion_params(completion: CompletionBody) -> SamplingParams:
    """Sampling as asked, checked. 16 tokens and temperature 1 unless said otherwise, as OpenAI's.

    With `echo`, `logprobs` are of the prompt too.
    """
    limit = 16 if completion.max_tokens is None else completion.max_tokens
    params = _params(completion, max_tokens=limit, logprobs=completion.logprobs)
    if not completion.echo or completion.logprobs is None:
        return params
    if completion.prompt_logprobs not in (None, completion.logprobs):
        raise RequestError("with echo, prompt_logprobs and logprobs must not differ; send one", field="prompt_logprobs")
    return replace(params, prompt_logprobs=completion.logprobs)


def prompts_of(completion: CompletionBody) -> list[str | list[int]]:
    """The prompts: each text or token ids. RequestError for anything else."""
    prompt = completion.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least 1 token", field="prompt")
        if _all(prompt, str):
            return list(prompt)
        if _all(prompt, int):
            return [prompt]
        if all(isinstance(one, list) and _all(one, int) for one in prompt):
            return list(prompt)
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists", field="prompt"
    )


def wants_usage(body: ChatBody | CompletionBody) -> bool:
    """Whether a stream ends with its token counts."""
    options = body.stream_options
    if options is None:
        return False
    if options.include_obfuscation not in (UNSET, None, False):
        name = "stream_options.include_obfuscation"
        raise UnknownField(f"'{name}' is not supported: chunks are not padded", field=name)
    if not body.stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    return bool(options.include_usage)


def _all(values: list[Any], kind: type) -> bool:
    return all(type(value) is kind for value in values)


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise RequestError(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
        raise request_error(error) from error
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _refuse(struct: msgspec.Struct, names: tuple[str, ...], place: str = "") -> None:
    for name in names:
        value = getattr(struct, name)
        if value is not None and not any(_same(value, harmless) for harmless in _HARMLESS.get(name, ())):
            raise UnknownField(f"'{place}{name}' is not supported yet; leave it out", field=place + name)


def _same(value: Any, harmless: Any) -> bool:
    return type(value) is type(harmless) and bool(value == harmless)


def _text(content: str | list[TextPart] | None, place: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{place} is missing", field=place)
    for i, part in enumerate(content):
        if part.type != "text":
            name = f"{place}[{i}].type"
            raise UnknownField(f"{name} is '{part.type}'; only text is supported", field=name)
        if part.text is None:
            raise RequestError(f"{place}[{i}].text is missing", field=f"{place}[{i}].text")
    return "".join(part.text or "" for part in content)


def _params(body: ChatBody | CompletionBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    def given(value: _T | None, default: _T) -> _T:
        return default if value is None else value

    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            "prompt_logprobs are not available in a stream; leave out stream, or use echo with logprobs (completions)",
            field="prompt_logprobs",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given(body.temperature, 1.0),
        top_p=given(body.top_p, 1.0),
        top_k=given(body.top_k, 0),
        min_p=given(body.min_p, 0.0),
        seed=body.seed,
        repetition_penalty=given(body.repetition_penalty, 1.0),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        logit_bias=_bias(body.logit_bias or {}),
        logprobs=logprobs,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=given(body.min_tokens, 0),
        n=given(body.n, 1),
        prompt_logprobs=body.prompt_logprobs,
    )


def _bias(raw: Mapping[str, float]) -> dict[int, float]:
    out = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise RequestError(f"logit_bias has the key '{key[:40]}'; keys are token ids", field="logit_bias")
        out[int(key)] = value
    return out
