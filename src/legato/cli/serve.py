"""`legato serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.cli.config_file import ConfigFile
from legato.config import AUTO_ITL, DEFAULT_MODEL, EngineConfig, format_size, parse_size
from legato.errors import ConfigError, EngineError

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie")
_KEY_NAME = re.compile("key-[0-9a-f]{8}")

if TYPE_CHECKING:
    from legato.engine.service import EngineService
    from legato.engine.text import ModelText
    from legato.engine.wire import EngineInfo
    from legato.server.served import ServedModel
    from legato.server.terms import Admission


def serve(
    model: options.Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name clients use.", show_default="the alias, or the file's name")
    ] = None,
    itl_ms: options.ItlMs = None,
    prefill_share: options.PrefillShare = None,
    prefer: options.PreferOption = None,
    policy: options.PolicyOption = "slo",
    ttft_ms: options.TtftMs = None,
    shed: options.Shed = False,
    tenant_header: options.TenantHeader = None,
    tenant_weight: options.TenantWeight = None,
    long_prefill_token_threshold: options.LongPrefill = None,
    max_num_partial_prefills: options.PartialPrefills = None,
    async_scheduling: options.AsyncScheduling = True,
    max_num_batched_tokens: options.MostStepTokens = None,
    max_num_seqs: options.Sequences = 64,
    max_model_len: options.ModelLength = None,
    kv_memory: options.KvMemory = None,
    kv_tokens: options.KvTokens = None,
    kv_dtype: options.KvDtype = "f16",
    block_tokens: options.BlockTokens = 32,
    enable_prefix_caching: options.PrefixCaching = True,
    swap_space: options.SwapSpace = "0",
    kv_cache_dir: options.KvCacheDir = None,
    kv_cache_size: options.KvCacheSize = None,
    activations: options.Activations = "int8",
    quantize: options.Quantize = None,
    threads: options.Threads = 0,
    chat_template: options.ChatTemplate = None,
    config_file: ConfigFile = None,
    trace: options.TraceFile = None,
    trace_size: options.TraceSize = None,
) -> None:
    """Serve a model to OpenAI clients.

    Examples:

    [bold]legato serve[/bold] · the default model on http://127.0.0.1:8000

    [bold]legato serve ./model.gguf --port 9000[/bold] · your own file

    [bold]legato serve gemma3-270m --itl-ms 60[/bold] · a token at least every 60 ms, whatever else arrives

    [bold]legato serve --policy fair --ttft-ms 2000 --shed[/bold] · tenants share; who would wait for longer gets a 429

    [bold]legato serve --max-num-batched-tokens 256[/bold] · a fixed budget in tokens, as vLLM has it

    [bold]legato serve --config legato.toml[/bold] · as legato tune found it best

    [bold]legato serve --trace steps.jsonl[/bold] · keeps every step; then legato explain steps.jsonl
    """
    config = EngineConfig(
        model=model,
        itl_ms=AUTO_ITL if itl_ms is None and max_num_batched_tokens is None else itl_ms,
        prefill_share=prefill_share,
        prefer=prefer,
        policy=policy,
        ttft_ms=ttft_ms,
        tenant_weights=tuple(_weight(text) for text in tenant_weight or ()),
        long_prefill_token_threshold=long_prefill_token_threshold,
        max_num_partial_prefills=max_num_partial_prefills,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=512 if max_num_batched_tokens is None else max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        kv_memory_bytes=None if kv_memory is None else parse_size(kv_memory),
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        enable_prefix_caching=enable_prefix_caching,
        swap_space_bytes=parse_size(swap_space),
        kv_cache_dir=None if kv_cache_dir is None else str(kv_cache_dir),
        kv_cache_bytes=None if kv_cache_size is None else parse_size(kv_cache_size),
        activations=activations,
        quantize=quantize,
        threads=threads,
        chat_template=None if chat_template is None else str(chat_template),
    )
    if shed and ttft_ms is None:
        raise ConfigError("shed refuses what would be answered too late, and nothing says when that is; give ttft_ms")
    _check_tenants(config, tenant_header)
    if trace_size is not None and trace is None:
        raise ConfigError(f"trace_size is {trace_size}, and nothing is traced; name a file with trace")
    kept = None if trace is None else _kept(trace, parse_size(trace_size or "64MiB"))
    from legato.server.run import listen
    from legato.server.terms import Admission

    with listen(host, port) as sock:
        status = _run(_serve(config, Admission(shed, tenant_header), sock, host, served_model_name, kept))
    raise typer.Exit(status)


def _run(main: Coroutine[Any, Any, int]) -> int:
    """Runs the coroutine on uvloop where it is installed."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def _weight(text: str) -> tuple[str, float]:
    """A tenant and its weight. ConfigError if that is not what it says."""
    name, equals, weight = text.rpartition("=")
    try:
        if name and equals:
            return name, float(weight)
        raise ValueError(text)
    except ValueError:
        raise ConfigError(f"'{text}' is no tenant's weight; write it as gold=3") from None


