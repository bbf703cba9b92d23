"""The composition root: from a config to an engine, to text, to a served model. Alone knows both engine and exec."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from legato.config import EngineConfig
from legato.core.budget import StepBudget
from legato.core.policy import FCFS
from legato.core.state import SchedulerState
from legato.engine.loop import Engine
from legato.engine.text import ModelText
from legato.engine.wire import EngineInfo
from legato.engine.worker import EngineFactory, ReportProgress


def build_engine(config: EngineConfig, path: Path, report: ReportProgress) -> tuple[Engine, EngineInfo]:
    """The engine for the model at `path`, ready to step, and what it is. Raises ModelError, ConfigError, OutOfMemory.

    Runs wherever it is called: in the engine's own process for the server, in the caller's for offline use.
    """
    from legato.exec.model import load_model

    start_s = time.monotonic()
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
        progress=lambda done, total: report("loading", done, total),
    )
    state = SchedulerState(loaded.kv_blocks, loaded.block_tokens, loaded.max_model_len)
    budget = StepBudget(config.max_num_batched_tokens, config.max_num_seqs)
    engine = Engine(state, loaded.executor, FCFS, budget, time.perf_counter)
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
        peak_bytes=footprint.peak,
        load_s=time.monotonic() - start_s,
        description=f"{loaded.spec.architecture}, {len(loaded.spec.layers)} layers, vocabulary {loaded.spec.vocab:,}",
    )
    return engine, info


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
