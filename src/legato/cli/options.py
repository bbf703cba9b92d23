"""Options that several verbs share, and what they make: an `EngineConfig`, a loading bar."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from legato.config import DEFAULT_MODEL
from legato.engine.worker import ReportProgress
from legato.errors import ConfigError

_ENGINE = "Engine"
_PACE = "Pace"
_TRACE = "Trace"

Model = Annotated[
    str, typer.Argument(help="A GGUF file, a safetensors folder, a hub id (org/name) or an alias: legato pull --list")
]
StepTokens = Annotated[
    int,
    typer.Option(
        "--max-num-batched-tokens",
        help="The step budget: tokens computed together, decodes first, then chunks of prompts. Smaller keeps streams"
        " smoother, larger reads prompts faster.",
        rich_help_panel=_ENGINE,
    ),
]
MostStepTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        help="Tokens of one step, decodes and chunks of prompts together, at most.",
        show_default="512",
        rich_help_panel=_ENGINE,
    ),
]
Sequences = Annotated[int, typer.Option("--max-num-seqs", help="Sequences running at once.", rich_help_panel=_ENGINE)]
ModelLength = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Tokens of one sequence, prompt and answer.",
        show_default="the model's context",
        rich_help_panel=_ENGINE,
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        help="Size of the KV pool, as in 1GiB.",
        show_default="1GiB, or what one sequence needs",
        metavar="SIZE",
        rich_help_panel=_ENGINE,
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option("--kv-tokens", help="Size of the KV pool in tokens, instead.", rich_help_panel=_ENGINE),
]
KvDtype = Annotated[
    Literal["f16", "f32"], typer.Option("--kv-dtype", help="Numbers in the KV pool.", rich_help_panel=_ENGINE)
]
Activations = Annotated[
    Literal["int8", "bf16", "f32"],
    typer.Option(
        "--activations",
        help="Arithmetic of quantised weights: int8; bf16 (needs AMX: faster prompts, slower single streams); "
        "f32 (for comparison).",
        rich_help_panel=_ENGINE,
    ),
]
Quantize = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option("--quantize", help="Quantise 16-bit safetensors while loading.", rich_help_panel=_ENGINE),
]
BlockTokens = Annotated[
    int, typer.Option("--block-tokens", help="Tokens of a KV block; a multiple of 16.", rich_help_panel=_ENGINE)
]
ItlMs = Annotated[
    float | None,
    typer.Option(
        "--itl-ms",
        help="The longest gap wanted between two tokens of a stream, in milliseconds. The chunks of prompts are chosen"
        " for it, step by step, from what steps take on this machine.",
        show_default="from this machine's decode step; none with --max-num-batched-tokens",
        rich_help_panel=_PACE,
    ),
]
PrefillShare = Annotated[
    float | None,
    typer.Option(
        "--prefill-share",
        help="Of that gap, what prompts have at least.",
        show_default="0.2",
        rich_help_panel=_PACE,
    ),
]
PreferOption = Annotated[
    Literal["itl", "ttft"] | None,
    typer.Option(
        "--prefer",
        help="What is kept when gap and share cannot both be.",
        show_default="itl",
        rich_help_panel=_PACE,
    ),
]
PolicyOption = Annotated[
    Literal["fcfs", "slo", "fair"],
    typer.Option(
        "--policy",
        help="slo: prompts by when they are due, short ones first, where waiting counts; fair: tenants share by what"
        " they were served; fcfs: in order of arrival.",
        rich_help_panel=_PACE,
    ),
]
TtftMs = Annotated[
    float | None,
    typer.Option(
        "--ttft-ms",
        help="How soon a first token is wanted, in milliseconds, of requests that do not say it themselves.",
        show_default="whenever",
        rich_help_panel=_PACE,
    ),
]
Shed = Annotated[
    bool,
    typer.Option(
        "--shed/--no-shed",
        help="Refuse a request whose first token would come too late, with status 429 and Retry-After. Needs"
        " --ttft-ms.",
        rich_help_panel=_PACE,
    ),
]
TenantHeader = Annotated[
    str | None,
    typer.Option(
        "--tenant-header",
        help="A header that names the tenant, set by a proxy that you trust.",
        show_default="none; an API key is a tenant",
        metavar="NAME",
        rich_help_panel=_PACE,
    ),
]
TenantWeight = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-weight",
        help="A tenant's share against 1 for all others, as in gold=3; may be repeated. An API key's tenant is called"
        " key- and the first 8 digits of its SHA-256.",
        metavar="TENANT=WEIGHT",
        rich_help_panel=_PACE,
    ),
]
LongPrefill = Annotated[
    int | None,
    typer.Option(
        "--long-prefill-token-threshold",
        help="Tokens of one prompt in a step, at most.",
        show_default="as many as fit",
        rich_help_panel=_PACE,
    ),
]
PartialPrefills = Annotated[
    int | None,
    typer.Option(
        "--max-num-partial-prefills",
        help="Prompts that a step computes a part of, at most.",
        show_default="as many as fit",
        rich_help_panel=_PACE,
    ),
]
AsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Plan a step while the one before it computes.",
        rich_help_panel=_PACE,
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep the KV of what was computed: prompts that begin alike compute their beginning once.",
        rich_help_panel=_ENGINE,
    ),
]
SwapSpace = Annotated[
    str,
    typer.Option(
        "--swap-space",
        help="Memory for KV that the pool has to give up, as in 512MiB; used if copying is quicker than computing."
        " On the CPU a larger --kv-memory serves better.",
        metavar="SIZE",
        rich_help_panel=_ENGINE,
    ),
]
KvCacheDir = Annotated[
    Path | None,
    typer.Option(
        "--kv-cache-dir",
        help="A folder where computed prefixes outlive the server. It reveals what was asked.",
        file_okay=False,
        rich_help_panel=_ENGINE,
    ),
]
KvCacheSize = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-size",
        help="Size of that folder, at most.",
        metavar="SIZE",
        show_default="10GiB",
        rich_help_panel=_ENGINE,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Keep every step in this file, for legato explain. No text: counts, times and names of blocks.",
        dir_okay=False,
        metavar="FILE",
        rich_help_panel=_TRACE,
    ),
]
TraceSize = Annotated[
    str | None,
    typer.Option(
        "--trace-size",
        help="Size of that trace, at most; the newest steps are kept.",
        metavar="SIZE",
        show_default="64MiB",
        rich_help_panel=_TRACE,
    ),
]
Threads = Annotated[
    int,
    typer.Option("--threads", help="Threads of the kernels.", show_default="one a core", rich_help_panel=_ENGINE),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="A Jinja file to use instead of the model's own template.",
        exists=True,
        dir_okay=False,
        rich_help_panel=_ENGINE,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of the answer, at most.")]
TopP = Annotated[float, typer.Option("--top-p", help="Choose among the tokens that make up this much probability.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes a sampled text repeatable.", show_default="random")]

__all__ = ["DEFAULT_MODEL"]


@contextlib.contextmanager
def loading_bar(*, quiet: bool = False) -> Iterator[ReportProgress]:
    """A bar on stderr that names the stage and counts bytes, and is gone afterwards. Nothing if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as bar:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report


@contextlib.contextmanager
def counting_bar(what: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that counts, with the time that is left if `total` is known. Nothing if that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def on_interrupt(action: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `action` inside, once; the second one interrupts as ever. In a running event loop."""
    loop = asyncio.get_running_loop()

    def act() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        action()

    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def check_folder(path: Path | None) -> None:
    """ConfigError if there is no folder to write that file in."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """ConfigError for the first of these parameters that the user gave, which would be ignored."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def say(text: str) -> None:
    """A notice on stderr."""
    typer.echo(text, err=True)


def short_name(model: str) -> str:
    """What to call a model: the alias, or the file's or folder's name."""
    path = Path(model)
    return (path.stem if path.suffix.lower() == ".gguf" else path.name) or model
