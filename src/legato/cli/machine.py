"""`Machine`: what steps take somewhere: on a device by its data sheet, or here, measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from legato.cli import options
from legato.config import DEFAULT_MODEL
from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.core.cost import StepCost
    from legato.core.shape import StepShape
    from legato.sim.fleet import Setup
    from legato.sim.ideal import Parts

THIS = "this"
_DEFAULT_IDEAL = "llama-3.1-8b"
IDEAL = ("weight_bits", "kv_bits", "fixed_ms", "devices")
NOT_IDEAL = "is of idealised devices; this machine is measured"


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device. `named`: both, in words. `kv_tokens`: room for so many beside the weights. `context`: tokens
    of one sequence. `margin`: what is planned with takes so many times what steps take.
    """

    named: dict[str, str]
    cost: StepCost
    parts: Callable[[StepShape], Parts]
    kv_tokens: int
    context: int
    margin: float = 1.0

    def require_room(self, tokens: int, *, longest: int) -> None:
        """Raises ConfigError if so many tokens of KV do not fit, or a sequence of `longest` is too long."""
        if longest > self.context:
            raise ConfigError(
                f"a sequence has {longest:,} tokens and {self.named['model']} takes {self.context:,}; shorten it"
            )
        if tokens > self.kv_tokens:
            fits = f"beside the weights {self.kv_tokens:,} fit" if self.kv_tokens else "not even the weights fit"
            raise ConfigError(
                f"{self.named['device']} has no room for {tokens:,} tokens of KV: {fits};"
                f" take more devices, fewer bits, or less context"
            )


def find_machine(
    device: str,
    model: str | None,
    *,
    weight_bits: float = 16,
    kv_bits: float = 16,
    fixed_ms: float = 0.0,
    devices: int = 1,
    quiet: bool = False,
) -> Machine:
    """By the names of the list; 'this' loads the model and takes what its steps were measured to take.

    Raises ConfigError for names that are not known, with those that are.
    """
    if device.lower() == THIS:
        return _this(model or DEFAULT_MODEL, quiet=quiet)
    from legato.sim import catalog
    from legato.sim.ideal import Ideal

    on, of = catalog.device(device), catalog.model(model or _DEFAULT_IDEAL)
    ideal = Ideal(of, on, weight_bits, kv_bits, fixed_ms / 1000, devices)
    named = {"model": of.name, "device": f"{devices} × {on.name}" if devices > 1 else on.name}
    return Machine(named, ideal.cost, ideal.parts, ideal.kv_tokens, of.context)


def _this(model: str, *, quiet: bool) -> Machine:
    from legato.llm import LLM
    from legato.sim.ideal import parts_of

    with options.loading_bar(quiet=quiet) as report:
        llm = LLM(model, itl_ms=0, on_load=report)
    try:
        pacer, state = llm.engine.pacer, llm.engine.state
        assert pacer is not None
        cost, margin = pacer.tracker.cost, pacer.tracker.margin
    finally:
        llm.engine.close()
    named = {"model": model, "device": "this machine, measured"}
    kv_tokens = state.total_blocks * state.block_tokens
    return Machine(named, cost, functools.partial(parts_of, cost), kv_tokens, state.context, margin)


def setup_of(
    machine: Machine,
    *,
    itl_ms: float | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int = 64,
    max_model_len: int | None = None,
    kv_tokens: int | None = None,
    block_tokens: int = 32,
    prefill_share: float | None = None,
    prefer: Literal["itl", "ttft"] | None = None,
    policy: str = "slo",
    ttft_ms: float | None = None,
    enable_prefix_caching: bool = True,
    chunk_tokens: int | None = None,
    partial_prefills: int | None = None,
) -> Setup:
    """The engine that `legato serve` would be there, by the same options. Raises ConfigError for what cannot be."""
    from legato.sim.fleet import Setup
    from legato.sim.promise import gap_of

    context = min(machine.context, max_model_len or machine.context)
    room = kv_tokens or machine.kv_tokens
    machine.require_room(max(room, 2), longest=2)
    if ttft_ms is not None and policy == "fcfs":
        raise ConfigError("ttft_ms orders requests, and fcfs keeps their order; choose another policy")
    itl_s = gap_of(machine.cost, itl_ms, max_num_batched_tokens, max_num_seqs, context)
    for name, value in (("prefill_share", prefill_share), ("prefer", prefer)):
        if itl_s is None and value is not None:
            raise ConfigError(f"{name} is a part of the gap between tokens, and none is planned for; give itl_ms")
    return Setup(
        machine.cost,
        kv_blocks=max(room // block_tokens, 1),
        block_tokens=block_tokens,
        max_model_len=context,
        max_num_batched_tokens=512 if max_num_batched_tokens is None else max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        policy=policy,
        itl_s=itl_s,
        margin=machine.margin,
        prefill_share=0.2 if prefill_share is None else prefill_share,
        prefer=prefer or "itl",
        ttft_s=seconds(ttft_ms),
        chunk_tokens=chunk_tokens,
        partial_prefills=partial_prefills,
        prefix_caching=enable_prefix_caching,
    )


def seconds(ms: float | None) -> float | None:
    """Of milliseconds, if there are any."""
    return None if ms is None else ms / 1000
