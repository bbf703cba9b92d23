"""`EngineConfig`: every option of the engine, with its unit, default and bound, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from legato.errors import ConfigError

KvDtype = Literal["f16", "f32"]
Activations = Literal["int8", "bf16", "f32"]
Quantize = Literal["int8", "int4"]
Prefer = Literal["itl", "ttft"]
PolicyName = Literal["fcfs", "slo", "fair"]
AUTO_ITL = 0.0

DEFAULT_MODEL = "smollm2-135m"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(ki|mi|gi|k|m|g)?b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine. ConfigError names the option, its value and the bound. Limits of the model come later.

    `model`: a GGUF file, a safetensors folder, a hub id or an alias.
    `max_num_batched_tokens`: rows of one step, decodes and prefill chunks together: the step budget.
    `max_num_seqs`: sequences running at once, at most the budget.
    `max_model_len`: tokens of one sequence, prompt and answer; None: the model's context.
    `kv_tokens`, `kv_memory_bytes`: size of the KV pool, one of them; None: 1 GiB, or what one sequence needs,
    at most a quarter of the available memory.
    `kv_dtype`: numbers in the KV pool. `block_tokens`: tokens of a KV block, a multiple of 16.
    `activations`: what the inputs of quantised weights are multiplied as: int8, integers with a scale for each 32; bf16
    (needs AMX), faster for prompts and many streams, slower for one stream; f32, for comparison with references.
    `itl_ms`: the longest gap wanted between two tokens of a stream; each step gets as many prompt tokens as fit. 0: by
    what a decode step takes on this machine; None: steps are bounded by their tokens alone. `prefill_share`: of that
    gap, what prompts have at least; None: 0.2. `prefer`: which of the two is kept when both cannot be; None: itl.
    `ttft_ms`: how soon a first token is wanted of a request that does not say it itself; None: whenever.
    `policy`: fcfs, first come first served; slo, by deadline, then the shortest prompt first, where waiting counts;
    fair, tenants share by `tenant_weights`, ("name", weight), 1.0 for all others, and each's requests go as in slo.
    `long_prefill_token_threshold`: tokens of one prompt in a step, at most. `max_num_partial_prefills`: prompts that a
    step computes a part of, at most. None: as many as there is room for.
    `async_scheduling`: plans a step while the one before it computes.
    `enable_prefix_caching`: keeps the KV of what was computed, for prompts that begin alike. `swap_space_bytes`: host
    memory for KV that the pool has to give up, used if copying is quicker than computing. `kv_cache_dir`: a folder, of
    `kv_cache_bytes` at most (None: 10 GiB), where KV outlives the process.
    `quantize`: quantises 16-bit weights while loading. `threads`: of the kernels; 0: one a core.
    `chat_template`: a file to use instead of the model's own template.
    """

    model: str = DEFAULT_MODEL
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    kv_tokens: int | None = None
    kv_memory_bytes: int | None = None
    kv_dtype: KvDtype = "f16"
    block_tokens: int = 32
    itl_ms: float | None = None
    prefill_share: float | None = None
    prefer: Prefer | None = None
    ttft_ms: float | None = None
    policy: PolicyName = "slo"
    tenant_weights: tuple[tuple[str, float], ...] = ()
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    swap_space_bytes: int = 0
    kv_cache_dir: str | None = None
    kv_cache_bytes: int | None = None
    activations: Activations = "int8"
    quantize: Quantize | None = None
    threads: int = 0
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty; name a file, a folder, a hub id or an alias (`legato pull --list`)")
        self._bound("max_num_batched_tokens", 1, 1 << 20)
        self._bound("max_num_seqs", 1, 1 << 16)
        self._bound("max_model_len", 2, 1 << 24)
        self._bound("kv_tokens", 1, 1 << 32)
        self._bound("kv_memory_bytes", 1, 1 << 48)
        self._bound("block_tokens", 16, 1 << 12)
        self._bound("threads", 0, 1 << 10)
        self._bound("swap_space_bytes", 0, 1 << 48)
        self._bound("kv_cache_bytes", 1, 1 << 48)
        self._bound("long_prefill_token_threshold", 1, 1 << 20)
        self._bound("max_num_partial_prefills", 1, 1 << 16)
        if self.kv_cache_bytes is not None and self.kv_cache_dir is None:
            raise ConfigError("kv_cache_size is that of kv_cache_dir, and there is none; name a folder")
        if not self.enable_prefix_caching and (self.swap_space_bytes or self.kv_cache_dir is not None):
            raise ConfigError(
                "swap_space and kv_cache_dir keep blocks of the prefix cache; enable prefix caching, or leave them out"
            )
        if self.block_tokens % 16:
            raise ConfigError(f"block_tokens is {self.block_tokens}; it must be a multiple of 16")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs is {self.max_num_seqs} and a step holds {self.max_num_batched_tokens} tokens; every"
                " running sequence needs one: raise max_num_batched_tokens or lower max_num_seqs"
            )
        if self.kv_tokens is not None and self.kv_memory_bytes is not None:
            raise ConfigError("kv_tokens and kv_memory both size the KV pool; give one of them")
        if self.itl_ms is not None and not (self.itl_ms == AUTO_ITL or 1.0 <= self.itl_ms <= 600_000.0):
            raise ConfigError(f"itl_ms is {self.itl_ms:g}; it must be from 1 to 600,000 milliseconds")
        for name in ("prefill_share", "prefer"):
            if self.itl_ms is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is a part of the gap between tokens, and none is planned for; give itl_ms")
        if self.ttft_ms is not None and not 1.0 <= self.ttft_ms <= 3_600_000.0:
            raise ConfigError(f"ttft_ms is {self.ttft_ms:g}; it must be from 1 to 3,600,000 milliseconds")
        if self.ttft_ms is not None and self.policy == "fcfs":
            raise ConfigError("ttft_ms orders requests, and fcfs keeps their order; choose another policy")
        if self.tenant_weights and self.policy != "fair":
            raise ConfigError(f"tenant_weights mean nothing to policy {self.policy}; choose fair")
        for tenant, weight in self.tenant_weights:
            if not 0.001 <= weight <= 1000.0:
                raise ConfigError(f"the weight of tenant '{tenant}' is {weight:g}; it must be from 0.001 to 1,000")
        if self.prefill_share is not None and not 0.0 <= self.prefill_share <= 0.9:
            raise ConfigError(f"prefill_share is {self.prefill_share:g}; it must be from 0 to 0.9")
        for name, choices in (
            ("kv_dtype", KvDtype),
            ("activations", Activations),
            ("quantize", Quantize),
            ("prefer", Prefer),
            ("policy", PolicyName),
        ):
            value = getattr(self, name)
            if value not in get_args(choices) and not (name in ("quantize", "prefer") and value is None):
                raise ConfigError(f"{name} is '{value}'; it must be one of {', '.join(get_args(choices))}")

    @classmethod
    def of(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """The config of keyword options. ConfigError for one that does not exist, with those that do."""
        known = {field.name for field in fields(cls)} - {"model"}
        for name in options:
            if name not in known:
                raise ConfigError(f"there is no option '{name}'; there are {', '.join(sorted(known))}")
        return cls(model, **options)

    def _bound(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")


def parse_size(text: str) -> int:
    """Bytes in "1GiB", "512M", "2.5g" or a bare number. ConfigError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"'{text}' is no size; write 512MiB, 1GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def format_size(nbytes: int) -> str:
    """Bytes for people: "83 MiB", "1.2 GiB"."""
    if nbytes < 1 << 20:
        return f"{nbytes / (1 << 10):.0f} KiB"
    if nbytes < 1 << 30:
        return f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / (1 << 30):.1f} GiB"
