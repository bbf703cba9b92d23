"""`legato explain`: why was this token late?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from legato.explain.attribute import Explanation, Gap
    from legato.explain.sentence import Teller

_SHOWN_IDS = 20


def explain(
    file: Annotated[Path, typer.Argument(help="What legato serve --trace FILE wrote, or is writing.", metavar="FILE")],
    request: Annotated[
        int | None, typer.Option("--request", help="Only this one, with every gap it had.", show_default="all")
    ] = None,
    budget_ms: Annotated[
        float | None,
        typer.Option(
            "--budget-ms",
            help="A gap longer than this is late.",
            min=0.001,
            show_default="what the server planned for, --itl-ms",
        ),
    ] = None,
    worst: Annotated[int, typer.Option("--worst", help="Gaps to show, the worst first.", min=1)] = 10,
    as_json: options.AsJson = False,
    chrome: Annotated[
        Path | None,
        typer.Option("--chrome", help="Write a trace for ui.perfetto.dev or chrome://tracing.", dir_okay=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with a timeline. Needs no network.", dir_okay=False)
    ] = None,
) -> None:
    """Why was this token late? Says of each gap over the budget where its time went.

    A gap lies between two tokens of a stream as the server hands them on. Its parts add up to it: one token for each
    stream (decodes), choosing tokens (sampling), chunks of others' prompts, preemption, planning, time between steps,
    the tokenizer, delivery, and noise, which is what a step took beyond what was foreseen.

    Examples:

    [bold]legato serve --trace steps.jsonl[/bold] · first; the file may be read while it is written

    [bold]legato explain steps.jsonl[/bold] · the causes, and the 10 worst gaps

    [bold]legato explain steps.jsonl --budget-ms 50 --worst 30[/bold] · what would be late at 50 ms

    [bold]legato explain steps.jsonl --request 9[/bold] · one request, from its arrival to its end

    [bold]legato explain steps.jsonl --html late.html --chrome late.json[/bold] · to look at, here and in Perfetto

    [bold]legato explain steps.jsonl --json | jq '.late[] | select(.cause == "noise")'[/bold] · for scripts
    """
    for out in (chrome, html):
        options.check_folder(out)
    from legato.explain.attribute import explain as attribute
    from legato.explain.read import read_trace
    from legato.explain.sentence import Teller

    trace = read_trace(file)
    if trace.notice:
        options.say(f"note: {trace.notice}")
    if not trace.steps:
        raise TraceError(f"{file} has no step yet: nothing was asked of the server since it was started")
    if request is not None and request not in trace.requests:
        raise TraceError(f"{file} has no request {request}; it has {_ids(sorted(trace.requests))}")
    found = attribute(trace, None if budget_ms is None else budget_ms / 1000)
    teller = Teller(found)
    if chrome is not None:
        from legato.explain.chrome import chrome_trace

        _write(chrome, lambda: json.dumps(chrome_trace(found), separators=(",", ":")))
    if html is not None:
        from legato.explain.page import draw_page

        _write(html, lambda: draw_page(found))
    if as_json:
        typer.echo(json.dumps(_document(found, teller, request)))
    elif request is None:
        _show(found, teller, worst)
    else:
        _show_request(found, teller, request, worst)
    for out in (chrome, html):
        if out is not None:
            options.say(f"wrote {out}")


def _ids(ids: list[int]) -> str:
    """`1 to 20`, or those that there are."""
    if len(ids) == ids[-1] - ids[0] + 1 and len(ids) > 2:
        return f"{ids[0]} to {ids[-1]}"
    shown = ", ".join(map(str, ids[:_SHOWN_IDS]))
    return f"{shown} … {ids[-1]}" if len(ids) > _SHOWN_IDS else shown


def _write(path: Path, text: Callable[[], str]) -> None:
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _document(found: Explanation, teller: Teller, request: int | None) -> dict[str, Any]:
    """Of one request all gaps, of all requests those that are late."""
    trace = found.trace
    gaps = found.late if request is None else [gap for gap in found.of(request) if gap.token > 1]
    firsts = [gap for request_id, gap in found.firsts.items() if request in (None, request_id)]
    return {
        "model": trace.header.model,
        "legato": trace.header.legato,
        "begun_unix_s": trace.header.unix_s,
        "budget_ms": None if found.budget_s is None else round(1000 * found.budget_s, 4),
        "foreseen": trace.header.cost is not None,
        "steps": len(trace.steps),
        "requests": len(trace.requests),
        "gaps": found.gaps,
        "causes": {
            cause: {"gaps": count, "over_ms": round(1000 * over_s, 3)}
            for cause, (count, over_s) in found.causes.items()
        },
        "deviation": found.deviation,
        "late": [teller.document(gap) for gap in gaps if gap.is_late],
        "first_tokens": [teller.document(gap) for gap in firsts],
        **({} if request is None else {"every_gap": [teller.document(gap) for gap in gaps]}),
    }


def _show(found: Explanation, teller: Teller, worst: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from legato.explain.parts import KINDS

    console = Console(highlight=False, soft_wrap=True)
    _head(console, found)
    if found.late:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("late by", "gaps", "ms over", ""):
            table.add_column(name, justify="right" if name in ("gaps", "ms over") else "left")
        for cause, (count, over_s) in found.causes.items():
            table.add_row(cause.replace("_", " "), f"{count:,}", f"{1000 * over_s:,.0f}", f"[dim]{KINDS[cause]}[/]")
        console.print(table)
        console.print()
    gaps = found.worst(worst)
    if gaps:
        which = "worst" if found.late else "longest"
        console.print(f"[bold]The {which}[/]" if len(gaps) == 1 else f"[bold]The {len(gaps)} {which}[/]")
    for gap, others in gaps:
        _show_gap(console, found, teller, gap, others=others)
    console.print()


def _show_request(found: Explanation, teller: Teller, request: int, worst: int) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    trace = found.trace
    _head(console, found)
    asked, end = trace.requests[request], trace.ends.get(request)
    said = "still open" if end is None else f"ended with {end.reason} after {end.end_s - asked.asked_s:.2f} s"
    tokens = asked.generated + len(found.tokens.get(request, ()))
    console.print(f"[bold]Request {request}[/]: prompt of {asked.prompt_tokens:,} tokens, {tokens:,} generated, {said}")
    gaps = found.of(request)
    if not gaps:
        console.print("  no token of it is in the trace")
    first = [gap for gap in gaps if gap.token == 1]
    others = sorted((gap for gap in gaps if gap.token > 1), key=lambda gap: -gap.seconds)
    late = sum(gap.is_late for gap in others)
    for gap in first:
        _show_gap(console, found, teller, gap, names_request=False)
    if others:
        console.print(
            f"\n[bold]Its {min(worst, len(others))} longest gaps[/] of {len(others):,}, {late:,} of them late"
        )
    for gap in others[:worst]:
        _show_gap(console, found, teller, gap, names_request=False)
    console.print()


def _head(console: Any, found: Explanation) -> None:
    trace, steps = found.trace, found.trace.steps
    tokens = sum(map(len, found.tokens.values()))
    seconds = steps[-1].ended_s - steps[0].started_s
    console.print(
        f"\n[bold]{trace.header.model}[/] · {seconds:,.1f} s, {len(steps):,} steps, {len(trace.requests):,} requests,"
        f" {tokens:,} tokens" + (" · older steps made room" if trace.is_cut else "")
    )
    if found.budget_s is None:
        console.print("The server planned for no gap, so none is late; --budget-ms says what would be.")
    else:
        late, gaps = len(found.late), found.gaps
        said = f"{late:,} of {gaps:,} are longer ({late / gaps:.2%})" if late else f"none of {gaps:,} is longer"
        console.print(f"A gap may be {1000 * found.budget_s:,.0f} ms: {said}.")
    if trace.header.cost is None:
        console.print(
            "[dim]Its steps were not foreseen (no --itl-ms): their time is shared out by rows, noise included.[/]"
        )
    console.print()


def _show_gap(
    console: Any, found: Explanation, teller: Teller, gap: Gap, *, names_request: bool = True, others: int = 0
) -> None:
    at_s = gap.ends_s - teller.begin_s
    beside = f" [dim](so for {others:,} more)[/]" if others else ""
    console.print(f"  [dim]{at_s:8.2f} s[/]  {teller.sentence(gap, names_request=names_request)}{beside}")
    parts = sorted(gap.parts.seconds.items(), key=lambda part: -abs(part[1]))
    told = [f"{kind.replace('_', ' ')} {1000 * seconds:,.1f}" for kind, seconds in parts if abs(seconds) >= 5e-5]
    console.print(f"              [dim]{' · '.join(told)}[/]")
