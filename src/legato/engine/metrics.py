"""What the engine and its requests did, as counters, gauges and histograms in Prometheus' text format.

No registry and no globals: an `EngineMetrics` belongs to one service. Names follow vLLM's where the meaning is the
same, so that existing dashboards work; Legato's own begin with `legato_`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from legato.core.pacer import LateCause
from legato.engine.wire import EngineInfo, StepStats

MOST_TENANTS, OTHER_TENANTS = 64, "(others)"
LATE_CAUSES = get_args(LateCause)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
TTFT_SECONDS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
ITL_SECONDS = (
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
E2E_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Histogram:
    """Counts of observations at most each bound. `observe` costs a third of a microsecond: it runs once a token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def lines(self, name: str, labels: str) -> list[str]:
        """Samples in the text format: cumulative buckets, sum, count."""
        out, running = [], 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            running += count
            edge = "+Inf" if bound is None else format(bound, "g")
            out.append(f'{name}_bucket{{{labels},le="{edge}"}} {running}')
        out.append(f"{name}_sum{{{labels}}} {self._sum:.9g}")
        out.append(f"{name}_count{{{labels}}} {running}")
        return out


@dataclass(slots=True)
class Served:
    """What a tenant was given. `prompt_tokens`: without those found in the cache."""

    prompt_tokens: int = 0
    generated_tokens: int = 0


