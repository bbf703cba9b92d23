"""`legato bench`: any OpenAI server, ours or not, measured from outside."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.cli.measured import capacity_rows, interference_rows, picture_of, probe_line
from legato.cli.simulated import show_rows
from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.bench.capacity import Plan
    from legato.bench.client import Client
    from legato.bench.dialect import Dialect
    from legato.bench.interference import Settings
    from legato.bench.load import Prompts
    from legato.bench.machine import Meter
    from legato.bench.plot import Picture

clock = time.perf_counter

Url = Annotated[str, typer.Option(help="The server; any that speaks OpenAI's API.")]
Model = Annotated[str | None, typer.Option(help="The model's name there.", show_default="the first it lists")]
Vocab = Annotated[str, typer.Option(help="Token ids that long prompts are drawn from, LOW:HIGH.", metavar="LOW:HIGH")]
ApiKey = Annotated[str, typer.Option(help="Sent as a bearer token.", show_default="none")]

app = typer.Typer(
    help="Measure a server from outside: do streams stall, and how much load does it carry?",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command()
def interference(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    streams: Annotated[int, typer.Option(help="Clients that read all the time.", min=1)] = 16,
    prompt_tokens: Annotated[
        str, typer.Option(help="Length of the long prompts; several lengths, as in 4000,8000, take turns.")
    ] = "4000",
    every: Annotated[float, typer.Option(help="A long prompt comes every so many seconds.", min=0.01)] = 10,
    duration: Annotated[float, typer.Option(help="Seconds that are measured.", min=0.1)] = 60,
    budget_ms: Annotated[float, typer.Option(help="A gap longer than this is a stall.", min=0.1)] = 100,
    warmup: Annotated[float, typer.Option(help="Seconds of streaming before that.", min=0)] = 5,
    stream_tokens: Annotated[
        int, typer.Option(help="Tokens of a stream's answer, after which it asks anew.", min=2)
    ] = 512,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes the prompts repeatable. Given twice, the second run may find them in a prefix cache.",
            show_default="random",
        ),
    ] = None,
    vocab: Vocab = "300:20000",
    api_key: ApiKey = "",
    as_json: options.AsJson = False,
    svg: Annotated[Path | None, typer.Option(help="Draw every token into this file.", dir_okay=False)] = None,
    html: Annotated[Path | None, typer.Option(help="The same with a table, as a page.", dir_okay=False)] = None,
    data: Annotated[Path | None, typer.Option(help="Keep what is drawn, as JSON.", dir_okay=False)] = None,
) -> None:
    """Do streams stall while somebody else's long prompt is read?

    Streams decode all the time; a long prompt comes every few seconds, whatever became of the one before.

    Status 1, and no figures, if the run does not show that: see what it says.

    Examples:

    [bold]legato bench interference[/bold] · the server on this machine, a minute and some

    [bold]legato bench interference --streams 4 --prompt-tokens 2000,8000 --svg stalls.svg[/bold] · two lengths, drawn

    [bold]legato bench interference --url http://gpu:8000 --json | tail -n 1 | jq .figures.itl_ms[/bold] · for scripts
    """
    from legato.bench.interference import Settings
    from legato.bench.load import parse_tokens, parse_vocab

    settings = Settings(
        streams=streams,
        prompt_tokens=parse_tokens(prompt_tokens, "--prompt-tokens"),
        every_s=every,
        duration_s=duration,
        budget_ms=budget_ms,
        warmup_s=warmup,
        stream_tokens=stream_tokens,
    )
    seed = Random().randrange(2**31) if seed is None else seed
    target = Target(url, model, parse_vocab(vocab), api_key)
    for path in (svg, html, data):
        options.check_folder(path)
    measure(_interference(settings, target, seed, _Files(svg, html, data), as_json=as_json))


@app.command()
def capacity(
    ttft_ms: Annotated[float, typer.Option(help="What p99 of the time to first token may be.", min=1)],
    itl_ms: Annotated[float, typer.Option(help="What p99 of the gaps between tokens may be.", min=1)],
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Length of prompts: fixed, or lognormal as mean:sigma.", metavar="LENGTH")
    ] = "512:0.8",
    output_tokens: Annotated[
        str, typer.Option(help="Length of answers, in the same way.", metavar="LENGTH")
    ] = "64:0.6",
    duration: Annotated[float, typer.Option(help="Seconds at each rate.", min=0.1)] = 30,
    max_rate: Annotated[float, typer.Option(help="Requests a second, at most.", min=0.01)] = 64,
    seed: Annotated[int, typer.Option(help="Another seed sends other arrivals and lengths.")] = 0,
    vocab: Vocab = "300:20000",
    api_key: ApiKey = "",
    as_json: options.AsJson = False,
) -> None:
    """The highest request rate at which both limits hold.

    Requests arrive at random (Poisson), whatever became of the ones before; at one rate the same for every server.

    The rate is doubled until a limit is missed, then narrowed to 8 %: about eight rates.

    Examples:

    [bold]legato bench capacity --ttft-ms 2000 --itl-ms 100[/bold] · chats of many lengths, about five minutes

    [bold]legato bench capacity --ttft-ms 5000 --itl-ms 80 --prompt-tokens 4000 --output-tokens 100[/bold] · one shape
    """
    from legato.bench.capacity import MIN_REQUESTS, Limits, Plan
    from legato.bench.load import parse_vocab
    from legato.workload.lengths import Lengths

    if max_rate * duration < MIN_REQUESTS:
        raise ConfigError(
            f"--max-rate {max_rate:g} for --duration {duration:g} s makes {max_rate * duration:.1f} requests, and"
            f" {MIN_REQUESTS} are needed; raise one of them"
        )
    plan = Plan(
        Limits(ttft_ms, itl_ms),
        Lengths.of(prompt_tokens, "--prompt-tokens"),
        Lengths.of(output_tokens, "--output-tokens"),
        duration_s=duration,
        max_rate=max_rate,
        seed=seed,
    )
    measure(_capacity(plan, Target(url, model, parse_vocab(vocab), api_key), as_json=as_json))


def measure(work: Coroutine[Any, Any, None]) -> None:
    """Runs it without long collections: walking through our modules would take a core from a server that is here."""
    gc.collect()
    gc.freeze()
    asyncio.run(work)


@dataclass(frozen=True, slots=True)
class Target:
    """The server to measure."""

    url: str
    model: str | None
    vocab: range
    api_key: str

    async def meet(self, random: Random) -> tuple[Client, Dialect, Prompts]:
        """Connects and finds out what the server takes. Raises ServerUnreachable."""
        from legato.bench.client import Address, Client
        from legato.bench.dialect import learn_dialect
        from legato.bench.load import Prompts

        client = Client(Address.of(self.url), clock, api_key=self.api_key)
        await client.connect()
        dialect = await learn_dialect(client, self.model, self.vocab)
        return client, dialect, Prompts(random, self.vocab, None if dialect.takes_ids else dialect.words)


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the picture is drawn, in which form."""

    svg: Path | None
    html: Path | None
    data: Path | None

    def draw(self, picture: Picture, rows: list[tuple[str, str]], note: str) -> None:
        from legato.bench.plot import draw_html, draw_svg

        if self.svg is not None:
            self.svg.write_text(draw_svg(picture), encoding="utf-8")
        if self.html is not None:
            self.html.write_text(draw_html(picture, rows, note), encoding="utf-8")
        if self.data is not None:
            self.data.write_text(json.dumps(picture.to_dict()) + "\n", encoding="utf-8")


