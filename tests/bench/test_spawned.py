"""A server of one's own."""

from __future__ import annotations

import time

import pytest

from legato.bench.client import Address, Client
from legato.bench.spawned import Spawned
from legato.errors import EngineError


async def test_one_that_ends_at_once_is_told_with_what_it_said() -> None:
    with pytest.raises(EngineError, match=r"ended at once: .*no such model\.gguf"):
        async with Spawned("/nowhere/no such model.gguf", {"max-num-seqs": 4}, time.perf_counter):
            raise AssertionError("it cannot serve")


@pytest.mark.slow
async def test_it_serves_with_its_options_and_is_gone_afterwards() -> None:
    async with Spawned("smollm2-135m", {"itl-ms": 150, "enable-prefix-caching": False}, time.perf_counter) as url:
        client = Client(Address.of(url), time.perf_counter)
        status, content = await client.fetch("/config")
        assert status == 200 and b"150" in content
    with pytest.raises(OSError):
        await client.fetch("/models")
