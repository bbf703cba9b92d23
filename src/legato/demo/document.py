"""`Demo`: all that was measured, as JSON has it; every picture and table is made of this alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from legato.demo.figures import figures_of, sum_up
from legato.demo.run import METHODS, Run, Setup

VERSION = 1
_MUCH_STEAL = 0.02


@dataclass(frozen=True, slots=True)
class Demo:
    """`machine`: its processor; `cores`: that the kernels used. `command`: what gave it. `runs`: as far as they came.

    `steal_share`: of the machine's time, what the hypervisor gave to others; None where the system does not tell.
    """

    model: str
    machine: str
    cores: int
    steal_share: float | None
    date: str
    legato: str
    command: str
    setup: Setup
    runs: tuple[Run, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all three runs came to their end."""
        return [run.method for run in self.runs if run.first_s is not None] == list(METHODS)

    @property
    def remarks(self) -> list[str]:
        """What one has to know of how it was measured."""
        found = []
        if not self.is_complete:
            found.append("Interrupted: this is what was measured until then.")
        if (self.steal_share or 0.0) > _MUCH_STEAL:
            found.append(
                f"Others had {100 * (self.steal_share or 0.0):.0f} % of this machine meanwhile: gaps are longer by it."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON; stamps to a tenth of a millisecond. `from_dict` reads it, and leaves the figures aside."""
        named = ("model", "machine", "cores", "steal_share", "date", "legato", "command")
        return {
            "demo": VERSION,
            **{name: getattr(self, name) for name in named},
            "setup": dataclasses.asdict(self.setup),
            "complete": self.is_complete,
            "summary": sum_up(self.setup, self.runs),
            "runs": [_run_dict(run) for run in self.runs],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Demo:
        """Raises KeyError, TypeError or ValueError for what `to_dict` cannot have given."""
        if data["demo"] != VERSION:
            raise ValueError(f"it is of version {data['demo']}; this one reads {VERSION}")
        return cls(
            model=str(data["model"]),
            machine=str(data["machine"]),
            cores=int(data["cores"]),
            steal_share=None if data["steal_share"] is None else float(data["steal_share"]),
            date=str(data["date"]),
            legato=str(data["legato"]),
            command=str(data["command"]),
            setup=Setup(**data["setup"]),
            runs=tuple(_run_of(run) for run in data["runs"]),
        )


def _run_dict(run: Run) -> dict[str, Any]:
    return {
        "method": run.method,
        "figures": figures_of(run).to_dict(),
        "prompt_sent_s": _stamp(run.sent_s),
        "prompt_first_token_s": _stamp(run.first_s),
        "end_s": _stamp(run.now_s),
        "prompt_steps": run.steps,
        "cached_tokens": run.cached_tokens,
        "late_tokens": run.late,
        "token_s": [[round(at_s, 4) for at_s in answer] for answer in run.answers],
    }


def _run_of(data: dict[str, Any]) -> Run:
    if data["method"] not in METHODS:
        raise ValueError(f"there is no method {data['method']!r}")
    answers = [[float(at_s) for at_s in answer] for answer in data["token_s"]]
    sent_s, first_s = (
        None if data[name] is None else float(data[name]) for name in ("prompt_sent_s", "prompt_first_token_s")
    )
    counts = int(data["prompt_steps"]), int(data["cached_tokens"])
    late = {str(cause): int(tokens) for cause, tokens in data["late_tokens"].items()}
    return Run(data["method"], answers, sent_s, first_s, float(data["end_s"]), *counts, late)


def _stamp(at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s, 4)
