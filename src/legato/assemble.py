"""The composition root: from a config to an engine, to text, to a served model. Alone knows both engine and exec."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.config import EngineConfig, format_size
from legato.core.budget import StepBudget
from legato.core.pacer import Pacer
from legato.core.policy import POLICIES
from legato.core.promise import USUAL_CONTEXT, decode_seconds, most_streams, price_of, prompt_seconds, usual_gap
from legato.core.state import SchedulerState
from legato.core.tenants import Tenants
from legato.engine.loop import Engine
from legato.engine.text import ModelText
from legato.engine.wire import EngineInfo
from legato.engine.worker import EngineFactory, ReportProgress

if TYPE_CHECKING:
    from legato.exec.model import LoadedModel
    from legato.exec.pool_archive import PoolArchive


def build_engine(config: EngineConfig, path: Path, report: ReportProgress) -> tuple[Engine, EngineInfo]:
    """The engine for the model at `path`, ready to step, and what it is. Raises ModelError, ConfigError, OutOfMemory.

    Runs wherever it is called: in the engine's own process for the server, in the caller's for offline use.
    """
    from legato.exec.model import load_model

    start_s = time.monotonic()
    budget = StepBudget(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        chunk_tokens=config.long_prefill_token_threshold,
        partial_prefills=config.max_num_partial_prefills,
    )
    loaded = load_model(
        path,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        kv_tokens=_kv_tokens(config, path),
        kv_dtype=config.kv_dtype,
        block_tokens=config.block_tokens,
        activations=config.activations,
        quantize=config.quantize,
        threads=config.threads,
        max_model_len=config.max_model_len,
        max_logit_rows=budget.logit_rows,
        swap_space_bytes=_swap_space_bytes(config, path),
        progress=lambda done, total: report("loading", done, total),
    )
    host_blocks, swap_notice = _host_blocks(config, loaded)
    root, archive, archive_notice = _open_archive(config, path, loaded, report)
    pacer, promise = _pacer(config, loaded, budget, report)
    state = SchedulerState(
        loaded.kv_blocks,
        loaded.block_tokens,
        loaded.max_model_len,
        cache_root=root if config.enable_prefix_caching else None,
        host_blocks=host_blocks,
        policy=POLICIES[config.policy],
        tenants=Tenants(dict(config.tenant_weights), None if pacer is None else price_of(pacer.tracker.cost)),
    )
    ahead = loaded.executor if config.async_scheduling else None
    engine = Engine(state, loaded.executor, budget, time.perf_counter, archive, pacer, ahead)
    footprint = loaded.footprint
    info = EngineInfo(
        max_model_len=loaded.max_model_len,
        vocab=loaded.spec.vocab,
        kv_blocks=loaded.kv_blocks,
        block_tokens=loaded.block_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        threads=loaded.threads,
        weights_bytes=footprint.weights,
        kv_bytes=footprint.kv,
        scratch_bytes=footprint.scratch + footprint.tables,
        swap_bytes=footprint.swap,
        peak_bytes=footprint.peak + (0 if archive is None else archive.most_nbytes),
        load_s=time.monotonic() - start_s,
        description=f"{loaded.spec.architecture}, {len(loaded.spec.layers)} layers, vocabulary {loaded.spec.vocab:,}",
        prefix_caching=config.enable_prefix_caching,
        itl_s=0.0 if pacer is None else pacer.itl_s,
        promise=promise,
        ttft_s=0.0 if config.ttft_ms is None else config.ttft_ms / 1000,
        **({} if pacer is None else _pace_of(pacer, budget, loaded.max_model_len)),
        policy=config.policy,
        tenant_weights=dict(config.tenant_weights),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        async_scheduling=config.async_scheduling,
        notice=" · ".join(notice for notice in (swap_notice, archive_notice) if notice),
    )
    return engine, info


def time_chunks(config: EngineConfig, path: Path, rows: Sequence[int], report: ReportProgress) -> dict[int, float]:
    """Seconds of a step with one chunk of so many rows, for each of `rows`, measured. Raises as `build_engine`."""
    from legato.exec.chunks import time_chunks as measure
    from legato.exec.model import load_model

    loaded = load_model(
        path,
        max_num_batched_tokens=max(rows),
        max_num_seqs=1,
        kv_tokens=max(rows) + config.block_tokens,
        kv_dtype=config.kv_dtype,
        block_tokens=config.block_tokens,
        activations=config.activations,
        quantize=config.quantize,
        threads=config.threads,
        max_model_len=None,
        max_logit_rows=1,
        swap_space_bytes=0,
        progress=lambda done, total: report("loading", done, total),
    )
    return measure(loaded, rows, progress=lambda done, total: report("timing chunks", done, total))


def engine_factory(config: EngineConfig, path: Path) -> EngineFactory:
    """`build_engine` as `EngineService` sends it to the engine's process."""
    return functools.partial(build_engine, config, path)