async def _interference(settings: Settings, target: Target, seed: int, files: _Files, *, as_json: bool) -> None:
    """Runs, judges, reports. Raises RunInvalid, after the JSON is out."""
    from legato.bench.dialect import Server
    from legato.bench.interference import faults, figures, interfere
    from legato.bench.machine import Meter
    from legato.errors import RunInvalid

    client, dialect, prompts = await target.meet(Random(seed))
    meter, found, reasons = Meter(clock), None, []
    seconds = settings.warmup_s + settings.duration_s
    try:
        with _waiting(f"{settings.streams} streams, and a long prompt now and then: {seconds:g} s and some"):
            async with meter:
                run = await interfere(Server(client, dialect), prompts, settings, clock)
        reasons = [*faults(run), *meter.faults(settings.budget_ms)]
    except RunInvalid as invalid:
        reasons = list(invalid.reasons)
    if not reasons:
        found = figures(run)
        rows = interference_rows(found, settings, meter)
        note = f"{dialect.model} at {client.address} · {_date()} · {_measured_by()} · seed {seed}"
        files.draw(picture_of(run, found, dialect), rows, note)
        if not as_json:
            show_rows(f"[bold cyan]{dialect.model}[/] at {client.address} · {settings.duration_s:g} s measured", rows)
    if as_json:
        document = _document("interference", client, dialect, meter, {**dataclasses.asdict(settings), "seed": seed})
        outcome = {"valid": not reasons, "reasons": reasons, "figures": None if found is None else found.to_dict()}
        typer.echo(json.dumps({**document, **outcome}))
    if reasons:
        raise RunInvalid(reasons)


