"""From the stamps of a run to its figures, and to a sentence that says what they mean."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legato.demo.run import Run, Setup

_WORST = 3
# What a gap may be over what was asked for before one asks why; and a difference that is none.
_KEPT, _ALIKE = 1.1, 1.25


_WHY = {
    "slow": "steps took longer than foreseen, as when others come to use the machine",
    "decodes": "the streams alone take longer",
    "prompts": "that is the share that prompts have in any case",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Units in the names; None: it did not come so far.

    `worst_ms`: the longest gaps between two tokens of a stream, at most three; several streams that wait for one step
    count once. `usual_ms`: the median gap while there was no prompt to read. `ttft_s`: from the prompt to its first
    token. `tokens_per_s`: of all streams, in that time.
    """

    worst_ms: tuple[float, ...]
    usual_ms: float | None
    ttft_s: float | None
    tokens_per_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, to a tenth of a millisecond."""
        return {
            "worst_gaps_ms": [round(ms, 1) for ms in self.worst_ms],
            "usual_gap_ms": _rounded(self.usual_ms, 1),
            "ttft_s": _rounded(self.ttft_s, 4),
            "stream_tokens_per_s": _rounded(self.tokens_per_s, 1),
        }


def gaps_of(run: Run) -> list[tuple[float, float]]:
    """(begin, end) of each wait for a stream's next token, in seconds and in order; those of one moment once."""
    return sorted({gap for answer in run.answers for gap in pairwise(answer)})


def figures_of(run: Run) -> Figures:
    """Cost: O(tokens log tokens)."""
    gaps = gaps_of(run)
    worst = sorted((end - begin for begin, end in gaps), reverse=True)[:_WORST]
    sent_s, first_s = run.sent_s, run.first_s
    usual = [end - begin for begin, end in gaps if sent_s is None or end <= sent_s]
    ttft_s = None if sent_s is None or first_s is None else first_s - sent_s
    rate = None
    if sent_s is not None and first_s is not None and first_s > sent_s:
        rate = sum(sent_s < at_s <= first_s for answer in run.answers for at_s in answer) / (first_s - sent_s)
    return Figures(tuple(1e3 * s for s in worst), 1e3 * statistics.median(usual) if usual else None, ttft_s, rate)


def name_of(run: Run, setup: Setup) -> tuple[str, str]:
    """What to call a run, and what it means."""
    if run.method == "one pass":
        return "Chunking off", "the whole prompt in one step"
    if run.method == "tokens":
        return "A fixed budget", f"{setup.step_tokens:,} tokens a step"
    return "Milliseconds", f"a token every {setup.itl_ms:,.0f} ms"


def sum_up(setup: Setup, runs: Sequence[Run]) -> str:
    """What happened, in plain words, whatever it was."""
    done = {run.method: figures_of(run) for run in runs if run.first_s is not None}
    whole, paced = done.get("one pass"), done.get("milliseconds")
    late = next((run.late for run in runs if run.method == "milliseconds"), {})
    if whole is None or not whole.worst_ms or whole.ttft_s is None:
        return "Not one run came to its end: there is nothing to compare."
    readers = "its reader" if setup.streams == 1 else f"all {setup.streams} readers"
    said = f"Read in one step, a prompt of {setup.prompt_tokens:,} tokens kept {readers} waiting for {_of(whole)}."
    if paced is None or not paced.worst_ms or paced.ttft_s is None:
        return said + _fixed(done.get("tokens"), setup)
    wanted, worst = f"{setup.itl_ms:,.0f} ms", paced.worst_ms[0]
    if whole.worst_ms[0] < _ALIKE * worst:
        return f"{said} In steps of {wanted} the longest wait was {_of(paced)}: here chunks made no difference."
    if worst <= setup.itl_ms:
        kept = f"no wait was longer than {_of(paced)}"
    elif worst <= _KEPT * setup.itl_ms:
        kept = f"the longest wait was {_of(paced)},"
    else:
        kept = f"the longest wait was {_of(paced)}, which is more than was asked for{_why(late)},"
    return f"{said} Asked for {wanted}, {kept} and the prompt was answered {_later(whole.ttft_s, paced.ttft_s)}."


def duration(ms: float) -> str:
    """For people: "12 ms", "3.8 s"."""
    return f"{ms / 1e3:,.1f} s" if ms >= 1000 else f"{ms:,.0f} ms" if ms >= 1 else f"{ms:.1g} ms"


def _fixed(fixed: Figures | None, setup: Setup) -> str:
    if fixed is None or not fixed.worst_ms:
        return ""
    return f" In steps of {setup.step_tokens:,} tokens no wait was longer than {_of(fixed)}."


def _of(figures: Figures) -> str:
    return duration(figures.worst_ms[0])


def _why(late: Mapping[str, int]) -> str:
    """What most tokens were late by, in parentheses."""
    cause = max(late, key=lambda cause: late[cause], default="")
    return f" ({_WHY[cause]})" if cause in _WHY else ""


def _later(whole_s: float, paced_s: float) -> str:
    difference_s = paced_s - whole_s
    if abs(difference_s) < 0.05:
        return f"as soon: after {paced_s:.1f} s"
    return (
        f"{abs(difference_s):.1f} s {'later' if difference_s > 0 else 'sooner'}:"
        f" after {paced_s:.1f} s instead of {whole_s:.1f}"
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