class EngineMetrics:
    """Everything `/metrics` shows. Fed by the service, once a step and once a request event; read by the server."""

    def __init__(self) -> None:
        self.alive = False
        self.last_step = StepStats()
        self.steps = 0
        self.computed_tokens = 0
        self.chunk_tokens_total = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.step_seconds = Histogram(STEP_SECONDS)
        self.step_gap_seconds = Histogram(STEP_SECONDS)
        self.step_rows = Histogram(TOKENS)
        self.chunk_tokens = Histogram(TOKENS)
        self.ttft_seconds = Histogram(TTFT_SECONDS)
        self.itl_seconds = Histogram(ITL_SECONDS)
        self.e2e_seconds = Histogram(E2E_SECONDS)
        self.shed = 0
        self.wishes: dict[tuple[str, bool], int] = {}
        """How often which wish was kept, or not."""
        self._served: dict[str, Served] = {}

    def served(self, tenant: str) -> Served:
        """Where to count what a tenant gets: one of its own for the first 64, then one for all others."""
        if tenant not in self._served and len(self._served) >= MOST_TENANTS:
            tenant = OTHER_TENANTS
        return self._served.setdefault(tenant, Served())

    def record_wish(self, wish: str, *, kept: bool) -> None:
        """Counts what a request asked for in time, and whether it got it."""
        self.wishes[wish, kept] = self.wishes.get((wish, kept), 0) + 1

    def record_step(self, stats: StepStats) -> None:
        """Counts one step."""
        self.last_step = stats
        if not stats.rows:
            return
        self.steps += 1
        self.computed_tokens += stats.rows
        self.chunk_tokens_total += stats.chunk_tokens
        self.preemptions += stats.preempted
        self.step_seconds.observe(stats.duration_s)
        self.step_rows.observe(stats.rows)
        if stats.gap_s >= 0.0:
            self.step_gap_seconds.observe(stats.gap_s)
        if stats.chunk_tokens:
            self.chunk_tokens.observe(stats.chunk_tokens)

    def record_finish(self, reason: str, e2e_s: float) -> None:
        """Counts one finished sequence by reason."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.e2e_seconds.observe(e2e_s)

    def render(self, model_name: str, info: EngineInfo) -> str:
        """The page, in Prometheus' text format 0.0.4."""
        labels = f'model_name="{_escape(model_name)}"'
        last = self.last_step
        used = 1.0 - last.free_blocks / info.kv_blocks if info.kv_blocks and last.free_blocks >= 0 else 0.0
        out: list[str] = []

        def scalar(name: str, kind: str, text: str, value: float, extra: str = "") -> None:
            if not extra or not out or not any(line.startswith(f"# TYPE {name} ") for line in out):
                out.append(f"# HELP {name} {text}")
                out.append(f"# TYPE {name} {kind}")
            out.append(f"{name}{{{labels}{extra}}} {value:.9g}")

        def histogram(name: str, text: str, values: Histogram) -> None:
            out.append(f"# HELP {name} {text}")
            out.append(f"# TYPE {name} histogram")
            out.extend(values.lines(name, labels))

        scalar("legato_engine_up", "gauge", "1 while the engine process lives.", float(self.alive))
        scalar("vllm:num_requests_running", "gauge", "Sequences that hold a slot.", last.running)
        scalar("vllm:num_requests_waiting", "gauge", "Sequences that wait for a slot.", last.waiting)
        scalar("vllm:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1.", used)
        scalar("legato_kv_blocks", "gauge", "KV blocks in the pool.", info.kv_blocks)
        scalar("legato_kv_free_blocks", "gauge", "KV blocks not in use.", max(last.free_blocks, 0))
        scalar("vllm:num_preemptions_total", "counter", "Sequences preempted.", self.preemptions)
        if info.itl_s:
            for name, text, value in (
                ("legato_itl_budget_seconds", "The gap between tokens that steps are planned for.", info.itl_s),
                ("legato_step_prediction_error_median", "Of the last 512 steps, relative.", last.pace.median_error),
                ("legato_step_prediction_error_p95", "95 percent of steps are nearer.", last.pace.p95_error),
                ("legato_step_prediction_margin", "Predictions are planned with so much more.", last.pace.margin),
                ("legato_machine_slowdown", "Steps take so many times what they took at first.", last.pace.scale),
                ("legato_memory_slowdown", "Reading takes so many times more than that.", last.pace.memory_scale),
            ):
                scalar(name, "gauge", text, value)
            for cause in LATE_CAUSES:
                text = "Tokens later than the gap that is planned for, by cause."
                scalar("legato_late_tokens_total", "counter", text, last.pace.late.get(cause, 0), f',cause="{cause}"')
        for (wish, kept), count in sorted(self.wishes.items()):
            text = "Wishes of requests, kept or not: ttft (also of --ttft-ms), itl, deadline."
            extra = f',wish="{wish}",kept="{"yes" if kept else "no"}"'
            scalar("legato_wishes_total", "counter", text, count, extra)
        scalar("legato_requests_shed_total", "counter", "Refused: the first token would have come too late.", self.shed)
        if info.policy == "fair":
            for tenant, served in sorted(self._served.items()):
                extra = f',tenant="{_escape(tenant)}"'
                text = "Prompt tokens computed for a tenant, of requests that got a first token."
                scalar("legato_tenant_prompt_tokens_total", "counter", text, served.prompt_tokens, extra)
            for tenant, served in sorted(self._served.items()):
                extra, text = f',tenant="{_escape(tenant)}"', "Tokens generated for a tenant."
                scalar("legato_tenant_generation_tokens_total", "counter", text, served.generated_tokens, extra)
        cache, block_bytes = last.cache, info.kv_block_bytes
        hit_rate = cache.hit_tokens / cache.queried_tokens if cache.queried_tokens else 0.0
        for name, kind, text, value in (
            ("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up.", cache.queried_tokens),
            ("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", cache.hit_tokens),
            ("legato_prefix_cache_hit_rate", "gauge", "Share of prompt tokens found since the start.", hit_rate),
            ("legato_prefix_cache_bytes", "gauge", "KV that can be found again.", cache.cached_blocks * block_bytes),
            ("legato_prefix_cache_evictions_total", "counter", "Cached blocks given up.", cache.evictions),
            ("legato_swap_bytes", "gauge", "KV kept in host memory.", cache.swapped_blocks * block_bytes),
            ("legato_restored_blocks_total", "counter", "Blocks copied back from there.", cache.restored_blocks),
            ("legato_overtakes_total", "counter", "Admissions before one that did not fit.", cache.overtakes),
        ):
            scalar(name, kind, text, value)
        scalar(
            "vllm:prompt_tokens_total",
            "counter",
            "Prompt tokens of requests that got a first token.",
            self.prompt_tokens,
        )
        scalar("vllm:generation_tokens_total", "counter", "Tokens generated.", self.generated_tokens)
        scalar("legato_computed_tokens_total", "counter", "Rows computed, prompt and generated.", self.computed_tokens)
        scalar("legato_chunk_tokens_total", "counter", "Prefill rows computed.", self.chunk_tokens_total)
        scalar("legato_steps_total", "counter", "Steps.", self.steps)
        for reason, count in sorted(self.finished.items()):
            text = "Sequences finished, by reason."
            scalar("vllm:request_success_total", "counter", text, count, f',finished_reason="{reason}"')
        histogram("legato_step_duration_seconds", "Time in one engine step.", self.step_seconds)
        histogram(
            "legato_step_gap_seconds", "Time from the end of a step to the next one's start.", self.step_gap_seconds
        )
        histogram("legato_step_rows", "Rows of one step, decodes and prefill chunks together.", self.step_rows)
        histogram("legato_step_chunk_tokens", "Prefill rows of one step, where there are any.", self.chunk_tokens)
        histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", self.ttft_seconds)
        histogram("vllm:inter_token_latency_seconds", "Between tokens of one sequence.", self.itl_seconds)
        histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", self.e2e_seconds)
        return "\n".join(out) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