def resolve_model(
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> Path:
    """Where the model's file or folder is; fetched if it must be. Raises ModelError."""
    from legato.models.pull import resolve

    return resolve(config.model, progress, notice)


def open_text(config: EngineConfig, path: Path) -> ModelText:
    """Tokenizer and chat template of the model at `path`. Reads no weights. Raises ModelError."""
    from legato.exec.weights.checkpoint import GgufCheckpoint, open_checkpoint
    from legato.models import chat_template as templates
    from legato.models import tokenizer as tokenizers

    checkpoint = open_checkpoint(path, quantize=config.quantize)
    if isinstance(checkpoint, GgufCheckpoint):
        tokenizer = tokenizers.tokenizer_from_gguf(checkpoint.metadata, str(path))
        source = templates.template_from_gguf(checkpoint.metadata, str(path))
    else:
        tokenizer = tokenizers.tokenizer_from_folder(path)
        source = templates.template_from_folder(path)
    if config.chat_template is not None:
        source = templates.template_from_file(Path(config.chat_template))

    def name_of(token_id: int | None) -> str:
        return "" if token_id is None else tokenizer.token_name(token_id)

    render: Callable[[list[dict[str, str]]], str]
    if source is None:

        def render(messages: list[dict[str, str]]) -> str:
            raise templates.no_template(config.model)

    else:
        render = templates.ChatTemplate(
            source,
            bos_token=name_of(tokenizer.bos_id),
            eos_token=name_of(tokenizer.eos_id),
            source=config.chat_template or str(path),
        ).render
    vocab = checkpoint.spec.vocab
    return ModelText(
        vocab=vocab,
        eos_ids=tokenizer.eos_ids,
        token_bytes=tokenizer.bytes_table(vocab),
        token_name=tokenizer.token_name,
        encode=tokenizer.encode,
        render=render,
        encode_chat=functools.partial(tokenizer.encode, parse_special=True),
    )


_CALIBRATION_S = 5.0


def _pacer(
    config: EngineConfig, loaded: LoadedModel, budget: StepBudget, report: ReportProgress
) -> tuple[Pacer | None, str]:
    """What keeps the gap between tokens, if one is wanted, and what it promises. Times steps if it has not before."""
    if config.itl_ms is None:
        return None, ""
    from legato.core.tracker import CostTracker
    from legato.exec.cost_file import load_or_calibrate
    from legato.models.home import legato_home

    found = load_or_calibrate(
        loaded,
        budget,
        {"activations": config.activations, "kv_dtype": config.kv_dtype},
        legato_home() / "steps",
        limit_s=_CALIBRATION_S,
        progress=lambda done, total: report("timing steps", done, total),
    )
    context = min(USUAL_CONTEXT, loaded.max_model_len - 1)
    itl_s = config.itl_ms / 1000 if config.itl_ms else usual_gap(found.cost, config.max_num_seqs, context)
    pacer = Pacer(
        CostTracker(found.cost, found.samples),
        itl_s=itl_s,
        prefill_share=0.2 if config.prefill_share is None else config.prefill_share,
        prefer=config.prefer or "itl",
    )
    prompt_tokens = min(4000, loaded.max_model_len - 1)
    beside = min(8, config.max_num_seqs - 1)
    answer_s = prompt_seconds(pacer.tracker.safe, itl_s, budget.max_tokens, prompt_tokens, beside, context)
    promise = f"a token every {1000 * itl_s:.0f} ms; beside {beside} streams, a prompt of {prompt_tokens:,} tokens"
    return pacer, f"{promise} is answered after {answer_s:.1f} s"


def _pace_of(pacer: Pacer, budget: StepBudget, max_model_len: int) -> dict[str, Any]:
    """What the server tells and foresees by: fields of `EngineInfo`."""
    cost = pacer.tracker.cost
    tokens, context = min(1000, max_model_len - 1), min(USUAL_CONTEXT, max_model_len - 1)
    return {
        "least_itl_s": decode_seconds(cost, 1, 0),
        "prefill_share": pacer.prefill_share,
        "prefer": pacer.prefer,
        "most_streams": most_streams(cost, (1 - pacer.prefill_share) * pacer.itl_s, budget.max_seqs, context),
        "token_s": prompt_seconds(cost, pacer.itl_s, budget.max_tokens, tokens, 0, 0) / tokens,
    }


# Blocks read from disk pass through host memory: room for as many as this, or as one sequence has.
_STAGING_BYTES = 256 << 20


def _swap_space_bytes(config: EngineConfig, path: Path) -> int:
    """Host memory for blocks: as asked for, and what an archive needs to hand over a prompt."""
    if config.kv_cache_dir is None:
        return config.swap_space_bytes
    from legato.exec.kv import KvLayout
    from legato.exec.weights.checkpoint import open_checkpoint

    spec = open_checkpoint(path, quantize=config.quantize).spec
    layout = KvLayout.of(spec, block_tokens=config.block_tokens, dtype=config.kv_dtype)
    longest = min(config.max_model_len or spec.context_length, config.kv_tokens or spec.context_length)
    one = layout.blocks_for(longest) * layout.block_bytes
    return max(config.swap_space_bytes, min(one, max(_STAGING_BYTES, layout.block_bytes)))


def _host_blocks(config: EngineConfig, loaded: LoadedModel) -> tuple[int, str]:
    """Blocks of host memory that the scheduler may use, and why: copying must be quicker than computing."""
    from legato.exec.swap import measure_swap

    if loaded.host is None:
        return 0, ""
    cost = measure_swap(
        loaded.backend,
        loaded.host,
        block_tokens=loaded.block_tokens,
        kv_blocks=loaded.kv_blocks,
        max_rows=min(config.max_num_batched_tokens, loaded.max_model_len),
    )
    used = cost.is_worthwhile or config.kv_cache_dir is not None
    return (loaded.host.slots, f"swap: {cost}") if used else (0, f"no swap: {cost}")


def _open_archive(
    config: EngineConfig, path: Path, loaded: LoadedModel, report: ReportProgress
) -> tuple[bytes, PoolArchive | None, str]:
    """What names this model's blocks, and the archive of them, if one is wanted."""
    if config.kv_cache_dir is None:
        return b"", None, ""
    from legato.exec.fingerprint import model_fingerprint
    from legato.exec.pool_archive import PoolArchive, open_disk_archive

    assert loaded.host is not None
    options = {
        "activations": config.activations,
        "block_tokens": str(config.block_tokens),
        "kv_dtype": config.kv_dtype,
        "quantize": str(config.quantize),
    }
    root = model_fingerprint(path, options, lambda done, total: report("naming", done, total))
    folder = Path(config.kv_cache_dir).expanduser()
    disk = open_disk_archive(folder, root, loaded.backend.kv.block_nbytes, config.kv_cache_bytes or 10 << 30)
    notice = f"{len(disk):,} blocks ({format_size(disk.nbytes)}) of this model in {folder}"
    return root, PoolArchive(disk, loaded.backend.kv, loaded.host), notice


def _kv_tokens(config: EngineConfig, path: Path) -> int | None:
    """Tokens of the KV pool as far as the config says: given, or what fits the memory given."""
    if config.kv_memory_bytes is None:
        return config.kv_tokens
    from legato.errors import ConfigError
    from legato.exec.kv import KvLayout
    from legato.exec.weights.checkpoint import open_checkpoint

    spec = open_checkpoint(path, quantize=config.quantize).spec
    layout = KvLayout.of(spec, block_tokens=config.block_tokens, dtype=config.kv_dtype)
    blocks = config.kv_memory_bytes // layout.block_bytes
    if not blocks:
        raise ConfigError(
            f"kv_memory is {config.kv_memory_bytes} bytes; one block of {config.block_tokens} tokens takes"
            f" {layout.block_bytes}"
        )
    return blocks * config.block_tokens
