"""Whether the client itself can be trusted to stamp."""

from __future__ import annotations

import asyncio
import time

from legato.bench.machine import Meter, steal_between
from legato.bench.record import Spread


def test_steal_is_a_share_of_all_time_and_guest_time_is_not_counted_twice() -> None:
    before = [100, 0, 50, 800, 10, 0, 5, 20, 30, 0]
    after = [130, 0, 60, 850, 10, 0, 5, 30, 60, 0]
    assert steal_between(before, after) == 10 / 100
    assert steal_between([1, 2, 3], [2, 3, 4]) is None
    assert steal_between([], []) is None


async def test_a_loop_that_is_held_up_is_seen_to_wake_late() -> None:
    async with Meter(time.perf_counter) as meter:
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # noqa: ASYNC251 - what a busy client does
        await asyncio.sleep(0.05)
    assert meter.lag is not None and 200 < meter.lag.max_ms < 2000
    assert meter.faults(budget_ms=100)[0].startswith("this client was woken up to ")
    told = meter.to_dict(is_local=False)
    assert told["steal_share"] is None and told["client_lag_ms"]["max"] == round(meter.lag.max_ms, 1)


def test_a_client_with_time_to_spare_is_trusted_and_one_that_computes_is_not() -> None:
    meter = Meter(time.perf_counter)
    meter.cores, meter.lag = 0.1, Spread(1.0, 5.0, 9.0, 100)
    assert meter.faults(budget_ms=100) == []
    meter.cores = 0.9
    assert "90 % of a core" in meter.faults(budget_ms=100)[0]