def _check_tenants(config: EngineConfig, header: str | None) -> None:
    """ConfigError for a header or a weight that could never mean anything, or would give secrets away."""
    from legato.server.terms import is_tenant_name

    if header is not None:
        if config.policy != "fair":
            raise ConfigError(f"tenant_header tells tenants apart, and policy {config.policy} does not; choose fair")
        if not _HEADER.fullmatch(header):
            raise ConfigError(f"tenant_header is '{header}', which no header can be called; write it as X-Tenant")
        if header.lower() in _SECRET_HEADERS:
            raise ConfigError(
                f"tenant_header is '{header}', a secret, and /metrics shows tenants by name; choose another (an API"
                " key is a tenant without it)"
            )
    seen: set[str] = set()
    for name, _ in config.tenant_weights:
        if name in seen:
            raise ConfigError(f"tenant '{name}' has two weights; give it one")
        seen.add(name)
        if header is not None and not is_tenant_name(name):
            raise ConfigError(f"no request can be of tenant '{name}': names have 1 to 128 printable ASCII characters")
        if header is None and not _KEY_NAME.fullmatch(name):
            raise ConfigError(
                f"no request can be of tenant '{name}': name the header that says so with tenant_header, or write an"
                " API key as key- and the first 8 digits of its SHA-256"
            )


def _kept(path: Path, limit_bytes: int) -> tuple[Path, int]:
    """Where a trace is kept, and how much of it. ConfigError if it cannot be, before a model is loaded."""
    from legato.explain.ring import require_room

    require_room(path, limit_bytes)
    return path, limit_bytes


async def _serve(
    config: EngineConfig,
    admission: Admission,
    sock: socket.socket,
    host: str,
    name: str | None,
    kept: tuple[Path, int] | None,
) -> int:
    """Loads, serves, stops. Exit status: 0 after Ctrl-C or SIGTERM, 130 if it came while loading."""
    from legato.assemble import engine_factory, open_text, resolve_model
    from legato.engine.service import EngineService
    from legato.server.app import build_app
    from legato.server.recorder import TraceRecorder
    from legato.server.run import DRAIN_S, HttpServer, on_signals

    task = asyncio.current_task()
    assert task is not None
    service: EngineService | None = None
    recorder: TraceRecorder | None = None
    try:
        with options.loading_bar() as report, on_signals(lambda: _cancel(task)):
            path = await asyncio.to_thread(
                resolve_model, config, lambda done, total: report("fetching", done, total), options.say
            )
            service = EngineService(engine_factory(config, path), on_progress=report)
            starting = asyncio.create_task(service.start())
            try:
                text = await asyncio.to_thread(open_text, config, path)  # meanwhile the engine loads
            except BaseException:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                raise
            info = await starting
        served = _served(config, path, text, name)
        running = service

        def cut() -> None:
            running.end_streams("the server is shutting down")

        if kept is not None:
            recorder = TraceRecorder(*kept, served.name, info, service.now_s, options.say)
            service.record_to(recorder)
        server = HttpServer(build_app(service, served, admission=admission), sock, cut)

        def stop() -> None:
            if running.open_sequences and not server.stopping:
                count = running.open_sequences
                what = "1 answer is" if count == 1 else f"{count} answers are"
                options.say(f"{what} open: {DRAIN_S} s to finish; Ctrl-C again cuts")
            server.stop()

        with on_signals(stop):
            traced = "" if kept is None else f"{kept[0]}, {format_size(kept[1])} at most · legato explain {kept[0]}"
            _banner(config, info, served.name, _address(sock, host), order_of(info, admission), traced)
            watch = asyncio.create_task(_report_failure(service))
            await server.serve()
            watch.cancel()
        return 0 if running.failure is None else 1
    except asyncio.CancelledError:
        return 130
    except EngineError:
        if service is not None and service.detail:
            options.say(service.detail)
        raise
    finally:
        if service is not None:
            await service.stop()
        if recorder is not None:
            recorder.close()


