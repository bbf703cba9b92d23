"""How a request wants to be served: a gap, a deadline, a tenant of its own; and what would come too late."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from legato.core.request import Request, Sampling, StopRule
from legato.engine.service import EngineService
from legato.engine.terms import Terms
from legato.errors import RequestError
from legato.server.app import build_app
from legato.server.terms import Admission, key_name, tenant_of
from server.fake_engine import factory
from server.fake_model import fake_model

pytestmark = pytest.mark.asyncio

TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}


@contextlib.asynccontextmanager
async def served(
    admission: Admission | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, EngineService, list[Request]]]:
    """A client of a server with these options, and the requests that it hands to the engine."""
    service = EngineService(factory(**{"step_s": 0.001, **options}))
    await service.start()
    asked: list[Request] = []
    send = service._send

    def spy(message: Any) -> None:
        from legato.engine.wire import Submit, request_of

        if isinstance(message, Submit):
            asked.append(request_of(message))
        send(message)

    service._send = spy  # type: ignore[method-assign]
    app = build_app(service, fake_model(), admission=admission)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://legato") as client:
            yield client, service, asked
    finally:
        await service.stop()


async def open_sequences(service: EngineService, count: int) -> None:
    for _ in range(5000):
        if service.open_sequences >= count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"never were {count} open")


async def test_gap_and_deadlines_reach_the_engine_as_seconds_on_its_clock() -> None:
    async with served(itl_s=0.1) as (client, _, asked):
        for path, body in (
            (TEXT, HELLO),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ):
            answer = await client.post(path, json={**body, "itl_ms": 50, "ttft_ms": 400, "deadline_ms": 9000})
            assert answer.status_code == 200, answer.text
            assert asked[-1].itl_s == pytest.approx(0.05)
            assert asked[-1].due_s == pytest.approx(asked[-1].arrival_s + 0.4)
        await client.post(TEXT, json=HELLO)
        assert (asked[-1].itl_s, asked[-1].due_s) == (None, float("inf"))


async def test_the_servers_wish_is_for_those_that_have_none() -> None:
    async with served(ttft_s=2.0) as (client, _, asked):
        await client.post(TEXT, json=HELLO)
        assert asked[-1].due_s == pytest.approx(asked[-1].arrival_s + 2.0)
        await client.post(TEXT, json={**HELLO, "ttft_ms": 5000})
        assert asked[-1].due_s == pytest.approx(asked[-1].arrival_s + 5.0)


@pytest.mark.parametrize(
    ("options", "field", "value", "says"),
    [
        ({"itl_s": 0.1}, "itl_ms", 5, "10.0 ms here: ask for no less"),
        ({"itl_s": 0.1}, "itl_ms", 0, "above 0"),
        ({}, "itl_ms", 50, "--itl-ms"),
        ({}, "ttft_ms", -1, "above 0"),
        ({}, "deadline_ms", 1e12, "at most 3,600,000"),
        ({"policy": "fcfs"}, "ttft_ms", 500, "fcfs"),
        ({"policy": "fcfs"}, "deadline_ms", 500, "fcfs"),
    ],
)
async def test_what_would_not_be_honoured_is_refused_by_name(
    options: dict[str, Any], field: str, value: float, says: str
) -> None:
    async with served(**options) as (client, _, asked):
        answer = await client.post(TEXT, json={**HELLO, field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert says in answer.json()["error"]["message"]
        assert not asked


async def test_a_request_that_would_be_answered_too_late_is_refused_with_the_time_to_come_back() -> None:
    async with served(Admission(shed=True), ttft_s=2.0, token_s=0.02) as (client, service, asked):
        answer = await client.post(TEXT, json={**HELLO, "prompt": "x" * 400})  # 8 s
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "6"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert "8.0 s" in error["message"]
        assert "2 s" in error["message"]
        assert not asked
        assert service.open_sequences == 0
        patient = await client.post(TEXT, json={**HELLO, "prompt": "x" * 400, "ttft_ms": 60_000})
        assert patient.status_code == 200
        assert (await client.post(TEXT, json=HELLO)).status_code == 200
        page = (await client.get("/metrics")).text
        assert re.search(r"legato_requests_shed_total\{.*\} 1$", page, re.MULTILINE)


async def test_a_deadline_that_passes_before_the_first_token_is_a_refusal_too() -> None:
    async with served(Admission(shed=True), ttft_s=2.0, token_s=0.02) as (client, _, _):
        late = {**HELLO, "prompt": "x" * 400}  # 8 s
        refused = await client.post(TEXT, json={**late, "deadline_ms": 5000})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        assert "the whole answer is wanted after 5 s" in refused.json()["error"]["message"]
        assert (await client.post(TEXT, json={**late, "deadline_ms": 60_000})).status_code == 200
        other = {**late, "prompt": "y" * 400}
        both = await client.post(TEXT, json={**other, "deadline_ms": 5000, "ttft_ms": 4000})
        assert "allow more with ttft_ms" in both.json()["error"]["message"]


async def test_a_tenants_backlog_refuses_its_own_requests_and_not_those_of_others() -> None:
    """What fair sharing gives must not be taken back at the door."""
    options: dict[str, Any] = {"policy": "fair", "ttft_s": 2.0, "token_s": 0.01, "max_seqs": 32, "blocks": 512}
    async with served(Admission(shed=True, tenant_header="t"), **options, step_s=0.05) as (client, service, _):
        stream = service.open_stream()
        for _ in range(10):
            service.submit(stream, (97,) * 400, Sampling(), StopRule(1), Terms(tenant="heavy", ttft_s=2.0))
        body = {**HELLO, "prompt": "b" * 50}
        statuses = {
            name: (await client.post(TEXT, json=body, headers={"t": name})).status_code for name in ("heavy", "light")
        }
        assert statuses == {"heavy": 429, "light": 200}
        stream.close()


async def test_openais_client_understands_the_refusal() -> None:
    async with served(Admission(shed=True), ttft_s=2.0, token_s=0.02) as (client, _, _):
        sdk = openai.AsyncOpenAI(api_key="k", base_url="http://legato/v1", http_client=client, max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.completions.create(model="fake", prompt="x" * 400, max_tokens=1)
        assert caught.value.response.headers["retry-after"] == "6"
        answer = await sdk.completions.create(
            model="fake", prompt="hello", max_tokens=1, extra_body={"ttft_ms": 1500, "deadline_ms": 2500}
        )
        assert answer.choices[0].text == "h"


async def test_without_shed_it_is_queued() -> None:
    async with served(ttft_s=2.0, token_s=0.02) as (client, _, _):
        assert (await client.post(TEXT, json={**HELLO, "prompt": "x" * 400})).status_code == 200


async def test_what_the_cache_has_of_a_prompt_does_not_count() -> None:
    """A prompt too long for the wish was refused for ever, by an idle server that had all of it computed."""
    body = {**HELLO, "prompt": "x" * 400}
    async with served(Admission(shed=True), ttft_s=2.0, token_s=0.02) as (client, _, _):
        assert (await client.post(TEXT, json=body)).status_code == 429
        assert (await client.post(TEXT, json={**body, "ttft_ms": 60_000})).status_code == 200
        again = await client.post(TEXT, json=body)
        assert again.status_code == 200
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
        for other in ({"cache_salt": "another"}, {"prompt_logprobs": 1}, {"prompt": "y" * 400}):
            assert (await client.post(TEXT, json={**body, **other})).status_code == 429


async def test_requests_that_wait_count_for_those_that_come() -> None:
    async with served(Admission(shed=True), ttft_s=2.0, token_s=0.01, max_seqs=1) as (client, service, _):
        busy = asyncio.create_task(client.post(TEXT, json={"prompt": "a", "max_tokens": 400}))
        await open_sequences(service, 1)
        waits = asyncio.create_task(client.post(TEXT, json={**HELLO, "prompt": "b" * 190}))
        await open_sequences(service, 2)
        refused = await client.post(TEXT, json={**HELLO, "prompt": "c" * 195})
        assert refused.status_code == 429
        assert {(await busy).status_code, (await waits).status_code} == {200}


async def test_wishes_kept_and_missed_are_counted() -> None:
    async with served(itl_s=0.1) as (client, _, _):
        for wishes in ({"ttft_ms": 60_000, "itl_ms": 60_000}, {"deadline_ms": 0.001}):
            assert (await client.post(TEXT, json={**HELLO, **wishes})).status_code == 200
        page = (await client.get("/metrics")).text
        for wish, kept in (("ttft", "yes"), ("itl", "yes"), ("deadline", "no")):
            assert re.search(rf'legato_wishes_total\{{.*wish="{wish}",kept="{kept}"\}} 1$', page, re.MULTILINE)


async def test_an_api_key_is_a_tenant_whose_name_does_not_give_it_away() -> None:
    async with served(policy="fair") as (client, _, asked):
        await client.post(TEXT, json=HELLO, headers={"authorization": "Bearer secret"})
        assert asked[-1].tenant == "key-2bb80d53"  # printf %s secret | sha256sum
        await client.post(TEXT, json=HELLO, headers={"x-tenant": "gold"})
        assert asked[-1].tenant == "", "a header that nobody named is not trusted"
        page = (await client.get("/metrics")).text
        assert "secret" not in page
        assert re.search(r'legato_tenant_generation_tokens_total\{.*tenant="key-2bb80d53"\} 3$', page, re.MULTILINE)


async def test_a_header_that_was_named_is_the_tenant_before_the_key() -> None:
    async with served(Admission(tenant_header="X-Tenant"), policy="fair") as (client, _, asked):
        await client.post(TEXT, json=HELLO, headers={"authorization": "Bearer secret", "x-tenant": "gold"})
        assert asked[-1].tenant == "gold"
        for name in ("g" * 129, "", "a\tb"):
            bad = await client.post(TEXT, json=HELLO, headers={"x-tenant": name})
            assert bad.status_code == 400
            assert bad.json()["error"]["param"] == "X-Tenant"
        await client.post(TEXT, json=HELLO, headers={"authorization": "Bearer secret"})
        assert asked[-1].tenant == "key-2bb80d53"


async def test_tenants_in_metrics_are_bounded() -> None:
    async with served(Admission(tenant_header="t"), policy="fair") as (client, _, _):
        for n in range(70):
            assert (await client.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers={"t": f"t{n}"})).is_success
        page = (await client.get("/metrics")).text
        assert len(re.findall(r"^legato_tenant_prompt_tokens_total", page, re.MULTILINE)) == 65
        assert re.search(r'tenant="\(others\)"\} 6$', page, re.MULTILINE)


async def test_the_configuration_tells_what_was_chosen() -> None:
    options: dict[str, Any] = {"policy": "fair", "itl_s": 0.1, "ttft_s": 2.0, "tenant_weights": {"gold": 3.0}}
    async with served(Admission(True, "x-tenant"), **options) as (client, _, _):
        config = (await client.get("/v1/config")).json()
        assert config["tenant_weights"] == {"gold": 3.0}
        assert (config["policy"], config["ttft_ms"], config["shed"]) == ("fair", 2000.0, True)
        assert config["tenant_header"] == "x-tenant"


async def test_a_key_that_is_empty_is_nobodys() -> None:
    assert key_name(b"") == ""
    assert tenant_of({"headers": [(b"authorization", b"Basic abc")]}, None) == ""
    with pytest.raises(RequestError):
        tenant_of({"headers": [(b"t", b"\xff\xfe")]}, "t")