async def _capacity(plan: Plan, target: Target, *, as_json: bool) -> None:
    """Probes, tells each, reports. Raises NoCapacity or RunInvalid, after the JSON is out."""
    from legato.bench.capacity import best_of, find_capacity
    from legato.bench.dialect import Server
    from legato.bench.machine import Meter, allow_many_connections
    from legato.errors import RunInvalid

    allow_many_connections()
    # Arrivals and lengths come from the seed; what prompts say never does, or a prefix cache would know it next time.
    client, dialect, prompts = await target.meet(Random())
    meter, probes = Meter(clock), []
    async with meter:
        async for probe in find_capacity(Server(client, dialect), prompts, plan, clock):
            probes.append(probe)
            typer.echo(probe_line(probe))
    reasons = meter.faults(plan.limits.itl_ms)
    if as_json:
        best = None if reasons else max((p for p in probes if p.meets), key=lambda p: p.rate, default=None)
        outcome = {
            "valid": not reasons,
            "reasons": reasons,
            "requests_per_s": None if best is None else round(best.rate, 4),
            "at_capacity": None if best is None else best.to_dict(),
            "probes": [probe.to_dict() for probe in probes],
        }
        typer.echo(json.dumps({**_document("capacity", client, dialect, meter, plan.to_dict()), **outcome}))
    if reasons:
        raise RunInvalid(reasons)
    best = best_of(probes)
    if not as_json:
        show_rows(
            f"[bold cyan]{dialect.model}[/] at {client.address} · {len(probes)} rates",
            capacity_rows(best, plan, meter),
        )


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A line on stderr meanwhile, gone afterwards. Nothing if that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        console.print(f"[dim]{what} …[/]", end="\r")
    try:
        yield
    finally:
        if console.is_terminal:
            console.print(" " * (len(what) + 2), end="\r")


def _document(verb: str, client: Client, dialect: Dialect, meter: Meter, settings: dict[str, Any]) -> dict[str, Any]:
    """What both documents begin with."""
    import legato

    return {
        "bench": verb,
        "legato": legato.__version__,
        "server": {"url": str(client.address), **dataclasses.asdict(dialect)},
        "machine": meter.to_dict(is_local=client.address.is_local),
        "settings": settings,
    }


def _date() -> str:
    return time.strftime("%Y-%m-%d")


def _measured_by() -> str:
    import legato

    return f"legato bench {legato.__version__}"
