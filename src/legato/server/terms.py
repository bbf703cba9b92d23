"""How a request wants to be served: from its body, its headers and the server's options."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from legato.engine.params import SamplingParams
from legato.engine.service import EngineService
from legato.engine.terms import Terms
from legato.engine.wire import EngineInfo
from legato.errors import RequestError
from legato.server.problems import Problem
from legato.server.schema import ChatBody, CompletionBody

MAX_SALT = 1024
MAX_TENANT = 128
MAX_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class Admission:
    """The server's options that requests meet first.

    `shed`: refuse what would be answered too late. `tenant_header`: names the tenant, before an API key does; None: no
    header is trusted.
    """

    shed: bool = False
    tenant_header: str | None = None

    def check(self, service: EngineService, first_token_seconds: Callable[[], float], terms: Terms) -> None:
        """Raises a 429 with `Retry-After` for a request whose first token would come later than it is wanted."""
        # Of a deadline, the first token alone: an answer may be shorter than it may be.
        field, wanted_s = min(
            (("ttft_ms", terms.ttft_s), ("deadline_ms", terms.deadline_s)),
            key=lambda wish: math.inf if wish[1] is None else wish[1],
        )
        if not self.shed or wanted_s is None:
            return
        expected_s = first_token_seconds()
        if expected_s <= wanted_s:
            return
        service.metrics.shed += 1
        retry_s = max(1, math.ceil(expected_s - wanted_s))
        what = "is wanted" if field == "ttft_ms" else "the whole answer is wanted"
        raise Problem(
            429,
            f"the first token would come after {expected_s:.1f} s, and {what} after {wanted_s:g} s;"
            f" try again in {retry_s} s, or allow more with {field}",
            code="overloaded",
            headers={"retry-after": str(retry_s)},
        )


def terms_of(
    body: ChatBody | CompletionBody, scope: Scope, params: SamplingParams, info: EngineInfo, admission: Admission
) -> Terms:
    """The terms of one request. RequestError for what is out of bounds, or would not be honoured as the server runs."""
    ttft_s = _seconds(body.ttft_ms, "ttft_ms")
    deadline_s = _seconds(body.deadline_ms, "deadline_ms")
    for field, value in (("ttft_ms", ttft_s), ("deadline_ms", deadline_s)):
        if value is not None and info.policy == "fcfs":
            raise RequestError(
                f"{field} would not be honoured: --policy fcfs keeps the order of arrival; serve with slo or fair",
                field=field,
            )
    if ttft_s is None and deadline_s is None and info.ttft_s:
        ttft_s = info.ttft_s
    given = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return Terms(
        priority=_priority(body),
        cache_salt=_salt(body),
        tenant=tenant_of(scope, admission.tenant_header),
        itl_s=_gap(body, info),
        ttft_s=ttft_s,
        deadline_s=deadline_s,
        answer_tokens=params.max_tokens or 0 if (given or body.max_tokens) else 0,
    )


def tenant_of(scope: Scope, header: str | None) -> str:
    """Who asks: the value of `header`, else a name for the API key that does not give it away, else ""."""
    wanted = b"" if header is None else header.lower().encode("latin-1")
    key = ""
    for name, value in scope["headers"]:
        if name == wanted:
            text = value.decode("latin-1").strip()
            if not is_tenant_name(text):
                raise RequestError(f"{header} must have 1 to {MAX_TENANT} printable ASCII characters", field=header)
            return str(text)
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            key = key_name(value[7:].strip())
    return key


def is_tenant_name(text: str) -> bool:
    """Whether a header may name a tenant so."""
    return 0 < len(text) <= MAX_TENANT and text.isascii() and text.isprintable() and text == text.strip()


def key_name(key: bytes) -> str:
    """How the tenant of an API key is called in options and metrics."""
    return f"key-{hashlib.sha256(key).hexdigest()[:8]}" if key else ""


def _seconds(value: float | None, field: str) -> float | None:
    if value is None:
        return None
    if not 0.0 < value <= MAX_MS:
        raise RequestError(
            f"{field} is {value:g}; it must be above 0 and at most {MAX_MS:,.0f} milliseconds", field=field
        )
    return value / 1000


def _gap(body: ChatBody | CompletionBody, info: EngineInfo) -> float | None:
    itl_s = _seconds(body.itl_ms, "itl_ms")
    if itl_s is None:
        return None
    if not info.itl_s:
        raise RequestError(
            "itl_ms would not be honoured: steps are bounded by their tokens alone; serve with --itl-ms", field="itl_ms"
        )
    if itl_s < info.least_itl_s:
        least_ms = math.ceil(1e5 * info.least_itl_s) / 100
        raise RequestError(
            f"itl_ms is {body.itl_ms:g}; one stream alone has a token every {least_ms} ms here: ask for no less",
            field="itl_ms",
        )
    return itl_s


def _priority(body: ChatBody | CompletionBody) -> int:
    """The lower, the more important; 0 unless given."""
    priority = body.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority is {priority}; it must fit in 32 bits", field="priority")
    return priority


def _salt(body: ChatBody | CompletionBody) -> bytes:
    """Cached prefixes are shared among requests of one salt only."""
    if body.cache_salt is None:
        return b""
    if not 0 < len(body.cache_salt) <= MAX_SALT:
        raise RequestError(
            f"cache_salt has {len(body.cache_salt)} characters; it needs 1 to {MAX_SALT}", field="cache_salt"
        )
    return body.cache_salt.encode()
