"""What one step does (`StepPlan`) and what came of it (`StepResult`): columns, one entry a scheduled request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which tokens each request computes in one step. Counts only: block ids are chosen by `SchedulerState.apply`.

    Entry i computes positions `[starts[i], starts[i] + counts[i])` of `request_ids[i]`; `samples[i]` says whether the
    logits of its last row are needed, that is, whether the last known token is among them. The first `decodes` entries
    are decodes (one pending token); prefills in progress and admissions follow.
    `admit`: waiting requests that enter with this step (a subset of `request_ids`); what such a one need not compute,
    positions `[0, starts[i])`, is in the prefix cache. `preempt`: victims, chosen before any token was given out; none
    of them is in `request_ids`. `overtaken`: requests that do not fit, and behind which one that does is admitted.
    """

    step: int
    request_ids: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]
    admit: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    decodes: int = 0
    overtaken: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens (= rows of the ragged batch) in the step."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: of the chosen token, and of the most likely ones, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens sampled in a step, one for each plan entry with `samples[i]`, in plan order.

    `logprobs` is empty, or has one entry a token: None where the request did not ask for them.
    """

    step: int
    request_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