async def _report_failure(service: EngineService) -> None:
    """Says on the terminal that the engine is gone; clients are told by the service."""
    failure = await service.failed()
    if service.detail:
        options.say(service.detail)
    options.say(f"error: {failure}; requests and /health answer 503 until the server is restarted")


def _served(config: EngineConfig, path: Path, text: ModelText, name: str | None) -> ServedModel:
    import time

    from legato.server.served import ServedModel

    names = dict.fromkeys([name or options.short_name(config.model), config.model, str(path), path.name])
    return ServedModel(names=tuple(names), created=int(time.time()), text=text)


def _address(sock: socket.socket, host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{sock.getsockname()[1]}"


def order_of(info: EngineInfo, admission: Admission) -> str:
    """Who goes first, and what happens to those who would come too late."""
    order = {
        "fcfs": "prompts in order of arrival",
        "slo": "prompts by when they are due, short ones first",
        "fair": f"tenants by what they were served; a tenant is {admission.tenant_header or 'an API key'}",
    }[info.policy]
    if not info.ttft_s:
        return order
    late = "else 429" if admission.shed else "if possible"
    return f"{order} · a first token within {1000 * info.ttft_s:,.0f} ms, {late}"


def _banner(config: EngineConfig, info: EngineInfo, name: str, address: str, order: str, traced: str) -> None:
    """Everything one needs to begin: address, model, budget, memory, and a line to paste."""
    from rich.console import Console

    import legato

    console = Console(highlight=False, soft_wrap=True)
    question = '"messages": [{"role": "user", "content": "Why is the sky blue?"}]'
    body = f'{{"model": "{name}", "stream": true, "max_tokens": 200, {question}}}'
    parts = f"weights {format_size(info.weights_bytes)}, KV {format_size(info.kv_bytes)}"
    parts += f", scratch {format_size(info.scratch_bytes)}"
    parts += f", swap {format_size(info.swap_bytes)}" if info.swap_bytes else ""
    quantised = "" if config.quantize is None else f", quantised to {config.quantize}"
    rows = [
        ("model", f"[bold]{name}[/] · {info.description}{quantised}, loaded in {info.load_s:.1f} s"),
        *([("pace", info.promise)] if info.promise else []),
        ("order", order),
        ("step", f"{info.max_num_batched_tokens} tokens: decodes first, then prompt chunks · {info.threads} threads"),
        (
            "limits",
            f"{info.max_num_seqs} sequences · context {info.max_model_len:,} · KV pool {info.kv_tokens:,} tokens",
        ),
        ("memory", f"{format_size(info.peak_bytes)} at most: {parts}"),
        *([("cache", info.notice)] if info.notice else []),
        *([("trace", traced)] if traced else []),
        ("also", "/v1/completions · /v1/models · /health · /metrics"),
    ]
    console.print(f"\n[bold]Legato {legato.__version__}[/] serves [bold cyan]{address}/v1[/]\n")
    for label, text in rows:
        console.print(f"  [dim]{label:8}[/]{text}")
    console.print("\n  Try it:\n")
    typer.echo(f"curl -N {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    console.print("\n  [dim]Ctrl-C stops.[/]\n")


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
