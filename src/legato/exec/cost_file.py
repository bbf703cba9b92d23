"""What steps cost, kept on disk, so that a machine is measured once for a model and its settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Mapping
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

VERSION = 1
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cost, the steps it was fitted to, and whether they were timed now rather than read from disk."""

    cost: StepCost
    samples: tuple[Sample, ...]
    is_new: bool = True


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
    """
    path = folder / f"{machine_key(loaded, budget, options)}.json"
    found = read_calibration(path)
    if found is not None:
        return found
    samples = calibrate(loaded, budget, limit_s=limit_s, progress=progress)
    calibration = Calibration(fit(samples, attention_of(loaded.spec)), samples)
    with contextlib.suppress(OSError):
        write_calibration(path, calibration)
    return calibration


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
        return Calibration(StepCost.from_dict(data["cost"]), samples, is_new=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Replaces the file as a whole. Raises OSError."""
    data = {
        "version": VERSION,
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
