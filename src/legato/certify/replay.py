"""A failing schedule as a file: with the model, the settings and the machine that it was found on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.certify.report import Report
from legato.certify.schedule import Schedule
from legato.errors import ConfigError

FORMAT = "legato certify 1"


@dataclass(frozen=True, slots=True)
class Replay:
    """What `write_replay` kept. `settings`: as `Report.settings`."""

    model: str
    isa: str
    settings: Mapping[str, Any]
    schedule: Schedule


def write_replay(report: Report, path: Path) -> None:
    """Writes the finding of `report`, to be read by people and by `read_replay`. Raises ConfigError if it cannot."""
    document = {"format": FORMAT, **report.to_dict()}
    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --output") from error


def read_replay(path: Path) -> Replay:
    """Raises ConfigError for a file that is not there, is no such file, or lacks something."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT or not document.get("failure"):
        raise ConfigError(f"{path} is no schedule written by legato certify (format '{FORMAT}')")
    try:
        schedule = Schedule.from_dict(document["failure"]["schedule"])
        return Replay(document["model"], document["isa"], document["settings"], schedule)
    except KeyError as error:
        raise ConfigError(f"{path} has no field {error}") from error
