"""The lines of a trace: one JSON object each, told apart by `type`. Seconds are the server's monotonic clock."""

from __future__ import annotations

import functools
from array import array
from typing import Any

import msgspec

from legato.core.cost import StepCost
from legato.core.plan import StepPlan
from legato.core.prefix import KeyChain
from legato.core.shape import StepShape
from legato.core.trace import TracedStep

FORMAT = 1
_NAME_BYTES = 4
_DIGITS = 7  # tenths of a microsecond: what two readings of a clock differ by


class Options(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of the engine a simulator needs. As `EngineInfo` has it: tokens, blocks, seconds."""

    kv_blocks: int
    block_tokens: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str = ""
    prefill_share: float | None = None
    prefer: str | None = None
    ttft_s: float = 0.0
    tenant_weights: dict[str, float] = {}
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    async_scheduling: bool = False
    prefix_caching: bool = True


class Header(msgspec.Struct, frozen=True, tag_field="type", tag="header"):
    """The first line of each file. `unix_s`, `monotonic_s`: one moment, before the first request, on both clocks.

    `itl_s`: the gap that steps are planned for, 0 if they are not. `cost`: of `StepCost.to_dict`, by which the steps
    that follow are foreseen; None: they are not.
    """

    format: int
    legato: str
    model: str
    unix_s: float
    monotonic_s: float
    itl_s: float
    engine: Options
    cost: dict[str, Any] | None = None


class Asked(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="request"):
    """A request was sent to the engine. `itl_s`, `ttft_s`, `deadline_s`: what it wants, if it said so.

    `tokenized_s`: when its text was turned into tokens. `blocks`: names of its prompt's whole blocks, 4 bytes each:
    two prompts begin alike as far as their names are equal. They are keyed by a secret of the run: no text can be
    guessed from them. `generated`: tokens that came before this line; not 0 only where a file begins in its middle.
    `drawn`, `nucleus`, `logprobs`, `prompt_logprobs`: what `StepShape` counts of it.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    itl_s: float | None = None
    ttft_s: float | None = None
    deadline_s: float | None = None
    tokenized_s: tuple[float, float] | None = None
    drawn: bool = False
    nucleus: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    blocks: list[int] = []
    generated: int = 0

    @property
    def asked_s(self) -> float:
        """When the server began with it."""
        return self.arrival_s if self.tokenized_s is None else min(self.tokenized_s[0], self.arrival_s)


class Stepped(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="step"):
    """One step: what was planned (as `StepPlan` has it), foreseen and measured (as `TracedStep` has it).

    `samples[i]`: 1 if a token of `ids[i]` came of it. `dispatched_s`: when the server handed its tokens on. `shape`:
    the fields of `StepShape` in order.
    """

    step: int
    started_s: float
    plan_s: float
    step_s: float
    dispatched_s: float
    ids: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[int]
    decodes: int
    running: int
    waiting: int
    free_blocks: int
    predicted_s: float | None = None
    budget_s: float | None = None
    shape: tuple[int, ...] | None = None
    scale: float = 0.0
    memory_scale: float = 0.0
    margin: float = 0.0
    ahead: bool = False
    admit: list[int] = []
    preempt: list[int] = []

    @property
    def ended_s(self) -> float:
        """When its tokens were there, in the engine."""
        return self.started_s + self.step_s

    @property
    def planned_s(self) -> float:
        """Of `step_s`, what was planning: nothing of a step that was planned while the one before was computed."""
        return 0.0 if self.ahead else min(self.plan_s, self.step_s)


class Fitted(msgspec.Struct, frozen=True, tag_field="type", tag="cost"):
    """Steps after this line are foreseen by `cost`."""

    at_s: float
    cost: dict[str, Any]


class Ended(msgspec.Struct, frozen=True, tag_field="type", tag="end"):
    """Nothing came of a request after `end_s`. `reason`: as `Finished` has it. `generated`: its tokens."""

    id: int
    reason: str
    generated: int
    end_s: float


Event = Asked | Stepped | Fitted | Ended
Line = Header | Event

_encode = msgspec.json.Encoder().encode


def encode_line(line: Line) -> bytes:
    """JSON, and the end of the line. Cost: 4 µs for a step of 16 requests."""
    return _encode(line) + b"\n"


def stepped(traced: TracedStep, dispatched_s: float) -> Stepped:
    """The line of a step."""
    record, shape = traced.record, traced.shape
    plan: StepPlan = record.plan
    emitted = set(traced.emitted)
    seconds = functools.partial(round, ndigits=_DIGITS)
    return Stepped(
        step=plan.step,
        started_s=seconds(record.started_s),
        plan_s=seconds(record.plan_s),
        step_s=seconds(record.step_s),
        dispatched_s=seconds(dispatched_s),
        ids=list(plan.request_ids),
        starts=list(plan.starts),
        counts=list(plan.counts),
        samples=[int(sample and i in emitted) for i, sample in zip(plan.request_ids, plan.samples, strict=True)],
        decodes=plan.decodes,
        running=record.running,
        waiting=record.waiting,
        free_blocks=record.free_blocks,
        predicted_s=None if traced.predicted_s is None else seconds(traced.predicted_s),
        budget_s=None if traced.budget_s is None else seconds(traced.budget_s),
        shape=None if shape is None else _columns(shape),
        scale=traced.scale,
        memory_scale=traced.memory_scale,
        margin=traced.margin,
        ahead=traced.ahead,
        admit=list(plan.admit),
        preempt=list(plan.preempt),
    )


def block_names(root: bytes, prompt: tuple[int, ...], block_tokens: int) -> list[int]:
    """Names of the whole blocks of a prompt, each of its tokens and of those before. Cost: 1 µs for 32 tokens."""
    chain = KeyChain(root, block_tokens)
    chain.extend(array("i", prompt))
    return [int.from_bytes(key[:_NAME_BYTES], "little") for key in chain.keys]


def shape_of(step: Stepped) -> StepShape | None:
    """The shape that was foreseen; None of a step that was not."""
    return None if step.shape is None else StepShape(*step.shape)


def cost_of(data: dict[str, Any] | None) -> StepCost | None:
    """The cost of a header or of `Fitted`. KeyError, TypeError, ValueError if that is none."""
    return None if data is None else StepCost.from_dict(data)


def _columns(shape: StepShape) -> tuple[int, ...]:
    return (
        shape.rows,
        shape.sequences,
        shape.pairs,
        shape.kv_tokens,
        shape.logit_rows,
        shape.drawn_rows,
        shape.nucleus_rows,
        shape.logprob_rows,
        shape.copied_blocks,
    )
