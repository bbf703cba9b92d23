"""From a path to a model that carries out plans: weights packed, KV pool sized, program recorded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from legato._native import isa
from legato.core.budget import StepBudget
from legato.errors import ConfigError
from legato.exec.cpu.backend import Activations, CpuBackend, choose_shifts, make_kv, record
from legato.exec.cpu.pack import load_nbytes, pack_weights, packed_nbytes
from legato.exec.executor import ModelExecutor
from legato.exec.host_pool import HostPool
from legato.exec.kv import KvDtype, KvLayout, default_pool_blocks
from legato.exec.memory import Footprint, available_bytes, process_memory, require_room
from legato.exec.rope import rope_nbytes, rope_table
from legato.exec.spec import ModelSpec
from legato.exec.weights.checkpoint import open_checkpoint
from legato.exec.weights.quantize import Quantize
from legato.exec.weights.read import Progress

# Rows of float32 [vocab] the sampler has in hand at once: copy, weights, masks, sorted weights.
_SAMPLER_ROWS = 8
_LESS_MEMORY = "use a smaller or more strongly quantised model, or free memory"
_LESS_KV = "lower --kv-tokens, --max-model-len or --swap-space, or use --kv-dtype f16"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `max_model_len`: positions a request may reach. `footprint`: predicted, see `Footprint`.

    `host`: memory for blocks that the pool has to give up, if any was asked for.
    """

    spec: ModelSpec
    executor: ModelExecutor
    backend: CpuBackend
    footprint: Footprint
    kv_blocks: int
    block_tokens: int
    max_model_len: int
    threads: int
    host: HostPool | None = None

    @property
    def kv_tokens(self) -> int:
        """Positions the pool holds over all requests."""
        return self.kv_blocks * self.block_tokens


def load_model(
    path: Path,
    *,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 64,
    kv_tokens: int | None = None,
    kv_dtype: KvDtype = "f16",
    block_tokens: int = 32,
    activations: Activations = "int8",
    quantize: Quantize | None = None,
    threads: int = 0,
    max_model_len: int | None = None,
    max_logit_rows: int | None = None,
    swap_space_bytes: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """The model at `path` (a GGUF file or a safetensors folder), on the native kernels.

    `max_num_batched_tokens`, `max_num_seqs`: rows and sequences of the largest step. `kv_tokens`: size of the KV pool,
    rounded up to blocks; None: 1 GiB, more if one sequence needs it, at most a quarter of the available memory.
    `threads` 0: one a core this process may use. `max_model_len` None: the model's context. `max_logit_rows` None:
    as many as `StepBudget` allows. `swap_space_bytes`: host memory for blocks of KV, rounded down to whole ones.
    `progress(done, total)`: bytes of the file. Raises ModelError for the file, ConfigError for the options, OutOfMemory
    before memory is taken that is not there.
    """
    checkpoint = open_checkpoint(path, quantize=quantize)
    base = process_memory().resident
    spec = checkpoint.spec
    length = _model_length(spec, max_model_len)
    for name, value in (("max_num_batched_tokens", max_num_batched_tokens), ("max_num_seqs", max_num_seqs)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; the least that serves a request is 1")
    if kv_tokens is not None and kv_tokens < 1:
        raise ConfigError(f"kv_tokens is {kv_tokens}; the pool needs at least 1 token")
    if activations == "bf16" and isa() != "amx":
        raise ConfigError(f"activations bf16 need AMX; this machine's kernels are {isa()}: use int8")
    if threads < 0:
        raise ConfigError(f"threads is {threads}; 0 chooses, else give at least 1")
    layout = KvLayout.of(spec, block_tokens=block_tokens, dtype=kv_dtype)
    weights_nbytes, passing_nbytes = packed_nbytes(checkpoint, quantize), load_nbytes(checkpoint, quantize)
    available = available_bytes()
    require_room("the model", weights_nbytes + passing_nbytes, available, _LESS_MEMORY)
    if kv_tokens is not None:
        length = min(length, layout.blocks_for(kv_tokens) * block_tokens)
        require_room(
            "the model with its KV pool",
            weights_nbytes + layout.blocks_for(kv_tokens) * layout.block_bytes,
            available,
            _LESS_KV,
        )
    tables_nbytes = sum(rope_nbytes(rope, length) for rope in spec.ropes)
    weights = pack_weights(checkpoint, tuple(rope_table(rope, length) for rope in spec.ropes), progress)

    threads = threads or default_threads()
    limits = {"max_rows": max_num_batched_tokens, "max_seqs": max_num_seqs, "threads": threads}
    limits["max_logit_rows"] = max_logit_rows or StepBudget(max_num_batched_tokens, max_num_seqs).logit_rows
    # Scratch does not depend on the size of the pool: a pool of one block tells it before the real one exists.
    trial = record(spec, weights, make_kv(layout, 1), activations=activations, **limits)
    scratch_nbytes = trial.scratch_nbytes + 4 * spec.vocab * _SAMPLER_ROWS
    room = available_bytes() - scratch_nbytes
    if kv_tokens is not None:
        blocks = layout.blocks_for(kv_tokens)
    else:
        blocks = _automatic_blocks(layout, length, max_num_batched_tokens, max_num_seqs, room)
    host_blocks = layout.blocks_in(swap_space_bytes)
    if swap_space_bytes and not host_blocks:
        raise ConfigError(f"swap_space is {swap_space_bytes} bytes; one block of KV takes {layout.block_bytes}")
    swap_nbytes = host_blocks * layout.block_bytes
    require_room("the KV pool", blocks * layout.block_bytes + swap_nbytes, room, _LESS_KV)
    footprint = Footprint(
        base=base,
        weights=weights_nbytes,
        load=passing_nbytes,
        tables=tables_nbytes,
        kv=blocks * layout.block_bytes,
        scratch=scratch_nbytes,
        swap=swap_nbytes,
    )
    shifts = choose_shifts(spec, weights, activations=activations, threads=threads)
    kv = make_kv(layout, blocks)
    kv.touch()
    program = record(spec, weights, kv, activations=activations, **limits)
    program.equalise(shifts)
    backend = CpuBackend(program, kv, weights, threads)
    host = HostPool(kv, host_blocks) if host_blocks else None
    return LoadedModel(
        spec=spec,
        executor=ModelExecutor(backend, block_tokens=block_tokens, host=host),
        backend=backend,
        footprint=footprint,
        kv_blocks=blocks,
        block_tokens=block_tokens,
        max_model_len=length,
        threads=threads,
        host=host,
    )


def default_threads() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _model_length(spec: ModelSpec, asked: int | None) -> int:
    if asked is None:
        return spec.context_length
    if not 2 <= asked <= spec.context_length:
        raise ConfigError(f"max_model_len {asked} is not in [2, {spec.context_length}], the context of {spec.name}")
    return asked


def _automatic_blocks(layout: KvLayout, length: int, step_tokens: int, max_num_seqs: int, room: int) -> int:
    blocks = default_pool_blocks(layout, max_model_len=length, max_num_seqs=max_num_seqs, available_bytes=room)
    # A pool that cannot hold one full step, or one full sequence if that is less, is of no use.
    return max(blocks, layout.blocks_for(min(length, step_tokens)))
