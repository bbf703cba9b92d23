"""The steps of one prompt beside running streams, as `plan_step` makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from legato.core.budget import StepBudget, StepTime
from legato.core.cost import StepCost
from legato.core.plan import StepPlan, StepResult
from legato.core.policy import SLO
from legato.core.request import Request, StopRule
from legato.core.schedule import plan_step
from legato.core.shape import StepShape
from legato.core.state import SchedulerState
from legato.errors import ConfigError
from legato.sim.ideal import Parts

_BLOCK_TOKENS = 16
_PROMPT_ID = 0
_WHOLE = 1 << 30


@dataclass(frozen=True, slots=True)
class PromptStep:
    """Rows `[start, start + rows)` of the prompt, beside `decodes` rows of streams."""

    start: int
    rows: int
    decodes: int
    parts: Parts


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """How a prompt is computed. `decode`: a step of the streams alone, empty if there are none."""

    steps: tuple[PromptStep, ...]
    decode: Parts

    @property
    def ttft_s(self) -> float:
        """From the beginning of its first step to its first token."""
        return sum(step.parts.seconds for step in self.steps)

    @property
    def worst_gap_s(self) -> float:
        """The longest of its steps, which is what streams wait between two tokens meanwhile."""
        return max(step.parts.seconds for step in self.steps)

    def slowdown(self, whole: PromptPlan) -> float:
        """How many times as long as in one pass the prompt takes."""
        return self.ttft_s / whole.ttft_s


def plan_prompt(
    cost: StepCost,
    parts: Callable[[StepShape], Parts],
    *,
    prompt: int,
    decodes: int = 0,
    context: int = 1024,
    chunk: int | None = None,
    itl_s: float | None = None,
) -> PromptPlan:
    """Its steps beside `decodes` streams, each at position `context` at first.

    `chunk`: rows of the prompt in a step, at most; None: as many as fit. `itl_s`: the gap that streams may see; None:
    whatever. Neither: all of it in one step. Raises ConfigError for sizes that plan nothing. Cost: O(prompt).
    """
    for name, value, least in (("prompt", prompt, 1), ("decodes", decodes, 0), ("context", context, 1)):
        if value < least:
            raise ConfigError(f"{name} is {value}; the least is {least}")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk is {chunk}; a prompt would never be computed: 1 is the least")
    decode = parts(StepShape.of_decodes([context] * decodes, cost.attention))
    if itl_s is not None and decodes and decode.seconds >= itl_s:
        raise ConfigError(
            f"{decodes} streams alone take {1e3 * decode.seconds:.1f} ms a token, and {1e3 * itl_s:g} are asked for;"
            f" allow more, or plan for fewer streams"
        )
    state = _streams(decodes, context, prompt)
    budget = StepBudget(_WHOLE if chunk is None else chunk + decodes, decodes + 1, prompt_logit_rows=1)
    state.submit(Request(_PROMPT_ID, tuple(range(prompt)), stop=StopRule(1)))
    steps = []
    now_s = 0.0  # when all streams had their last token
    while any(slot.request_id == _PROMPT_ID for slot in (*state.running, *state.waiting)):
        time = None if itl_s is None else StepTime(cost, now_s, itl_s)
        plan = plan_step(state, dataclasses.replace(budget, time=time), state.policy)
        spent = parts(StepShape.of(plan, cost.attention))
        at = plan.request_ids.index(_PROMPT_ID)
        steps.append(PromptStep(plan.starts[at], plan.counts[at], plan.decodes, spent))
        now_s += spent.seconds
        _carry_out(state, plan, now_s)
    return PromptPlan(tuple(steps), decode)


def _streams(count: int, context: int, prompt: int) -> SchedulerState:
    """A state in which so many requests decode and have `context` tokens behind them."""
    length = max(context, 1) + 2 + prompt  # no more steps than the prompt has rows
    blocks = count * -(-length // _BLOCK_TOKENS) + -(-(prompt + 1) // _BLOCK_TOKENS)
    state = SchedulerState(blocks + 1, _BLOCK_TOKENS, max(length, prompt + 1), cache_root=None, policy=SLO)
    for n in range(1, count + 1):
        state.submit(Request(n, (0,) * context, stop=StopRule(_WHOLE)))
    while state.waiting or any(slot.known - slot.scheduled > 1 for slot in state.running):
        _carry_out(state, plan_step(state, StepBudget(_WHOLE, count + 1), state.policy), 0.0)
    return state


def _carry_out(state: SchedulerState, plan: StepPlan, now_s: float) -> None:
    state.apply(plan)
    sampled = tuple(i for i, samples in zip(plan.request_ids, plan.samples, strict=True) if samples)
    state.commit(StepResult(plan.step, sampled, (0,) * len(sampled)), now_s)
