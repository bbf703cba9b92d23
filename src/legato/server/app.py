"""The ASGI application: paths to endpoints, errors to OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from legato.engine.service import EngineService
from legato.errors import LegatoError
from legato.server.chat import ChatEndpoint
from legato.server.completions import CompletionEndpoint
from legato.server.health import Status
from legato.server.problems import Problem, error_body, on_error, on_http_exception
from legato.server.served import ServedModel
from legato.server.stream import ClientGone, send_json
from legato.server.terms import Admission

BODY_LIMIT_BYTES = 16 << 20

Respond = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]


def build_app(
    service: EngineService,
    model: ServedModel,
    *,
    body_limit_bytes: int = BODY_LIMIT_BYTES,
    admission: Admission | None = None,
) -> Starlette:
    """The server's application. `service` is started and stopped by the caller."""
    admission = admission or Admission()
    status = Status(service, model, admission)
    chat = ChatEndpoint(service, model, body_limit_bytes, admission)
    completion = CompletionEndpoint(service, model, body_limit_bytes, admission)
    routes = [
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/v1/config", status.config),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/v1/chat/completions", _Endpoint(chat.respond), methods=["POST"]),
        Route("/v1/completions", _Endpoint(completion.respond), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: on_http_exception, Exception: on_error}
    return Starlette(routes=routes, exception_handlers=handlers)


class _Endpoint:
    """An endpoint as a bare ASGI application, with errors before the response turned into it."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(scope, receive, send)
        except ClientGone:
            return
        except LegatoError as error:
            status, body = error_body(error)
            await send_json(send, status, body, error.headers if isinstance(error, Problem) else {})
