"""What a certification did and found, as plain figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legato.certify.schedule import Schedule
from legato.certify.totals import Totals
from legato.certify.trial import Failure


@dataclass(frozen=True, slots=True)
class Finding:
    """A trial that failed. `trial`: its number. `schedule` is the smallest found that fails alike, in `failure`'s way.

    `shrink_runs`: trials that making it small took. `is_repeatable`: whether the schedule fails when it is run again.
    """

    trial: int
    failure: Failure
    schedule: Schedule
    original: Schedule
    shrink_runs: int = 0
    is_repeatable: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """`settings`: what the rig was built with. `seconds`: of the trials, without loading and shrinking.

    `file`: where the finding was written.
    """

    model: str
    description: str
    isa: str
    settings: Mapping[str, object]
    seed: int
    seconds: float
    totals: Totals
    finding: Finding | None = None
    interrupted: bool = False
    file: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether nothing differed."""
        return self.finding is None

    def to_dict(self) -> dict[str, Any]:
        """One JSON document."""
        totals = dataclasses.asdict(self.totals)
        exercised = {name: count for name, count in totals.items() if name not in _VERDICT}
        return {
            "model": self.model,
            "isa": self.isa,
            "exact": self.is_exact,
            **{name: totals[name] for name in _VERDICT},
            "seconds": round(self.seconds, 2),
            "seed": self.seed,
            "interrupted": self.interrupted,
            "settings": dict(self.settings),
            "exercised": exercised,
            "failure": None if self.finding is None else self._failure(self.finding),
        }

    def _failure(self, finding: Finding) -> dict[str, Any]:
        return {
            "trial": finding.trial,
            "kind": finding.failure.kind,
            "message": finding.failure.message,
            "repeatable": finding.is_repeatable,
            "shrink_runs": finding.shrink_runs,
            "schedule": finding.schedule.to_dict(),
            "file": self.file,
        }


_VERDICT = ("trials", "compared_logits", "compared_tokens", "mismatched_logit_bits", "mismatched_tokens")
