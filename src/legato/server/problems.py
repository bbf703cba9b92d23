"""Errors as OpenAI's clients expect them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from legato.errors import EngineError, LegatoError, PromptTooLong, RequestError, UnknownField

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)


class Problem(LegatoError):
    """A refusal with a status of its own: 404, 413, 415, 429."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = dict(headers or {})
        self.status = status
        self.param = param
        self.code = code


def error_body(error: Exception) -> tuple[int, bytes]:
    """Status and JSON for an error. What is not ours becomes a 500 without details."""
    if isinstance(error, Problem):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        if error.status == 429:
            kind = "rate_limit_error"
        return error.status, _body(str(error), kind, error.param, error.code)
    if isinstance(error, RequestError):
        code = None
        if isinstance(error, PromptTooLong):
            code = "context_length_exceeded"
        elif isinstance(error, UnknownField):
            code = "unknown_field"
        return 400, _body(str(error), "invalid_request_error", error.field, code)
    if isinstance(error, EngineError):
        return 503, _body(str(error), "server_error", None, "engine_unavailable")
    return 500, _body("the server failed; its log says why", "server_error", None, "internal_error")


def _body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def problem_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """The response to an error."""
    status, body = error_body(error)
    return Response(body, status, headers, media_type="application/json")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) in OpenAI's form."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path}; see /v1/models, /v1/chat/completions and /v1/completions",
        405: f"{request.method} is not a method of {request.url.path}",
    }
    message = messages.get(error.status_code, error.detail)
    return problem_response(Problem(error.status_code, message), error.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """The last resort. The traceback is in the log."""
    return problem_response(error)


def request_error(error: msgspec.MsgspecError) -> RequestError:
    """What was wrong with a body, with the field's name, from msgspec's words."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"the body is not valid JSON: {text}")
    if match := _UNKNOWN.match(text):
        name = _join(match["path"], match["name"])
        return UnknownField(f"unknown field '{name}': it would not be honoured, so it is refused", field=name)
    if match := _MISSING.match(text):
        name = _join(match["path"], match["name"])
        return RequestError(f"'{name}' is missing", field=name)
    if match := _AT.match(text):
        what = match["what"]
        return RequestError(f"'{match['path']}': {what[:1].lower()}{what[1:]}", field=match["path"])
    return RequestError(f"the body: {text[:1].lower()}{text[1:]}")


def _join(path: str | None, name: str) -> str:
    return f"{path}.{name}" if path else name
