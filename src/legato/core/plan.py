"""What one step does (`StepPlan`) and what came of it (`StepResult`): columns, one entry a scheduled request."""

from __future__ import annotations

from collections.abc import Container
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
    `scores`: (request, start, stop) where the logits of its rows `[start, stop)` are needed as well, for the
    log-probabilities of the prompt's tokens after them; in the order of `request_ids`.
    `missed`: requests whose first token cannot be there when it is due; they go on without a time.
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
    scores: tuple[tuple[int, int, int], ...] = ()
    missed: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens (= rows of the ragged batch) in the step."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: of the chosen token, and of the most likely ones, best first.

    `rank`: the place of the chosen token among all, 1 for the most likely; 0 if nobody counted.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the tokens of one request's prompt at positions `start` and up, each after those before it."""

    request_id: int
    start: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens sampled in a step, one for each plan entry with `samples[i]`, in plan order.

    `logprobs` is empty, or has one entry a token: None where the request did not ask for them. `prompt_logprobs`: one
    for each of `plan.scores`, in that order.
    """

    step: int
    request_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    def without(self, gone: Container[int]) -> StepResult:
        """What is there of all requests but those."""
        keep = [i for i, request_id in enumerate(self.request_ids) if request_id not in gone]
        return StepResult(
            self.step,
            tuple(self.request_ids[i] for i in keep),
            tuple(self.token_ids[i] for i in keep),
            tuple(self.logprobs[i] for i in keep) if self.logprobs else (),
            tuple(scored for scored in self.prompt_logprobs if scored.request_id not in gone),
        )
