"""What steps cost, kept on disk, so that a machine is measured once for a model and its settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from legato import _native
from legato.core.budget import StepBudget
from legato.core.cost import Sample, StepCost
from legato.core.fit import fit
from legato.core.shape import StepShape
from legato.exec.calibrate import attention_of, calibrate
from legato.exec.model import LoadedModel

VERSION = 2
# Timed again at the next start where others disturbed it this much, up to so many times in all.
_NOISY, _MOST_TIMES = 0.1, 3
_CPUINFO, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cost, the steps it was fitted to, and whether they were timed now rather than read from disk.

    `noise`: of `Timing`, or the share of all processors that others had meanwhile, whichever is more; the least of the
    `times` that they were timed.
    """

    cost: StepCost
    samples: tuple[Sample, ...]
    is_new: bool = True
    noise: float = 0.0
    times: int = 1


def load_or_calibrate(
    loaded: LoadedModel,
    budget: StepBudget,
    options: Mapping[str, str],
    folder: Path,
    *,
    limit_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """What `folder` has for this machine, model and `options`; else steps are timed (see `calibrate`) and kept there.

    `options`: settings that a step's duration depends on and `loaded` does not tell (activations, the KV's dtype). A
    file that cannot be read is replaced; a folder that cannot be written to costs the next start another calibration.
    What was timed on a busy machine is timed again, at three starts at most, and the shorter time of each step kept.
    """
    path = folder / f"{machine_key(loaded, budget, options)}.json"
    found = read_calibration(path)
    if found is not None and (found.noise <= _NOISY or found.times >= _MOST_TIMES):
        return found
    before = _ticks()
    timing = calibrate(loaded, budget, limit_s=limit_s, progress=progress)
    samples, noise, times = timing.samples, max(timing.noise, _share_of_others(before, _ticks())), 1
    if found is not None:
        samples, noise, times = shorter(found.samples, samples), min(found.noise, noise), found.times + 1
    calibration = Calibration(fit(samples, attention_of(loaded.spec)), samples, noise=noise, times=times)
    with contextlib.suppress(OSError):
        write_calibration(path, calibration)
    return calibration


def shorter(first: Sequence[Sample], second: Sequence[Sample]) -> tuple[Sample, ...]:
    """A sample for each shape that there is, with the less of its seconds."""
    least_s: dict[StepShape, float] = {}
    for sample in (*first, *second):
        least_s[sample.shape] = min(sample.seconds, least_s.get(sample.shape, sample.seconds))
    return tuple(Sample(shape, seconds) for shape, seconds in least_s.items())


def machine_key(loaded: LoadedModel, budget: StepBudget, options: Mapping[str, str]) -> str:
    """32 hexadecimal digits that differ when steps could take another time: CPU, kernels, model, settings.

    Of the model the dimensions and the bytes of its packed weights count, not their values: these take no time.
    """
    facts = {
        "version": VERSION,
        "cpu": cpu_name(),
        "isa": _native.isa(),
        "kernels": hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest(),
        "model": repr(loaded.spec),
        "weights": loaded.footprint.weights,
        "threads": loaded.threads,
        "block_tokens": loaded.block_tokens,
        "max_model_len": loaded.max_model_len,
        "budget": asdict(budget),
        "options": dict(options),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _ticks() -> tuple[float, float, float]:
    """Seconds of all processors, of these in use, and of this process in use; zeros where the system does not say."""
    try:
        counts = [int(field) for field in _STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0, 0.0
    total, own, hertz = sum(counts), os.times(), os.sysconf("SC_CLK_TCK")
    return total / hertz, (total - sum(counts[3:5])) / hertz, own.user + own.system  # the two: idle


def _share_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Of all processors, between two `_ticks`."""
    total, used, own = (late - early for early, late in zip(before, after, strict=True))
    return min(max((used - own) / total, 0.0), 1.0) if total > 0.0 else 0.0


def cpu_name() -> str:
    """The processor's name and the number of them, as far as the system says."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} x {os.cpu_count()}"


def read_calibration(path: Path) -> Calibration | None:
    """The calibration that `write_calibration` put there; None if there is none, or not a whole one."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            return None
        samples = tuple(Sample(StepShape(**shape), float(seconds)) for shape, seconds in data["samples"])
        noise, times = float(data["noise"]), int(data["times"])
        return Calibration(StepCost.from_dict(data["cost"]), samples, is_new=False, noise=noise, times=times)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Replaces the file as a whole. Raises OSError."""
    data = {
        "version": VERSION,
        "noise": calibration.noise,
        "times": calibration.times,
        "cost": calibration.cost.to_dict(),
        "samples": [(asdict(sample.shape), sample.seconds) for sample in calibration.samples],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
