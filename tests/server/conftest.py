from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest_asyncio

from legato.engine.service import EngineService
from legato.server.app import build_app
from server.fake_engine import factory
from server.fake_model import fake_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[EngineService]:
    service = EngineService(factory(step_s=0.001))
    await service.start()
    yield service
    await service.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(service: EngineService) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(service, fake_model(), body_limit_bytes=200_000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://legato") as client:
        yield client
