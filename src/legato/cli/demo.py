"""`legato demo`: a minute in which one sees what chunks of a prompt are for."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.config import AUTO_ITL, DEFAULT_MODEL
from legato.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from legato.demo.document import Demo
    from legato.demo.run import Run, Setup
    from legato.llm import LLM

_clock = time.perf_counter

PAGE = Path("legato-demo.html")
_STREAMS, _STEP_TOKENS = 4, 512
# A prompt of no given length takes so many seconds in one pass, and in all three runs; or fills a step of so many
# tokens, with which scratch memory grows.
_ONE_PASS_S, _ALL_S, _MOST_TOKENS = 4.0, 30.0, 8192
_SEQUENCES = 64  # as `legato serve` has it: the gap that the engine chooses depends on it

_RUN = "What is run"


def demo(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A GGUF file, a safetensors folder, a hub id (org/name) or an alias: legato pull --list",
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(
            "--itl-ms",
            help="The gap between tokens that the third run keeps, in milliseconds.",
            show_default="what legato serve chooses on this machine",
            min=1,
            rich_help_panel=_RUN,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the long prompt.",
            show_default="what takes 4 s in one pass here",
            min=1,
            rich_help_panel=_RUN,
        ),
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(
            help="Streams that decode meanwhile.", show_default=str(_STREAMS), min=1, max=32, rich_help_panel=_RUN
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            help="Tokens of a step in the second run, and at most in the third.",
            show_default="512, or a quarter of a short prompt",
            min=2,
            rich_help_panel=_RUN,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="The picture and the table as a page.",
            show_default=f"{PAGE}; none with --json or --from",
            dir_okay=False,
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="The picture alone.", dir_okay=False)] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Measure nothing: show what --json printed.", exists=True, dir_okay=False),
    ] = None,
    as_json: options.AsJson = False,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw nothing in the terminal.")] = False,
) -> None:
    """See a stream stall, and not: one minute, this machine.

    Streams decode, and a long prompt comes. It is read three times: in one step, as without chunked prefill; in steps
    of a fixed number of tokens; in steps that keep a gap in milliseconds.

    Ctrl-C ends it and shows what was measured until then.

    Examples:

    [bold]legato demo[/bold] · the default model; leaves legato-demo.html

    [bold]legato demo gemma3-270m --itl-ms 250 --prompt-tokens 2000[/bold]

    [bold]legato demo --json > demo.json[/bold] · every stamp

    [bold]legato demo --from demo.json --svg demo.svg[/bold] · the picture of it
    """
    from legato.demo.page import draw_html
    from legato.demo.picture import draw_svg
    from legato.demo.terminal import can_draw

    asked = {
        "--itl-ms": itl_ms,
        "--prompt-tokens": prompt_tokens,
        "--streams": streams,
        "--max-num-batched-tokens": max_num_batched_tokens,
    }
    if html is None and not as_json and source is None:
        html = PAGE
    for path in (html, svg):
        _check_writable(path)
    draws = not as_json and not no_plot and can_draw(_console())
    if source is not None:
        given = [*(["MODEL"] if model is not None else []), *(name for name, value in asked.items() if value)]
        if given:
            raise ConfigError(f"--from shows what was measured, and {given[0]} is for measuring; leave it out")
        found = _read(source)
        if draws:
            _print_picture(found)
    else:
        found = _measure(model or DEFAULT_MODEL, asked, _command(model, asked), draws=draws, quiet=as_json)
    if svg is not None:
        svg.write_text(draw_svg(found), encoding="utf-8")
    if html is not None:
        html.write_text(draw_html(found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        _print_table(found)
        for path in (html, svg):
            if path is not None:
                typer.echo(f"The picture is in {path}")
    if source is None and not found.is_complete:
        raise typer.Exit(130)


def _measure(model: str, asked: dict[str, Any], command: str, *, draws: bool, quiet: bool) -> Demo:
    """What came of the three runs, or of those before an interrupt."""
    import legato
    from legato.bench.machine import cpu_name, cpu_times, steal_between
    from legato.demo.document import Demo
    from legato.demo.run import record
    from legato.llm import LLM

    streams, step_tokens = asked["--streams"] or _STREAMS, asked["--max-num-batched-tokens"] or _STEP_TOKENS
    prompt_tokens = asked["--prompt-tokens"]
    with options.loading_bar(quiet=quiet) as report:
        llm = LLM(
            model,
            itl_ms=asked["--itl-ms"] or AUTO_ITL,
            # As many whatever is asked for: steps are timed once for each size of the largest.
            max_num_batched_tokens=max(_MOST_TOKENS, (prompt_tokens or 0) + streams, step_tokens),
            max_num_seqs=_SEQUENCES,
            enable_prefix_caching=False,
            on_load=report,
        )
    runs: list[Run] = []
    with contextlib.closing(llm):
        setup = _setup(llm, streams, prompt_tokens, asked["--max-num-batched-tokens"])
        # A measurement of seconds is none of a collection of what the libraries left.
        gc.collect()
        gc.freeze()
        before = cpu_times()
        try:
            with _watching(_title(options.short_name(model), setup), setup, runs, llm, draws, quiet) as watch:
                record(llm.engine, setup, llm.text.vocab, _clock, Random(), watch, into=runs)
        except KeyboardInterrupt:
            if not any(run.now_s for run in runs):
                raise
        steal_share = steal_between(before, cpu_times())
    return Demo(
        model=options.short_name(model),
        machine=cpu_name(),
        cores=llm.info.threads or os.cpu_count() or 1,
        steal_share=None if steal_share is None else round(steal_share, 4),
        date=time.strftime("%Y-%m-%d"),
        legato=legato.__version__,
        command=command,
        setup=setup,
        runs=tuple(runs),
    )


def _setup(llm: LLM, streams: int, prompt_tokens: int | None, step_tokens: int | None) -> Setup:
    """With what was not asked for chosen by what steps take here."""
    from legato.demo.run import STREAM_TOKENS, Setup, fitting_setup

    pacer = llm.engine.pacer
    assert pacer is not None
    itl_ms = 1000 * pacer.itl_s
    if prompt_tokens is not None:
        step_tokens = step_tokens or min(_STEP_TOKENS, max(prompt_tokens // 4, streams + 1))
        return Setup(streams, prompt_tokens, step_tokens, itl_ms)
    info = llm.info
    room = min(info.max_model_len, info.kv_tokens - streams * STREAM_TOKENS) - info.block_tokens
    setup = Setup(streams, 1, step_tokens or _STEP_TOKENS, itl_ms)
    return fitting_setup(
        setup,
        pacer.tracker.cost,
        most_tokens=max(min(info.max_num_batched_tokens - streams, room), 1),
        one_pass_s=_ONE_PASS_S,
        all_s=_ALL_S,
        keeps_step=step_tokens is not None,
    )


@contextlib.contextmanager
def _watching(
    title: str, setup: Setup, runs: list[Run], llm: LLM, draws: bool, quiet: bool
) -> Iterator[Callable[[Run], None]]:
    """What is called after each step: draws, or names each run as it begins, on stderr, or nothing."""
    from legato.demo.figures import name_of
    from legato.demo.run import METHODS, seconds_of
    from legato.demo.scale import Scale
    from legato.demo.terminal import Screen

    if draws:
        assert llm.engine.pacer is not None
        cost = llm.engine.pacer.tracker.cost
        expected_s = [seconds_of(method, setup, cost) for method in METHODS]
        usual_ms = 1e3 * cost.rows.at(setup.streams)
        scale = Scale.of([usual_ms, 1e3 * expected_s[0]], setup.itl_ms)
        span_s = 1.1 * max(expected_s) + setup.lead_s + setup.tail_s
        with Screen(_console(), title, setup, runs, scale, span_s, _clock) as screen:
            yield screen.watch
        return
    named: list[Run] = []

    def name(run: Run) -> None:
        if run not in named[-1:]:
            named.append(run)
            options.say("{}: {} …".format(*name_of(run, setup)))

    yield (lambda run: None) if quiet else name


def _title(name: str, setup: Setup) -> str:
    streams = "a stream" if setup.streams == 1 else f"{setup.streams} streams"
    return f"{name}: {streams}, and a prompt of {setup.prompt_tokens:,} tokens"


def _print_picture(found: Demo) -> None:
    from legato.demo.scale import scale_of
    from legato.demo.terminal import Canvas, draw_text

    console, setup = _console(), found.setup
    span_s = max((run.now_s for run in found.runs), default=0.0) or 1.0
    canvas = Canvas(console.width, console.height, span_s, scale_of(found.runs, setup.itl_ms))
    console.print(draw_text(_title(found.model, setup), setup, found.runs, canvas))


def _print_table(found: Demo) -> None:
    from rich.table import Table

    from legato.demo.figures import sum_up
    from legato.demo.table import COLUMNS, rows_of

    console = _console()
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, means, cells in rows_of(found):
        table.add_row(name if console.width < 104 else f"{name} [dim]{means}[/dim]", *cells)
    console.print()
    console.print(table)
    console.print(f"\n{sum_up(found.setup, found.runs)}", highlight=False)
    for remark in found.remarks:
        console.print(remark, highlight=False)


def _console() -> Console:
    from rich.console import Console

    return Console()


def _read(path: Path) -> Demo:
    from legato.demo.document import Demo

    try:
        return Demo.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not what legato demo --json prints: {error}") from error


def _command(model: str | None, asked: dict[str, Any]) -> str:
    """What to type to measure the same."""
    given = [word for name, value in asked.items() if value is not None for word in (name, f"{value:g}")]
    return shlex.join(["legato", "demo", *([] if model is None else [model]), *given])


def _check_writable(path: Path | None) -> None:
    """Before a minute is spent on it."""
    if path is not None and not (os.access(path, os.W_OK) if path.exists() else os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path} cannot be written; name another file (--html, --svg)")
