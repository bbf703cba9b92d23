"""`legato tune`: which budget, on this machine or on one that is not bought yet."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.cli.machine import THIS, Machine, find_machine, setup_of
from legato.config import DEFAULT_MODEL
from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.bench.interference import Settings
    from legato.sim.interference import Load
    from legato.tune.efficiency import Efficiency
    from legato.tune.knee import Advice
    from legato.tune.sweep import Kept, Point, Setting

_LOAD, _OUT = "Load", "Output"


def tune(
    model: Annotated[
        str | None,
        typer.Option(help="What legato serve takes; with --simulate, of legato plan --list.", show_default=False),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="On a virtual clock, in seconds, for --device.")] = False,
    device: Annotated[
        str, typer.Option(help="With --simulate: of legato plan --list, or 'this', as steps were measured here.")
    ] = THIS,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Tokens a step to try, rounded up to blocks of rows.", show_default="256,384,512,768,1024,1536,2048"
        ),
    ] = None,
    itl_ms: Annotated[
        str | None,
        typer.Option(
            "--itl-ms",
            help="Gaps between tokens to try as well, as in 60,100; 0 for none.",
            show_default="what serve chooses by itself",
        ),
    ] = None,
    streams: Annotated[int, typer.Option(help="Streams that decode meanwhile.", rich_help_panel=_LOAD, min=1)] = 8,
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens of the long prompts, in turn.", rich_help_panel=_LOAD)
    ] = "4000",
    every: Annotated[float, typer.Option(help="Seconds from one to the next.", rich_help_panel=_LOAD, min=0.01)] = 10,
    duration: Annotated[float, typer.Option(help="Seconds measured, a setting.", rich_help_panel=_LOAD, min=0.1)] = 30,
    max_num_seqs: options.Sequences = 64,
    out: Annotated[
        Path, typer.Option(help="The configuration is written here, for legato serve --config.", dir_okay=False)
    ] = Path("legato.toml"),
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw it into this file, .svg or .png. Needs legato-serve[plots], as the knee does.",
            dir_okay=False,
            rich_help_panel=_OUT,
        ),
    ] = None,
    resume: Annotated[
        Path,
        typer.Option(
            help="Where points are kept until all are measured: run the same command again to go on.",
            dir_okay=False,
            rich_help_panel=_OUT,
        ),
    ] = Path("legato-tune.jsonl"),
    as_json: options.AsJson = False,
) -> None:
    """Find the step budget at which longer steps stop paying off.

    Each is served in turn, with streams and long prompts, and the knee of p99 gaps against first tokens is found
    (Kneedle). Says why, and writes a file for [bold]legato serve --config[/bold]. Also: the smallest chunk that is
    worth it, and where one row more costs a block.

    Ctrl-C keeps what was measured; the same command goes on.

    Examples:

    [bold]legato tune[/bold] · the default model on this machine, most of a minute a setting

    [bold]legato tune --simulate --model llama-3.1-8b --device h100 --every 1 --plot knee.svg[/bold] · seconds

    [bold]legato tune --streams 4 --prompt-tokens 2000,8000 --itl-ms 60,100[/bold] · two gaps in milliseconds too
    """
    from legato.bench.load import parse_tokens
    from legato.sim.interference import Load
    from legato.tune.knee import advise
    from legato.tune.sweep import Kept

    require_plots(plot)
    lengths = parse_tokens(prompt_tokens, "--prompt-tokens")
    load = Load(streams, lengths, every, duration)
    if not simulate and device.lower() != THIS:
        raise ConfigError(f"{device} is not here; give --simulate with --device")
    machine = find_machine(device if simulate else THIS, model, quiet=as_json)
    longest = max(lengths) + 1
    machine.require_room(longest, longest=longest)
    settings = _settings(machine, budgets, itl_ms, max_num_seqs)
    what = {"machine": machine.named, "simulate": simulate, "load": _told(load), "max_num_seqs": max_num_seqs}
    kept = Kept(resume, what)
    try:
        if simulate:
            points = _simulated(machine, settings, load, max_num_seqs, kept, quiet=as_json)
        else:
            points = _served(machine, settings, load, max_num_seqs, kept, quiet=as_json)
    except KeyboardInterrupt:
        options.say(f"{len(kept.points)} of {len(settings)} settings are kept in {resume}; the same command goes on")
        raise typer.Exit(130) from None
    efficiency = _efficiency(machine, settings, simulate=simulate, quiet=as_json)
    advice = advise(points)
    document = _document(machine, load, points, advice, efficiency, simulate=simulate)
    _write_config(out, machine.named["model"], advice, max_num_seqs, simulate=simulate)
    kept.forget()
    if plot is not None:
        from legato.plots.tuning import draw_tuning

        draw_tuning(document, plot)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _show(document, points, advice, efficiency, out)


def require_plots(plot: Path | None) -> None:
    """ConfigError, before anything is measured, if the knee could not be found or drawn."""
    import importlib.util

    if importlib.util.find_spec("kneed") is None:
        raise ConfigError("the knee is found by kneed: pip install 'legato-serve[plots]'")
    if plot is not None:
        from legato.plots.canvas import check

        check(plot)


def _settings(machine: Machine, budgets: str | None, itl_ms: str | None, max_num_seqs: int) -> list[Setting]:
    from legato.bench.load import parse_tokens
    from legato.sim.promise import gap_of
    from legato.tune.sweep import BUDGETS, Setting, aligned

    sizes = BUDGETS if budgets is None else parse_tokens(budgets, "--budgets")
    tokens = aligned(sizes, machine.cost.tile)
    if min(tokens) < max_num_seqs:
        raise ConfigError(
            f"a step of {min(tokens)} tokens cannot hold one for each of {max_num_seqs} running requests;"
            f" try {max_num_seqs} and more with --budgets, or lower --max-num-seqs"
        )
    found = [Setting(n) for n in tokens]
    if itl_ms is None:
        gap_s = gap_of(machine.cost, None, None, max_num_seqs, machine.context)
        assert gap_s is not None
        gaps = [round(1000 * gap_s, 1)]
    else:
        try:
            gaps = [float(part) for part in itl_ms.split(",")]
        except ValueError:
            raise ConfigError(f"--itl-ms is '{itl_ms}'; it is one gap as in 60, or several as in 60,100") from None
        gaps = [gap for gap in gaps if gap]
        for gap in gaps:
            gap_of(machine.cost, gap, None, max_num_seqs, machine.context)
    return found + [Setting(max(tokens), gap) for gap in gaps]


def _simulated(
    machine: Machine, settings: Sequence[Setting], load: Load, max_num_seqs: int, kept: Kept, *, quiet: bool
) -> list[Point]:
    from legato.sim.interference import Interference
    from legato.tune.sweep import Point

    def measure(setting: Setting) -> Point:
        engine = setup_of(
            machine, itl_ms=setting.itl_ms, max_num_batched_tokens=setting.tokens, max_num_seqs=max_num_seqs
        )
        run = Interference(engine, load).run()
        if not run.ttft.count or not run.itl.count:
            raise ConfigError(
                f"with {setting}, no prompt was answered within {2 * load.duration_s:g} s; raise --every or --duration"
            )
        p50, p99 = run.itl.quantiles((0.5, 0.99))
        rates = run.output_tokens / load.duration_s, run.prompt_tokens / load.duration_s
        return Point(setting, 1e3 * p50, 1e3 * p99, 1e3 * run.itl.most, 1e3 * run.ttft.quantile(0.5), *rates)

    with options.counting_bar("simulating", len(settings), quiet=quiet) as seen:
        return _each(settings, measure, kept, seen)


def _served(
    machine: Machine, settings: Sequence[Setting], load: Load, max_num_seqs: int, kept: Kept, *, quiet: bool
) -> list[Point]:
    from legato.bench.interference import Settings

    sent = Settings(
        streams=load.streams,
        prompt_tokens=load.prompt_tokens,
        every_s=load.every_s,
        duration_s=load.duration_s,
        warmup_s=load.warmup_s,
        stream_tokens=load.stream_tokens,
    )
    with options.counting_bar("serving", len(settings), quiet=quiet) as seen:
        return _each(
            settings,
            lambda setting: asyncio.run(_serve_and_measure(machine.named["model"], setting, sent, max_num_seqs)),
            kept,
            seen,
        )


def _each(
    settings: Sequence[Setting], measure: Callable[[Setting], Point], kept: Kept, seen: Callable[[int], None]
) -> list[Point]:
    """Measures what is not kept yet."""
    known = {point.setting: point for point in kept.points}
    for number, setting in enumerate(settings, 1):
        if setting not in known:
            point = known[setting] = measure(setting)
            kept.add(point)
        seen(number)
    return [known[setting] for setting in settings]


async def _serve_and_measure(model: str, setting: Setting, sent: Settings, max_num_seqs: int) -> Point:
    """Raises RunInvalid if the run does not show what it is meant to."""
    from legato.bench.client import Address, Client
    from legato.bench.dialect import Server, learn_dialect
    from legato.bench.interference import faults, figures, interfere
    from legato.bench.load import Prompts
    from legato.bench.spawned import Spawned
    from legato.errors import RunInvalid
    from legato.tune.sweep import Point

    clock, vocab = time.perf_counter, range(300, 20000)
    async with Spawned(model, {**setting.options, "max-num-seqs": max_num_seqs}, clock) as url:
        client = Client(Address.of(url), clock)
        await client.connect()
        dialect = await learn_dialect(client, None, vocab)
        prompts = Prompts(Random(), vocab, None if dialect.takes_ids else dialect.words)
        run = await interfere(Server(client, dialect), prompts, sent, clock)
    if reasons := faults(run):
        raise RunInvalid([f"with {setting}: {reason}" for reason in reasons])
    found = figures(run)
    if found.itl_beside is None or found.long_ttft_all is None:
        raise RunInvalid([f"with {setting}, no token came while a long prompt was read; raise --duration"])
    return Point(
        setting,
        found.itl_beside.p50_ms,
        found.itl_beside.p99_ms,
        found.itl_beside.max_ms,
        found.long_ttft_all.p50_ms,
        found.output_tokens_per_s,
        found.prompt_tokens_per_s,
    )


def _efficiency(machine: Machine, settings: Sequence[Setting], *, simulate: bool, quiet: bool) -> Efficiency:
    from legato.tune.efficiency import Efficiency, predicted, sizes

    rows = sizes(min(max(setting.tokens for setting in settings), machine.context - 1))
    if simulate:
        return predicted(machine.cost, rows)
    from legato.assemble import resolve_model, time_chunks
    from legato.config import EngineConfig

    config = EngineConfig(machine.named["model"])
    with options.loading_bar(quiet=quiet) as report:
        return Efficiency(time_chunks(config, resolve_model(config), rows, report))


def _told(load: Load) -> dict[str, Any]:
    return {
        "streams": load.streams,
        "prompt_tokens": list(load.prompt_tokens),
        "every_s": load.every_s,
        "duration_s": load.duration_s,
    }


def _document(
    machine: Machine, load: Load, points: Sequence[Point], advice: Advice, efficiency: Efficiency, *, simulate: bool
) -> dict[str, Any]:
    return {
        **machine.named,
        "simulated": simulate,
        "load": _told(load),
        "points": [point.to_dict() for point in points],
        "advice": {
            "knee": advice.knee.to_dict(),
            "rule": advice.rule,
            "options": advice.setting.options,
            "why": advice.why,
        },
        "efficiency": efficiency.to_dict(),
    }


def _write_config(out: Path, model: str, advice: Advice, max_num_seqs: int, *, simulate: bool) -> None:
    lines = [
        f"# Found by legato tune{' --simulate' if simulate else ''} on {time.strftime('%Y-%m-%d')}."
        " For: legato serve --config FILE",
        f"# {advice.why}.",
        f"model = {json.dumps(model or DEFAULT_MODEL)}",
        *(f"{name} = {value}" for name, value in advice.setting.options.items()),
        f"max-num-seqs = {max_num_seqs}",
    ]
    if simulate:
        lines[2] = f"# {lines[2]}"  # its name in the catalog is none that can be served
    try:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error


def _show(document: dict[str, Any], points: Sequence[Point], advice: Advice, efficiency: Efficiency, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from legato.tune.efficiency import SHARES

    console = Console(highlight=False, soft_wrap=True)
    lengths = " and ".join(f"{n:,}" for n in document["load"]["prompt_tokens"])
    load, kind = document["load"], " (simulated)" if document["simulated"] else ""
    sent = f"{load['streams']} streams, a prompt of {lengths} tokens every {load['every_s']:g} s{kind}"
    console.print(f"\n[bold cyan]{document['model']}[/] on {document['device']}: {sent}; gaps beside it, in ms\n")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("a step", "ITL p50", "p99", "worst", "TTFT", "tokens/s", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for point in points:
        marks = ["[red]◀ knee[/]"] * (point == advice.knee) + ["[green]◀ take it[/]"] * (point == advice.chosen)
        table.add_row(
            str(point.setting),
            *(f"{value:,.1f}" for value in (point.itl_p50_ms, point.itl_p99_ms, point.itl_max_ms)),
            f"{point.ttft_ms:,.0f}",
            f"{point.output_tokens_per_s:,.0f}",
            " ".join(marks),
        )
    console.print(table)
    kept = ((share, efficiency.least(share)) for share in SHARES)
    least = ", ".join(f"{100 * share:.0f} % from {rows:,} tokens" for share, rows in kept if rows is not None)
    console.print(f"\n  [dim]{'why':8}[/]{advice.why}")
    console.print(f"  [dim]{'rule':8}[/]{advice.rule}")
    console.print(f"  [dim]{'chunks':8}[/]of {efficiency.best:,.0f} tokens/s, a prompt gets {least} a chunk on")
    console.print(f"  [dim]{'config':8}[/]{out}: [bold]legato serve --config {out}[/]\n")
