"""What a model will take of memory, before it is taken, and what the process really has."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from legato.errors import OutOfMemory

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by purpose. `kv` and `scratch` become resident as they are first used, the rest with the load.

    `base`: the process with the file's directory and vocabulary read, but no tensor. `load`: for a moment of the load,
    beyond the packed weights. `tables`: rotary tables. `scratch`: buffers of one step, logits and sampling among them.
    `swap`: host memory for blocks of KV.
    """

    base: int
    weights: int
    load: int
    tables: int
    kv: int
    scratch: int
    swap: int = 0

    @property
    def peak(self) -> int:
        """Bytes resident at the worst moment: the end of the load, or a full pool."""
        return self.base + self.weights + max(self.load, self.tables + self.kv + self.scratch + self.swap)

    def __str__(self) -> str:
        parts = ("weights", "kv", "scratch", "tables", "base", *(("swap",) if self.swap else ()))
        return f"{self.peak / MIB:,.0f} MiB (" + ", ".join(f"{p} {getattr(self, p) / MIB:,.0f}" for p in parts) + ")"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes of this process: now, and the most there ever were."""

    resident: int
    peak: int


def process_memory() -> ProcessMemory:
    """Measured now. Where there is no /proc the peak stands for both."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = _kib_fields(status)
        return ProcessMemory(fields["VmRSS"], fields["VmHWM"])
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return ProcessMemory(peak, peak)


def available_bytes() -> int:
    """Bytes this process can still take: what the machine has left, or its control group if that is less."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        machine = _kib_fields(meminfo)["MemAvailable"]
    else:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(machine, _cgroup_room(Path("/sys/fs/cgroup")))


def require_room(what: str, needed: int, available: int, advice: str) -> None:
    """Raises OutOfMemory, with both numbers and the `advice`, unless `needed` bytes are available."""
    if needed > available:
        raise OutOfMemory(
            f"{what} needs {needed / MIB:,.0f} MiB and {available / MIB:,.0f} MiB of memory are available; {advice}"
        )


def _cgroup_room(group: Path) -> int:
    """Bytes left under a version 2 memory limit; without one, more than any machine has."""
    unlimited = 1 << 62
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return unlimited
    if limit == "max":
        return unlimited
    # Page cache counts as used but is given up under pressure.
    reclaimable = _bytes_field(group / "memory.stat", "inactive_file")
    return max(0, int(limit) - used + reclaimable)


def _bytes_field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _kib_fields(path: Path) -> dict[str, int]:
    """The "Name:  123 kB" lines of a /proc file, in bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields
