"""`legato simulate`: a day of traffic in seconds."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from legato.cli import options
from legato.cli.machine import IDEAL, NOT_IDEAL, THIS, Machine, find_machine, seconds, setup_of
from legato.cli.simulated import show
from legato.cli.traffic import arrivals_from
from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.sim.fleet import Setup
    from legato.sim.ledger import Ledger
    from legato.workload.arrivals import Arrival

RANDOM = ("rate", "cv", "on_off", "prompt_tokens", "output_tokens", "prefix_tree", "prefix_skew", "tenants", "seed")
_MACHINE, _TRAFFIC, _FLEET, _WANTED, _OUT = "Machine", "Traffic", "Fleet", "Objectives", "Output"


def simulate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="Of legato plan --list; with --device this, what legato serve takes.",
            show_default="llama-3.1-8b, or the default model here",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Of the list, or 'this': what steps take here, measured.", rich_help_panel=_MACHINE)
    ] = "h100",
    weight_bits: Annotated[float, typer.Option(help="Of a weight.", rich_help_panel=_MACHINE)] = 16,
    kv_bits: Annotated[float, typer.Option(help="Of a number in the KV cache.", rich_help_panel=_MACHINE)] = 16,
    fixed_ms: Annotated[
        float, typer.Option(help="What a step costs whatever is in it.", rich_help_panel=_MACHINE, min=0)
    ] = 0.0,
    devices: Annotated[int, typer.Option(help="So many share a replica.", rich_help_panel=_MACHINE, min=1)] = 1,
    rate: Annotated[
        float, typer.Option(help="Requests a second, on average.", rich_help_panel=_TRAFFIC, min=1e-6)
    ] = 1.0,
    cv: Annotated[
        float,
        typer.Option(
            help="How uneven they come: 1 is Poisson, 3 comes in bursts (gamma).", rich_help_panel=_TRAFFIC, min=0.01
        ),
    ] = 1.0,
    on_off: Annotated[
        str | None,
        typer.Option(
            help="They come for so many seconds, then nobody for so many, as in 10:30.",
            metavar="ON:OFF",
            show_default="always",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Length of prompts: fixed, lognormal as mean:sigma, or @FILE with one a line.",
            metavar="LENGTH",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "512:0.8",
    output_tokens: Annotated[
        str, typer.Option(help="Length of answers, in the same way.", metavar="LENGTH", rich_help_panel=_TRAFFIC)
    ] = "128:0.6",
    prefix_tree: Annotated[
        str | None,
        typer.Option(
            help="What prompts begin with: 1x512,8x256 is one text of 512 tokens for all, then one of 8 of 256.",
            metavar="NxTOKENS,…",
            show_default="nothing",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    prefix_skew: Annotated[
        float, typer.Option(help="Of these, some are wanted more often (Zipf).", rich_help_panel=_TRAFFIC, min=0)
    ] = 0.0,
    tenants: Annotated[int, typer.Option(help="So many send requests.", rich_help_panel=_TRAFFIC, min=1)] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay this instead: Mooncake, Azure LLM, BurstGPT, JSON lines, or what legato serve --trace wrote.",
            dir_okay=False,
            exists=True,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="So many times as fast as recorded.", rich_help_panel=_TRAFFIC, min=1e-3)
    ] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(help="So many, at most.", show_default="1000, or the trace", rich_help_panel=_TRAFFIC, min=1),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(help="Those of so many seconds.", show_default="no limit", rich_help_panel=_TRAFFIC, min=0.001),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, other traffic.", rich_help_panel=_TRAFFIC)] = 0,
    itl_ms: options.ItlMs = None,
    prefill_share: options.PrefillShare = None,
    prefer: options.PreferOption = None,
    policy: options.PolicyOption = "slo",
    ttft_ms: options.TtftMs = None,
    max_num_batched_tokens: options.MostStepTokens = None,
    max_num_seqs: options.Sequences = 64,
    max_model_len: options.ModelLength = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            help="Size of the KV pool in tokens.", show_default="what fits beside the weights", rich_help_panel="Engine"
        ),
    ] = None,
    block_tokens: options.BlockTokens = 32,
    enable_prefix_caching: options.PrefixCaching = True,
    long_prefill_token_threshold: options.LongPrefill = None,
    max_num_partial_prefills: options.PartialPrefills = None,
    replicas: Annotated[int, typer.Option(help="So many of it.", rich_help_panel=_FLEET, min=1)] = 1,
    router: Annotated[
        Literal["round-robin", "least-loaded", "prefix-aware"],
        typer.Option(help="Which of them a request goes to.", rich_help_panel=_FLEET),
    ] = "least-loaded",
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="Of a replica, in any currency: for the cost of tokens.", rich_help_panel=_FLEET, min=0),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="A good request has its first token by then.", rich_help_panel=_WANTED, min=0)
    ] = None,
    slo_itl_ms: Annotated[
        float | None, typer.Option(help="And 99 % of its gaps within this.", rich_help_panel=_WANTED, min=0)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="And its gaps within this on average.", rich_help_panel=_WANTED, min=0)
    ] = None,
    stall_ms: Annotated[
        float | None,
        typer.Option(
            help="A longer gap is a stall.", show_default="--slo-itl-ms, or --itl-ms", rich_help_panel=_WANTED, min=0
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw it into this file, .svg or .png. Needs legato-serve[plots].",
            dir_okay=False,
            rich_help_panel=_OUT,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """A day of traffic in seconds: the scheduler that serves, on a virtual clock.

    Steps take what arithmetic says of a device, or what was measured here. Engine and simulator share the code that
    plans, and tests hold their plans equal.

    Ctrl-C ends it, and shows what was seen until then.

    Examples:

    [bold]legato simulate --model llama-3.1-8b --device h100 --rate 8 --slo-ttft-ms 500 --slo-itl-ms 30[/bold]

    [bold]legato simulate --device this --rate 1.5 --requests 500[/bold] · the default model here, as measured

    [bold]legato simulate --trace mooncake.jsonl --replicas 8 --router prefix-aware --price-per-hour 2.5[/bold] · fleets

    [bold]legato simulate --rate 40 --cv 3 --tenants 4 --policy fair --plot day.svg[/bold] · bursts, tenants, a picture
    """
    from legato.sim.ledger import Ledger, Objectives

    _check_plot(plot)
    if trace is not None:
        options.refuse_given(context, RANDOM, "is of random traffic, and a trace is replayed")
    else:
        options.refuse_given(context, ["speed"], "is that of a trace; give one with --trace, or another --rate")
    if prefix_tree is None:
        options.refuse_given(context, ["prefix_skew"], "is of texts that prompts begin with; give --prefix-tree")
    if device.lower() == THIS:
        options.refuse_given(context, IDEAL, NOT_IDEAL)
    machine = find_machine(
        device, model, weight_bits=weight_bits, kv_bits=kv_bits, fixed_ms=fixed_ms, devices=devices, quiet=as_json
    )
    setup = setup_of(
        machine,
        itl_ms=itl_ms,
        prefill_share=prefill_share,
        prefer=prefer,
        policy=policy,
        ttft_ms=ttft_ms,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        block_tokens=block_tokens,
        enable_prefix_caching=enable_prefix_caching,
        chunk_tokens=long_prefill_token_threshold,
        partial_prefills=max_num_partial_prefills,
    )
    arrivals, traffic = _traffic(
        trace, speed, rate, cv, on_off, prompt_tokens, output_tokens, prefix_tree, prefix_skew, tenants, seed
    )
    if trace is None and requests is None and duration is None:
        requests = 1000
    stall = stall_ms or slo_itl_ms or (None if setup.itl_s is None else 1000 * setup.itl_s)
    ledger = Ledger(Objectives(seconds(slo_ttft_ms), seconds(slo_itl_ms), seconds(slo_tpot_ms), seconds(stall)))
    wall_s, complete = _run(setup, ledger, arrivals, requests, duration, replicas, router, quiet=as_json)
    document = _document(machine, setup, traffic, ledger, replicas, router, price_per_hour, wall_s, complete=complete)
    if plot is not None and ledger.itl.count:
        from legato.plots.simulation import draw_simulation

        draw_simulation(document, plot)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show(document)
    if not complete:
        raise typer.Exit(130)


def _traffic(
    trace: Path | None,
    speed: float,
    rate: float,
    cv: float,
    on_off: str | None,
    prompt_tokens: str,
    output_tokens: str,
    prefix_tree: str | None,
    prefix_skew: float,
    tenants: int,
    seed: int,
) -> tuple[Iterable[Arrival], dict[str, Any]]:
    """Arrivals, and what they are, for the report."""
    from legato.workload.arrivals import PrefixTree, Process, Traffic
    from legato.workload.lengths import Lengths

    if trace is not None:
        return arrivals_from(trace, speed), {"trace": str(trace), "speed": speed}
    on_s, off_s = _on_off(on_off)
    tree = None if prefix_tree is None else PrefixTree.of(prefix_tree, prefix_skew)
    prompt, output = Lengths.of(prompt_tokens, "--prompt-tokens"), Lengths.of(output_tokens, "--output-tokens")
    told = {"rate": rate, "cv": cv, "on_off": on_off, "prompt_tokens": str(prompt), "output_tokens": str(output)}
    more = {"prefix_tree": prefix_tree, "prefix_skew": prefix_skew, "tenants": tenants, "seed": seed}
    return Traffic(Process(rate, cv, on_s, off_s), prompt, output, tree, tenants, seed), {**told, **more}


def _on_off(text: str | None) -> tuple[float, float]:
    if text is None:
        return math.inf, 0.0
    on, _, off = text.partition(":")
    try:
        return float(on), float(off)
    except ValueError:
        raise ConfigError(f"--on-off is '{text}'; it is two lengths of time in seconds, as in 10:30") from None


def _run(
    setup: Setup,
    ledger: Ledger,
    arrivals: Iterable[Arrival],
    requests: int | None,
    duration: float | None,
    replicas: int,
    router: str,
    *,
    quiet: bool,
) -> tuple[float, bool]:
    """Simulates. Seconds that it took, and whether it came to its end."""
    from legato.sim.fleet import Fleet, bounded
    from legato.sim.router import router as route_by

    fleet = Fleet(setup, ledger, replicas, route_by(router))
    started_s, complete = time.perf_counter(), True
    with contextlib.suppress(KeyboardInterrupt), options.counting_bar("simulating", requests, quiet=quiet) as seen:
        complete = False
        for number in fleet.run(bounded(arrivals, requests, duration)):
            if not number % 64:
                seen(number)
        complete = True
    return time.perf_counter() - started_s, complete


def _document(
    machine: Machine,
    setup: Setup,
    traffic: dict[str, Any],
    ledger: Ledger,
    replicas: int,
    router: str,
    price_per_hour: float | None,
    wall_s: float,
    *,
    complete: bool,
) -> dict[str, Any]:
    from legato.sim.report import curves, report

    engine = {
        "itl_ms": None if setup.itl_s is None else round(1000 * setup.itl_s, 3),
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "max_num_seqs": setup.max_num_seqs,
        "kv_tokens": setup.kv_blocks * setup.block_tokens,
        "policy": setup.policy,
        "prefix_caching": setup.prefix_caching,
    }
    return {
        "simulate": machine.named,
        "complete": complete,
        "engine": engine,
        "traffic": traffic,
        "fleet": {"replicas": replicas, "router": router},
        **report(ledger, replicas, price_per_hour),
        "curves": curves(ledger),
        "simulation": {"wall_s": round(wall_s, 3), "steps_per_s": round(ledger.step_count / max(wall_s, 1e-9))},
    }


def _check_plot(plot: Path | None) -> None:
    """ConfigError, before anything is computed, for a picture that could not be drawn."""
    if plot is None:
        return
    from legato.plots.canvas import check

    check(plot)
