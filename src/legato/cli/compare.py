"""`legato bench compare`: the same requests on a real server and on a virtual clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.cli.bench import clock, measure
from legato.cli.replay import bounded_list
from legato.cli.traffic import arrivals_from
from legato.config import DEFAULT_MODEL
from legato.errors import ConfigError, RunInvalid

if TYPE_CHECKING:
    from legato.explain.read import Trace
    from legato.sim.fleet import Setup
    from legato.workload.arrivals import Arrival

_TINY = 7
_RANDOM = ("rate", "prompt_tokens", "output_tokens", "seed")
_KINDS = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms"))


def compare(
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay this, as legato simulate does.", show_default="random", exists=True, dir_okay=False),
    ] = None,
    speed: Annotated[float, typer.Option(help="So many times as fast as recorded.", min=1e-3)] = 1.0,
    rate: Annotated[float, typer.Option(help="Or Poisson arrivals: requests a second.", min=1e-3)] = 1.0,
    prompt_tokens: Annotated[str, typer.Option(help="Of these, lengths of prompts.", metavar="LENGTH")] = "512:0.8",
    output_tokens: Annotated[str, typer.Option(help="And of answers.", metavar="LENGTH")] = "64:0.6",
    requests: Annotated[int, typer.Option(help="So many, at most.", min=2)] = 120,
    seed: Annotated[int, typer.Option(help="Another seed, other traffic.")] = 0,
    itl_ms: options.ItlMs = None,
    max_num_batched_tokens: options.MostStepTokens = None,
    max_num_seqs: options.Sequences = 64,
    policy: options.PolicyOption = "slo",
    keep_trace: Annotated[
        Path | None,
        typer.Option(help="Keep what the server recorded, for legato explain.", dir_okay=False),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """How near does the simulator come?

    Starts a server, sends it a trace, and simulates the same trace: the same options, steps that take what was
    calibrated at the speed that the machine had meanwhile, each off by as much as some step was.

    Examples:

    [bold]legato bench compare --rate 1.5[/bold] · 120 requests, at that rate

    [bold]legato bench compare --trace azure.csv --speed 0.05 --requests 200 --json[/bold]
    """
    from legato.workload.arrivals import Process, Traffic
    from legato.workload.lengths import Lengths

    options.check_folder(keep_trace)
    if itl_ms is None and max_num_batched_tokens is not None:
        raise ConfigError("steps bounded by tokens alone are not foreseen; compare with --itl-ms")
    if trace is not None:
        options.refuse_given(context, _RANDOM, "is of random traffic, and a trace is replayed")
        arrivals = bounded_list(arrivals_from(trace, speed), requests, None)
    else:
        options.refuse_given(context, ["speed"], "is that of a trace; give one with --trace, or another --rate")
        prompt, output = Lengths.of(prompt_tokens, "--prompt-tokens"), Lengths.of(output_tokens, "--output-tokens")
        arrivals = bounded_list(Traffic(Process(rate), prompt, output, seed=seed), requests, None)
    budgets = {"itl-ms": itl_ms, "max-num-batched-tokens": max_num_batched_tokens}
    serve: dict[str, object] = {"max-num-seqs": max_num_seqs, "policy": policy}
    serve |= {name: value for name, value in budgets.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "steps.jsonl" if keep_trace is None else keep_trace
        measure(_compare(model, arrivals, serve, steps, as_json=as_json))


async def _compare(
    model: str, arrivals: Sequence[Arrival], serve: Mapping[str, object], steps: Path, *, as_json: bool
) -> None:
    from legato.bench.client import Address, Client
    from legato.bench.dialect import Server, learn_dialect
    from legato.bench.load import Prompts
    from legato.bench.machine import Meter, allow_many_connections
    from legato.bench.replay import figures, replay
    from legato.bench.spawned import Spawned
    from legato.explain.read import read_trace
    from legato.sim.fidelity import BAR, delayed, errors, worst

    allow_many_connections()
    vocab, meter = range(300, 20000), Meter(clock)
    async with Spawned(model, {**serve, "trace": steps}, clock) as url:
        client = Client(Address.of(url), clock)
        await client.connect()
        dialect = await learn_dialect(client, None, vocab)
        prompts = Prompts(Random(), vocab, None if dialect.takes_ids else dialect.words)
        server = Server(client, dialect)
        tiny_s = await _tiny(server, prompts)
        begin_s = clock()
        with options.counting_bar("serving", len(arrivals), quiet=as_json) as seen:
            async with meter:
                run = await replay(server, prompts, arrivals, clock, seen=seen)
        if len(run.arrivals) < len(arrivals):
            raise RunInvalid([f"interrupted after {len(run.arrivals)} of {len(arrivals)} requests: nothing to compare"])
        served = figures(run)
    recorded = read_trace(steps)
    setup, door_s = _setup(recorded, begin_s, tiny_s)
    simulated = delayed(_simulate(setup, arrivals), 1000 * door_s)
    found = errors(served, simulated)
    document = {
        "compare": dialect.model,
        "requests": len(arrivals),
        "machine": meter.to_dict(is_local=True),
        "engine": {"itl_ms": None if setup.itl_s is None else round(1000 * setup.itl_s, 2), **serve},
        "calibrated": {
            "scale": round(setup.cost.scale, 4),
            "memory_scale": round(setup.cost.memory_scale, 4),
            "margin": round(setup.margin, 4),
            "door_ms": round(1000 * door_s, 3),
        },
        "served": served,
        "simulated": {kind: simulated[kind] for _, kind in _KINDS} | {"seconds": simulated["seconds"]},
        "errors": found,
        "worst": worst(found),
        "within": worst(found) <= BAR,
    }
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _show(document)


async def _tiny(server: Any, prompts: Any) -> float:
    """What a request of one token takes on an idle server, at its client."""
    from legato.bench.capacity import tiny_answer_s

    return median([await tiny_answer_s(server, prompts) for _ in range(_TINY)])


def _setup(recorded: Trace, begin_s: float, tiny_s: float) -> tuple[Setup, float]:
    """The engine as it was while it served from `begin_s` on, and seconds that a client is away from it."""
    from legato.explain.record import shape_of
    from legato.sim.fleet import Setup
    from legato.sim.noise import Recorded

    header, costs = recorded.header, [recorded.cost(n) for n in range(len(recorded.steps))]
    engine, told = header.engine, [n for n, s in enumerate(recorded.steps) if s.started_s >= begin_s and costs[n]]
    if not told:
        raise RunInvalid(["the server's record has no step that was foreseen; see it with --keep-trace"])
    last = costs[told[-1]]
    assert last is not None
    terms = last.scaled(1.0, 1.0)  # as they were fitted anew on the way, if they were
    alike = [n for n in told if (cost := costs[n]) is not None and cost.scaled(1.0, 1.0) == terms]
    cost = terms.scaled(
        median(recorded.steps[n].scale for n in alike), median(recorded.steps[n].memory_scale for n in alike)
    )
    noise: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for n in told:
        step = recorded.steps[n]
        shape = shape_of(step)
        if shape is not None and (predicted_s := cost.predict(shape)) > 0.0:
            noise[shape.rows > shape.sequences].append((step.started_s - begin_s, step.step_s / predicted_s))
    before = [s.step_s for s in recorded.steps if s.started_s < begin_s and s.decodes == 0]
    setup = Setup(
        cost,
        kv_blocks=engine.kv_blocks,
        block_tokens=engine.block_tokens,
        max_model_len=engine.max_model_len,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        policy=engine.policy or "slo",
        itl_s=header.itl_s or None,
        margin=recorded.steps[told[0]].margin,
        prefill_share=0.2 if engine.prefill_share is None else engine.prefill_share,
        prefer="ttft" if engine.prefer == "ttft" else "itl",
        chunk_tokens=engine.long_prefill_token_threshold,
        partial_prefills=engine.max_num_partial_prefills,
        prefix_caching=engine.prefix_caching,
        noise=Recorded(*noise),
        ahead=engine.async_scheduling,
        learns=True,
    )
    return setup, max(tiny_s - median(before[-_TINY:]), 0.0) if before else 0.0


def _simulate(setup: Setup, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    from legato.sim.fleet import Fleet
    from legato.sim.ledger import Ledger
    from legato.sim.report import report

    ledger = Ledger()
    for _ in Fleet(setup, ledger).run(arrivals):
        pass
    return report(ledger)


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    gap = document["engine"]["itl_ms"]
    kept = "" if gap is None else f", {gap:g} ms between tokens"
    console.print(f"\n[bold cyan]{document['compare']}[/]: {document['requests']} requests{kept}\n")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("", "", "served ms", "simulated ms", "off"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, kind in _KINDS:
        for name in ("p50", "p90", "p99", "max") if kind in document["errors"] else ():
            off = document["errors"][kind].get(name, 0.0)
            there, here = document["served"][kind][name], document["simulated"][kind][name]
            style = "green" if abs(off) <= 0.1 else "yellow"
            table.add_row(
                label if name == "p50" else "", name, f"{there:,.1f}", f"{here:,.1f}", f"[{style}]{100 * off:+.1f} %[/]"
            )
    console.print(table)
    calibrated = document["calibrated"]
    slow, memory, door = (calibrated[name] for name in ("scale", "memory_scale", "door_ms"))
    console.print(
        f"\n  worst of p50 and p99 of TTFT and ITL: [bold]{100 * document['worst']:.1f} %[/]\n"
        f"  the machine was {slow:.2f} times as slow as calibrated, its memory {memory:.2f} times beside that;"
        f" a client is {door:.1f} ms away\n"
    )
