"""The client's own machine during a run: whether it had the time to stamp, and what others took of it."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from pathlib import Path
from typing import Any, Self

from legato.bench.client import Clock
from legato.bench.record import Spread, spread

# A client that computes so much, or is woken so late, stamps late.
CORES_LIMIT = 0.6
LAG_SHARE_LIMIT = 0.5
_TICK_S = 0.02


class Meter:
    """`async with Meter(clock):` around a run; the figures are there afterwards."""

    def __init__(self, clock: Clock) -> None:
        self.cores = 0.0
        """Of a core, what this process took."""
        self.lag: Spread | None = None
        """How late this process was woken, which is how late a stamp may be."""
        self.steal_share: float | None = None
        """Of the machine's time, what the hypervisor gave to others; None where the system does not tell."""
        self._clock = clock

    async def __aenter__(self) -> Self:
        self._late_s: list[float] = []
        self._ticks = asyncio.create_task(self._tick())
        self._begin_s, self._begin_cpu_s, self._begin_stat = self._clock(), time.process_time(), cpu_times()
        return self

    async def __aexit__(self, *_: object) -> None:
        elapsed_s = max(self._clock() - self._begin_s, 1e-9)
        self._ticks.cancel()
        self.cores = (time.process_time() - self._begin_cpu_s) / elapsed_s
        self.lag = spread(self._late_s)
        self.steal_share = steal_between(self._begin_stat, cpu_times())

    def faults(self, budget_ms: float) -> list[str]:
        """Why the stamps cannot be trusted to tell gaps of `budget_ms`, and what to change."""
        found = []
        if self.cores > CORES_LIMIT:
            found.append(
                f"this client took {100 * self.cores:.0f} % of a core, and beyond {100 * CORES_LIMIT:.0f} % its stamps"
                f" are late; send less at once, or from another machine"
            )
        if self.lag is not None and self.lag.p99_ms > LAG_SHARE_LIMIT * budget_ms:
            found.append(
                f"this client was woken up to {self.lag.p99_ms:.0f} ms late (p99), too late to tell gaps of"
                f" {budget_ms:g} ms; leave it a core (the server's --threads), or run it on another machine"
            )
        return found

    def to_dict(self, *, is_local: bool) -> dict[str, Any]:
        """As JSON has it. What others took is told only where the server ran here too."""
        steal = self.steal_share if is_local else None
        return {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "server_is_local": is_local,
            "steal_share": None if steal is None else round(steal, 4),
            "client_cores": round(self.cores, 3),
            "client_lag_ms": None if self.lag is None else self.lag.to_dict(),
        }

    async def _tick(self) -> None:
        while True:
            due_s = self._clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._late_s.append(max(0.0, self._clock() - due_s))


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def steal_between(before: list[int], after: list[int]) -> float | None:
    """Share of stolen time between two readings of the first line of /proc/stat, in ticks; None if it is not told."""
    spent = [b - a for a, b in zip(before, after, strict=True)]
    # user nice system idle iowait irq softirq steal; guest times, which follow, are in user already.
    return spent[7] / sum(spent[:8]) if len(spent) > 7 and sum(spent[:8]) > 0 else None


def cpu_times() -> list[int]:
    """Ticks of all cores since the start of the machine, by what they went to; empty if the system does not tell."""
    try:
        return [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    except OSError:
        return []


def allow_many_connections() -> None:
    """Raises this process's limit of open files as far as it may: an overloaded server leaves many answers open."""
    try:
        import resource
    except ImportError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
