"""`legato plan`: a prompt in chunks, as arithmetic that anyone can check."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.cli.machine import IDEAL, NOT_IDEAL, THIS, find_machine
from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.sim.prompt import PromptPlan, PromptStep

_SHOWN = 20  # steps in the table, before the middle ones are left out
_IDEAL = "Idealised devices"


def plan(
    command: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Of the list; with --device this, what legato serve takes.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="Of the list, or 'this': what steps take here, measured.")] = "h100",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8000,
    chunk: Annotated[int | None, typer.Option(help="Of which a step computes so many.", show_default="512")] = None,
    itl_ms: Annotated[
        float | None, typer.Option("--itl-ms", help="Instead: as many as keep this gap between tokens.", min=0.01)
    ] = None,
    decodes: Annotated[int, typer.Option(help="Streams that go on meanwhile.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens that each of them has behind it.")] = 1024,
    weight_bits: Annotated[float, typer.Option(help="Of a weight.", rich_help_panel=_IDEAL)] = 16,
    kv_bits: Annotated[float, typer.Option(help="Of a number in the KV cache.", rich_help_panel=_IDEAL)] = 16,
    fixed_ms: Annotated[
        float, typer.Option(help="What a step costs whatever is in it.", rich_help_panel=_IDEAL, min=0)
    ] = 0.0,
    devices: Annotated[int, typer.Option(help="So many share the model.", rich_help_panel=_IDEAL)] = 1,
    mask: Annotated[bool, typer.Option("--mask", help="Draw which keys each query reads, and nothing else.")] = False,
    svg: Annotated[Path | None, typer.Option(help="With --mask: draw it into this file too.", dir_okay=False)] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Devices and models, and where their numbers are from.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """What chunks of a prompt cost its streams, before the hardware is bought.

    A step takes the longer of reading all weights and multiplying by them, and what attention adds: idealised, from
    data sheets, so that real devices are slower. The chunks are those that the scheduler of legato serve makes.

    Examples:

    [bold]legato plan --model llama-3.1-8b --device h100 --prompt 8000 --chunk 512 --decodes 32[/bold]

    [bold]legato plan --model llama-3.1-8b --device h100 --itl-ms 15[/bold] · chunks that keep a gap

    [bold]legato plan --device this --prompt 4000 --itl-ms 100 --decodes 8[/bold] · this machine, measured

    [bold]legato plan --mask --prompt 18 --chunk 6 --svg mask.svg[/bold]
    """
    if list_all:
        _list(as_json=as_json)
        return
    if mask:
        _mask(prompt, 512 if chunk is None else chunk, svg)
        return
    if svg is not None:
        raise ConfigError("--svg draws the mask: give --mask with it")
    if chunk is not None and itl_ms is not None:
        raise ConfigError("--chunk and --itl-ms both bound a step; give one of them")
    from legato.sim.prompt import plan_prompt

    if device.lower() == THIS:
        options.refuse_given(command, IDEAL, NOT_IDEAL)
    machine = find_machine(
        device, model, weight_bits=weight_bits, kv_bits=kv_bits, fixed_ms=fixed_ms, devices=devices, quiet=as_json
    )
    machine.require_room(prompt + 1 + decodes * (context + 1), longest=max(prompt + 1, context + 1))
    named, cost, parts = machine.named, machine.cost, machine.parts
    chunk = 512 if chunk is None and itl_ms is None else chunk
    sizes: dict[str, Any] = {"prompt": prompt, "decodes": decodes, "context": context}
    found = plan_prompt(cost, parts, **sizes, chunk=chunk, itl_s=None if itl_ms is None else itl_ms / 1000)
    whole = plan_prompt(cost, parts, **sizes)
    if as_json:
        asked = {**named, **sizes, "chunk": chunk, "itl_ms": itl_ms}
        typer.echo(json.dumps({**asked, **_figures(found, whole), "steps": [_row(step) for step in found.steps]}))
        return
    _show(named, sizes, found, whole)


def _figures(found: PromptPlan, whole: PromptPlan) -> dict[str, float | int]:
    return {
        "chunks": len(found.steps),
        "decode_ms": _ms(found.decode.seconds),
        "worst_gap_ms": _ms(found.worst_gap_s),
        "ttft_ms": _ms(found.ttft_s),
        "whole_gap_ms": _ms(whole.worst_gap_s),
        "whole_ttft_ms": _ms(whole.ttft_s),
        "prefill_slowdown": round(found.slowdown(whole), 3),
    }


def _row(step: PromptStep) -> dict[str, float | int]:
    times = {name.removesuffix("_s") + "_ms": _ms(value) for name, value in dataclasses.asdict(step.parts).items()}
    return {"start": step.start, "rows": step.rows, "decodes": step.decodes, **times, "ms": _ms(step.parts.seconds)}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def _show(named: dict[str, str], sizes: dict[str, Any], found: PromptPlan, whole: PromptPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"\n[bold]{named['model']}[/bold] on {named['device']}: {_sum_of(found)}\n", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("step", "from", "rows", "decodes", "weights", "arithmetic", "attention", "KV", "fixed", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    steps = list(enumerate(found.steps, 1))
    middle = len(steps) > _SHOWN
    for number, step in steps[: _SHOWN // 2] if middle else steps:
        table.add_row(*_cells(number, step))
    if middle:
        table.add_row("…", *[""] * 9)
        for number, step in steps[-_SHOWN // 2 :]:
            table.add_row(*_cells(number, step))
    console.print(table)
    figures, streams = _figures(found, whole), sizes["decodes"]
    console.print()
    if streams:
        console.print(
            f"  gap     {figures['decode_ms']:.1f} ms between tokens of {streams} streams,"
            f" {figures['worst_gap_ms']:.1f} beside the prompt; in one pass {figures['whole_gap_ms']:,.1f}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"  prompt  first token after {figures['ttft_ms']:,.1f} ms; in one pass {figures['whole_ttft_ms']:,.1f}:"
        f" {figures['prefill_slowdown']:.2f} times as long\n",
        highlight=False,
        soft_wrap=True,
    )


def _cells(number: int, step: PromptStep) -> list[str]:
    parts = step.parts
    longer = parts.arithmetic_s > parts.weights_s
    weights, arithmetic = (f"{1e3 * value:.2f}" for value in (parts.weights_s, parts.arithmetic_s))
    return [
        str(number),
        f"{step.start:,}",
        f"{step.rows:,}",
        str(step.decodes),
        f"[dim]{weights}[/dim]" if longer else weights,
        arithmetic if longer else f"[dim]{arithmetic}[/dim]",
        *(f"{1e3 * value:.2f}" for value in (parts.attention_s, parts.kv_s, parts.fixed_s)),
        f"[bold]{1e3 * parts.seconds:.2f}[/bold]",
    ]


def _sum_of(found: PromptPlan) -> str:
    """`16 chunks = 15 × 512 + 320`."""
    sizes: list[list[int]] = []
    for step in found.steps:
        if sizes and sizes[-1][1] == step.rows:
            sizes[-1][0] += 1
        else:
            sizes.append([1, step.rows])
    if len(sizes) > 6:
        rows = [step.rows for step in found.steps]
        return f"{len(rows)} chunks of {min(rows):,} to {max(rows):,}"
    words = " + ".join(f"{count} × {rows:,}" if count > 1 else f"{rows:,}" for count, rows in sizes)
    return "one step" if len(found.steps) == 1 else f"{len(found.steps)} chunks = {words}"


def _mask(prompt: int, chunk: int, svg: Path | None) -> None:
    from legato.sim.mask import mask_svg, mask_text

    if svg is not None:
        try:
            svg.write_text(mask_svg(prompt, chunk), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{svg} cannot be written: {error.strerror}") from error
    typer.echo(mask_text(prompt, chunk))


def _list(*, as_json: bool) -> None:
    from legato.sim import catalog

    known: dict[str, dict[str, Any]] = {"devices": dict(catalog.devices()), "models": dict(catalog.models())}
    if as_json:
        typer.echo(json.dumps({kind: {k: dataclasses.asdict(v) for k, v in of.items()} for kind, of in known.items()}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for kind, of in known.items():
        table = Table(title=kind, box=None, pad_edge=False, header_style="bold", title_justify="left")
        for head in ("key", "name", "source"):
            table.add_column(head, style="dim" if head == "source" else None)
        for key, entry in of.items():
            table.add_row(key, entry.name, entry.source)
        console.print(table, "")
