"""`legato certify`: is chunked the same as one-shot, for this model, on this machine, with these settings?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from legato.cli import options
from legato.config import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    from legato.certify.campaign import Campaign
    from legato.certify.replay import Replay
    from legato.certify.report import Report
    from legato.certify.rig import NativeRig
    from legato.certify.totals import Totals

# Prompts longer than the usual sliding window (512), so that a window is left behind within one.
PROMPT_TOKENS, ANSWER_TOKENS, MAX_SEQS = 640, 8, 8
DEFAULT_TRIALS = 100
_ENGINE = "Engine: what is certified"

Model = Annotated[
    str | None,
    typer.Argument(
        help="A GGUF file, a safetensors folder, a hub id (org/name) or an alias: legato pull --list",
        show_default=DEFAULT_MODEL,
    ),
]
Trials = Annotated[int | None, typer.Option(help="Schedules to try.", show_default=str(DEFAULT_TRIALS), min=1)]
Seconds = Annotated[float | None, typer.Option(help="Try for so long instead; with --trials, at most.", min=0)]
Seed = Annotated[int, typer.Option(help="Another seed tries other schedules; the same one the same.")]
ReplayFile = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        help="Run the one schedule in this file, with the model and settings it was found with, or others given here.",
        dir_okay=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Where a schedule that fails is written.", show_default="certify-MODEL.json", dir_okay=False),
]
KvDtype = Annotated[
    Literal["f16", "f32"] | None,
    typer.Option("--kv-dtype", help="Numbers in the KV pool.", show_default="both are tried", rich_help_panel=_ENGINE),
]
Activations = Annotated[
    Literal["int8", "bf16", "f32"] | None,
    typer.Option(
        "--activations", help="Arithmetic of quantised weights.", show_default="int8", rich_help_panel=_ENGINE
    ),
]
Quantize = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option("--quantize", help="Quantise 16-bit safetensors while loading.", rich_help_panel=_ENGINE),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", help="Threads of the kernels, at most.", show_default="one a core", rich_help_panel=_ENGINE
    ),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        "--block-tokens",
        help="Tokens of a KV block; a multiple of 16.",
        show_default="32",
        rich_help_panel=_ENGINE,
    ),
]
StepTokens = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", help="The largest chunk.", show_default="512", rich_help_panel=_ENGINE),
]
ModelLength = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Tokens of one sequence, prompt and answer, at most.",
        show_default="of the longest prompt tried",
        rich_help_panel=_ENGINE,
    ),
]


def certify(
    model: Model = None,
    trials: Trials = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    replay: ReplayFile = None,
    output: Output = None,
    as_json: options.AsJson = False,
    kv_dtype: KvDtype = None,
    activations: Activations = None,
    quantize: Quantize = None,
    threads: Threads = None,
    block_tokens: BlockTokens = None,
    max_num_batched_tokens: StepTokens = None,
    max_model_len: ModelLength = None,
) -> None:
    """Check that no schedule changes a bit, with your model, on your machine.

    Tries schedules at random: chunks, company, cache hits, preemption, swap, threads, KV types.

    Compares every logit, as bits, with the same request alone, in one piece, nothing cached.

    Status 0 if nothing differs; else 1, and the smallest schedule that shows it is in a file.

    Examples:

    [bold]legato certify[/bold] · 100 schedules on the default model, about a minute

    [bold]legato certify ./model.gguf --seconds 600 --seed 7[/bold] · other schedules, ten minutes of them

    [bold]legato certify gemma3-270m --kv-dtype f16 --max-num-batched-tokens 256[/bold] · as you serve it

    [bold]legato certify --trials 500 --json | tail -n 1 | jq .exact[/bold] · for scripts

    [bold]legato certify --replay certify-model.json[/bold] · once more what has failed
    """
    given = {
        "kv_dtype": kv_dtype,
        "activations": activations,
        "quantize": quantize,
        "threads": threads,
        "block_tokens": block_tokens,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
    }
    # Read by libgomp when the kernels are loaded. Threads that spin for a core that others have take long: one row of
    # SmolLM2 on two busy cores took 130 ms, and 10 ms with this. On idle cores it makes no difference.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from legato.certify.campaign import Campaign
    from legato.certify.replay import read_replay

    recorded = None if replay is None else read_replay(replay)
    name, settings = _settings(model, given, recorded)
    config = _config(name, settings)
    rig = _load(config, settings, quiet=as_json)
    if recorded is not None and recorded.isa != rig.isa:
        options.say(
            f"found with {recorded.isa} kernels, run with {rig.isa} ones; LEGATO_ISA={recorded.isa} forces those"
        )
    settings = {**settings, "threads": rig.shape.threads, "max_model_len": rig.shape.max_model_len}
    campaign = Campaign(rig, time.monotonic)
    interrupted = False
    try:
        if recorded is not None:
            campaign.replay(recorded.schedule)
        else:
            most = trials if trials is not None or seconds is not None else DEFAULT_TRIALS
            _try(campaign, rig, settings, seed=seed, trials=most, seconds=seconds, quiet=as_json)
    except KeyboardInterrupt:
        interrupted = True
    report = _report(campaign, rig, name, settings, seed, interrupted)
    if report.finding is not None and recorded is None:
        path = output or Path(f"certify-{options.short_name(name)}.json")
        report = _written(report, path)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        _show(report)
    if not report.is_exact:
        raise typer.Exit(1)
    if interrupted:
        raise typer.Exit(130)


def _settings(model: str | None, given: dict[str, Any], recorded: Replay | None) -> tuple[str, dict[str, Any]]:
    """Model and settings: what is given here, else what a replayed file has, else the defaults."""
    defaults: dict[str, Any] = {
        **dict.fromkeys(given),
        "activations": "int8",
        "threads": 0,
        "block_tokens": 32,
        "max_num_batched_tokens": 512,
    }
    if recorded is not None:
        defaults |= {name: value for name, value in recorded.settings.items() if name in defaults}
    settings = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    return model or (DEFAULT_MODEL if recorded is None else recorded.model), settings


def _config(model: str, settings: dict[str, Any]) -> EngineConfig:
    """The settings, checked. Raises ConfigError."""
    checked = {name: value for name, value in settings.items() if not (name == "kv_dtype" and value is None)}
    return EngineConfig.of(model, {**checked, "max_num_seqs": min(MAX_SEQS, settings["max_num_batched_tokens"])})


def _load(config: EngineConfig, settings: dict[str, Any], *, quiet: bool) -> NativeRig:
    from legato.assemble import resolve_model
    from legato.certify.rig import load_rig

    with options.loading_bar(quiet=quiet) as report:
        path = resolve_model(config, lambda done, total: report("fetching", done, total), options.say)
        return load_rig(
            path,
            kv_dtypes=("f16", "f32") if settings["kv_dtype"] is None else (config.kv_dtype,),
            step_tokens=config.max_num_batched_tokens,
            prompt_tokens=PROMPT_TOKENS,
            answer_tokens=2 * config.block_tokens + ANSWER_TOKENS,
            max_seqs=config.max_num_seqs,
            activations=config.activations,
            quantize=config.quantize,
            threads=config.threads,
            block_tokens=config.block_tokens,
            max_model_len=config.max_model_len,
            progress=lambda done, total: report("loading", done, total),
        )


def _try(
    campaign: Campaign,
    rig: NativeRig,
    settings: dict[str, Any],
    *,
    seed: int,
    trials: int | None,
    seconds: float | None,
    quiet: bool,
) -> None:
    from legato.certify.draw import Limits

    limits = Limits.of(rig.shape, step_tokens=settings["max_num_batched_tokens"], answer_tokens=ANSWER_TOKENS)
    with _bar(trials, seconds, quiet=quiet) as advance:
        campaign.run(limits, seed=seed, trials=trials, seconds=seconds, on_trial=advance)
    if campaign.finding is not None:
        options.say(f"trial {campaign.finding.trial} differs; looking for the smallest schedule that does ...")
        campaign.shrink()


def _report(
    campaign: Campaign, rig: NativeRig, name: str, settings: dict[str, Any], seed: int, interrupted: bool
) -> Report:
    from legato.certify.report import Report

    return Report(
        model=name,
        description=rig.description,
        isa=rig.isa,
        settings=settings,
        seed=seed,
        seconds=campaign.seconds,
        totals=campaign.totals,
        finding=campaign.finding,
        interrupted=interrupted,
    )


def _written(report: Report, path: Path) -> Report:
    """The report, with the file that its finding is in."""
    from legato.certify.replay import write_replay

    report = dataclasses.replace(report, file=str(path))
    write_replay(report, path)
    return report


@contextlib.contextmanager
def _bar(trials: int | None, seconds: float | None, *, quiet: bool) -> Iterator[Callable[[Totals], None]]:
    """A bar on stderr, gone afterwards: trials done of those wanted, or seconds. Nothing if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda totals: None
        return
    columns = (TextColumn("certifying"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    started_s = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=trials or seconds, said="")

        def advance(totals: Totals) -> None:
            done = totals.trials if trials else time.monotonic() - started_s
            bar.update(
                task, completed=done, said=f"{totals.trials} trials, {totals.compared_logits / 1e6:,.0f} M logits"
            )

        yield advance


def _show(report: Report) -> None:
    """What was exercised, and the verdict."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    name = options.short_name(report.model)
    console.print(f"\n[bold]Legato[/] certifies [bold cyan]{name}[/] · {report.description}\n")
    for label, text in (*_circumstances(report), *_exercised(report.totals)):
        console.print(f"  [dim]{label:13}[/]{text}")
    console.print()
    if report.finding is not None:
        _show_finding(console, report)
    else:
        until = ", until interrupted" if report.interrupted else ""
        console.print(f"  [bold green]exact[/]        0 bits and 0 tokens differ{until}\n")


def _circumstances(report: Report) -> list[tuple[str, str]]:
    settings = report.settings
    kv = "f16 and f32" if settings["kv_dtype"] is None else settings["kv_dtype"]
    quantised = f" · quantised to {settings['quantize']}" if settings["quantize"] else ""
    return [
        ("machine", f"{report.isa} kernels · threads: up to {settings['threads']}"),
        (
            "settings",
            f"activations {settings['activations']} · KV {kv} · blocks of {settings['block_tokens']}"
            f" · chunks of up to {settings['max_num_batched_tokens']}{quantised}",
        ),
        ("trials", f"{report.totals.trials:,} in {report.seconds:.1f} s · seed {report.seed}"),
    ]


def _exercised(totals: Totals) -> list[tuple[str, str]]:
    return [
        ("requests", f"{totals.requests:,} · taken back: {totals.aborts:,}"),
        (
            "steps",
            f"{totals.steps:,} of up to {totals.largest_step_rows} tokens · of several requests:"
            f" {totals.steps_in_company:,} · pieces of prompts: {totals.chunks:,}",
        ),
        (
            "cache",
            f"tokens found: {totals.cached_tokens:,} · blocks evicted: {totals.evicted_blocks:,},"
            f" swapped back: {totals.restored_blocks:,}",
        ),
        ("preempted", f"{totals.preemptions:,} · without need: {totals.forced_preemptions:,}"),
        (
            "trials with",
            f"several threads: {totals.threaded_trials:,} · steps planned ahead: {totals.ahead_trials:,}"
            f" · KV in f16: {totals.f16_trials:,}, in f32: {totals.f32_trials:,}",
        ),
        ("compared", f"{totals.compared_logits:,} logits, bit for bit · {totals.compared_tokens:,} tokens"),
    ]


def _show_finding(console: Any, report: Report) -> None:
    from rich.markup import escape

    finding = report.finding
    assert finding is not None
    totals = report.totals
    differ = f"{totals.mismatched_logit_bits:,} bits differ, and {totals.mismatched_tokens:,} of the tokens"
    what = differ if finding.failure.kind == "difference" else "a trial did not end as it should"
    console.print(f"  [bold red]not exact[/]    {what}, in trial {finding.trial}")
    console.print(f"  [dim]why          [/]{escape(finding.failure.message)}")
    if not finding.is_repeatable:
        console.print("               the same schedule, run once more, did not fail: a race, or damaged memory?")
    if finding.shrink_runs > 1:
        count = len(finding.schedule.arrivals)
        what = "1 request" if count == 1 else f"{count} requests"
        console.print(f"  [dim]smallest     [/]{what}, found in {finding.shrink_runs} runs:")
    console.print(escape(json.dumps(finding.schedule.to_dict())))
    if report.file is not None:
        console.print(f"\n  once more: [bold]legato certify --replay {escape(report.file)}[/]\n")
