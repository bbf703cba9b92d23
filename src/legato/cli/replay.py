"""`legato replay`: recorded arrivals, sent once more."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli import options
from legato.cli.bench import ApiKey, Model, Target, Url, Vocab, clock, measure
from legato.cli.simulated import rows_of_times, show_rows
from legato.cli.traffic import arrivals_from
from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.workload.arrivals import Arrival


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            help="What legato serve --trace wrote; or Mooncake, Azure LLM, BurstGPT, JSON lines.",
            exists=True,
            dir_okay=False,
        ),
    ],
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    speed: Annotated[float, typer.Option(help="So many times as fast as recorded.", min=1e-3)] = 1.0,
    requests: Annotated[int | None, typer.Option(help="The first so many.", show_default="all", min=1)] = None,
    duration: Annotated[
        float | None, typer.Option(help="Those of so many seconds.", show_default="all", min=0.001)
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for answers after the last was sent.", min=0)] = 120,
    vocab: Vocab = "300:20000",
    api_key: ApiKey = "",
    as_json: options.AsJson = False,
) -> None:
    """Send recorded arrivals to a server, each at its time, whatever became of the ones before.

    Prompts have the recorded lengths and share what they shared; what they say is random, since traces keep no text.

    Ctrl-C ends it, and shows what was seen until then.

    Examples:

    [bold]legato replay steps.jsonl[/bold] · what legato serve --trace steps.jsonl saw

    [bold]legato replay azure.csv --speed 0.1 --requests 200 --url http://gpu:8000[/bold] · a tenth as fast

    [bold]legato simulate --trace steps.jsonl --device this[/bold] · the same on a virtual clock
    """
    from legato.bench.load import parse_vocab

    arrivals = bounded_list(arrivals_from(file, speed), requests, duration)
    target = Target(url, model, parse_vocab(vocab), api_key)
    measure(_replay(arrivals, target, patience, str(file), as_json=as_json))


def bounded_list(arrivals: Iterable[Arrival], requests: int | None, duration: float | None) -> list[Arrival]:
    """The first `requests`, or those that come within `duration` seconds. Raises ConfigError if there are none."""
    within = iter(arrivals)
    if duration is not None:
        within = itertools.takewhile(lambda arrival: arrival.at_s < duration, within)
    found = list(itertools.islice(within, requests))
    if not found:
        raise ConfigError("the trace has no request that could be sent")
    return found


async def _replay(arrivals: Sequence[Arrival], target: Target, patience: float, name: str, *, as_json: bool) -> None:
    from legato.bench.dialect import Server
    from legato.bench.machine import allow_many_connections
    from legato.bench.replay import figures
    from legato.bench.replay import replay as send

    allow_many_connections()
    client, dialect, prompts = await target.meet(Random())
    with options.counting_bar("sending", len(arrivals), quiet=as_json) as seen:
        task = asyncio.ensure_future(
            send(Server(client, dialect), prompts, arrivals, clock, patience_s=patience, seen=seen)
        )
        with options.on_interrupt(task.cancel):
            run = await task
    found = {"replay": name, "model": dialect.model, "url": str(client.address), **figures(run)}
    if as_json:
        typer.echo(json.dumps(found))
        return
    requests = found["requests"]
    failed = f" · [yellow]{requests['failed']:,} failed[/]" if requests["failed"] else ""
    left = f" · {requests['unfinished']:,} unfinished" if requests["unfinished"] else ""
    show_rows(
        f"[bold cyan]{dialect.model}[/] at {client.address} · {name}",
        [
            ("requests", f"{requests['completed']:,} of {len(arrivals):,} in {found['seconds']:,.1f} s{failed}{left}"),
            *rows_of_times(found),
            ("output", f"{found['output_tokens_per_s']:,.0f} tokens/s"),
        ],
    )
