"""`calibrate`: what steps take on this machine, with this model: real ones, timed before it serves."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from legato.core.budget import StepBudget
from legato.core.cost import Sample
from legato.core.host import Move
from legato.core.plan import StepPlan
from legato.core.request import Request, Sampling
from legato.core.shape import Attention, StepShape
from legato.exec.model import LoadedModel
from legato.exec.spec import ModelSpec

Progress = Callable[[int, int], None]
Clock = Callable[[], float]

MOST_PREFIX = 8192
MOST_RUNS = 8
# A probe is known once its two shortest runs are as near as this, of this many at least.
_AGREE, _FEWEST_RUNS = 1.03, 3
# Steps of this length are timed twice only: what disturbs them is short beside them.
_LONG_S, _LONG_RUNS = 0.1, 2
# Those of up to this length twice at least, when the time is over too: decodes say how long a gap may be.
_SHORT_S, _SHORT_RUNS = 0.02, 2
# Requests of a step have tokens of their own: what sampling takes depends on the logits.
_OWN_TOKENS, _REQUESTS = 61, 64
# A probe that would take more than this share of the time there is, is left out.
_MOST_SHARE = 1 / 16

GREEDY, DRAWN, LOGPROBS = Sampling(), Sampling(temperature=0.8, seed=1), Sampling(logprobs=5)
NUCLEUS = Sampling(temperature=0.8, top_p=0.95, seed=1)


@dataclass(frozen=True, slots=True)
class Timing:
    """Steps and what they take where nobody else is on the machine, as far as that was to be seen.

    `noise`: how much longer than that a run was, of the middle probe the middle run. Some 0.02 on a quiet machine; from
    0.1 on others were on it, and what was taken for their absence may have been less of them.
    """

    samples: tuple[Sample, ...]
    noise: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A step to be timed. `decodes`: a position each, all sampled. `chunk`: (start, rows), sampled if it `ends`."""

    decodes: tuple[int, ...] = ()
    chunk: tuple[int, int] | None = None
    ends: bool = False
    sampling: Sampling = GREEDY

    @property
    def work(self) -> float:
        """About how long it takes, in rows: a key behind a row counts a thousandth."""
        start, rows = self.chunk or (0, 0)
        return len(self.decodes) + rows + (sum(self.decodes) + rows * (start + rows / 2)) / 1000


def attention_of(spec: ModelSpec) -> Attention:
    """What rows of this model look back at, on the CPU kernels.

    They take 96 query rows at a time, 48 of wide heads, and the heads that share keys are rows as well
    (`attention_block_rows` in native/attention.hpp). Steps of less than 64 rows have smaller blocks; that is left out.
    """
    windows = [layer.window for layer in spec.layers]
    block_rows = (96 if spec.head_dim <= 128 else 48) * spec.kv_heads // spec.heads
    return Attention(
        tuple((windows.count(window), window) for window in dict.fromkeys(windows)), block_rows=max(1, block_rows)
    )


def calibrate(
    loaded: LoadedModel,
    budget: StepBudget,
    *,
    limit_s: float = 8.0,
    progress: Progress | None = None,
    now: Clock = time.perf_counter,
) -> Timing:
    """Steps of all kinds that `budget` allows, and what they took. Overwrites the pool of `loaded`: it must be unused.

    Each probe is timed three to eight times, until its two shortest runs agree, in rounds of an order of their own, so
    that a slow spell hits all kinds alike. Its sample is the second shortest: whoever shares the machine makes steps
    longer, never shorter, and of two runs the shorter one will do. Once a first round is done, it ends when `limit_s`
    is over; steps that are long beside that are left out. `progress(done, total)`: thousandths of the time.
    """
    timer = StepTimer(loaded, now)
    started_s = now()
    probes = design(loaded, budget)
    rate = _seconds_a_work(timer, probes)
    probes = [probe for probe in probes if probe.work * rate <= limit_s * _MOST_SHARE]
    taken_s: dict[Probe, list[float]] = {probe: [] for probe in probes}
    order = random.Random(0)
    for _ in range(MOST_RUNS):
        order.shuffle(probes)
        for probe in probes:
            elapsed_s = now() - started_s
            if _needs_a_run(taken_s[probe], elapsed_s > limit_s):
                taken_s[probe].append(timer.seconds(probe))
            if progress is not None:
                progress(min(999, int(1000 * elapsed_s / limit_s)), 1000)
    if progress is not None:
        progress(1000, 1000)
    attention = attention_of(loaded.spec)
    samples = tuple(Sample(timer.shape(probe, attention), _undisturbed(runs)) for probe, runs in taken_s.items())
    repeated = [median(runs) / min(runs) - 1.0 for runs in taken_s.values() if len(runs) > 1]
    return Timing(samples, median(repeated) if repeated else 0.0)


def _needs_a_run(runs: Sequence[float], is_over: bool) -> bool:
    """Whether a probe that took `runs` is to be timed once more. `is_over`: the time that there is."""
    if not runs:
        return True
    if is_over:
        return len(runs) < _SHORT_RUNS and runs[0] <= _SHORT_S
    if len(runs) >= _LONG_RUNS and min(runs) > _LONG_S:
        return False
    return len(runs) < _FEWEST_RUNS or _undisturbed(runs) > _AGREE * min(runs)


def _undisturbed(runs: Sequence[float]) -> float:
    """The second shortest; the shortest of one or two."""
    return sorted(runs)[len(runs) > 2]


def design(loaded: LoadedModel, budget: StepBudget) -> list[Probe]:
    """Probes that tell every term of a `StepCost` from the others, as far as the model's context and pool allow."""
    rows = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    batches = (1, 2, 4, 8, 12, 16, 24, 32, 64)
    probes = [Probe(decodes=(at,) * n) for n in batches for at in (31, 255, 1023, 4095)]
    probes += [Probe(decodes=(at,)) for at in (2047, MOST_PREFIX - 1)]
    probes += [Probe(chunk=(0, n), ends=bool(i % 2)) for i, n in enumerate(rows)]
    # Around multiples of 6, 12 and 16: the sizes of the kernels' blocks of rows show there.
    probes += [Probe(chunk=(0, n)) for n in (1, 7, 10, 13, 20, 25, 36, 37, 60, 61, 73)]
    probes += [Probe(chunk=(at, n)) for at in (1024, 4096) for n in (1, *rows[::3])]
    probes += [Probe(chunk=(MOST_PREFIX - n, n)) for n in (16, 64, 256)]
    # A short chunk far along is the end of a prompt that is read beside many streams.
    probes += [Probe(chunk=(at, n)) for at in (4096, 7168) for n in (4, 8, 12)]
    probes += [
        Probe(decodes=(at,) * n, chunk=(start, chunk), ends=start == 0)
        for n, at in ((2, 512), (8, 128), (16, 64), (32, 128))
        for start, chunk in ((0, 32), (512, 128), (2048, 64), (0, 256), (4096, 16))
    ]
    probes += [
        Probe(decodes=tuple(range(at, at + 8 * n, 8)), sampling=sampling)
        for n, at in ((1, 64), (3, 200), (6, 500), (12, 20), (24, 100))
        for sampling in (DRAWN, NUCLEUS, LOGPROBS)
    ]
    return [probe for probe in probes if fits(probe, loaded, budget)]


def fits(probe: Probe, loaded: LoadedModel, budget: StepBudget) -> bool:
    """Whether `loaded` can carry it out within `budget`."""
    start, rows = probe.chunk or (0, 0)
    stops = [*(at + 1 for at in probe.decodes), start + rows]
    return (
        len(probe.decodes) + (rows > 0) <= budget.max_seqs
        and len(probe.decodes) + rows <= budget.max_tokens
        and max(stops) <= loaded.max_model_len
        and sum(-(-stop // loaded.block_tokens) for stop in stops) <= loaded.kv_blocks
    )


def _seconds_a_work(timer: StepTimer, probes: Sequence[Probe]) -> float:
    """Runs a few of `probes`, the shortest first, none of them long, and returns seconds a unit of `Probe.work`."""
    ladder = sorted(probes, key=lambda probe: probe.work)[:: max(1, len(probes) // 16)]
    rate = 0.0
    for probe in ladder[: -(-len(ladder) // 2)]:
        rate = timer.seconds(probe) / probe.work
    return rate


class StepTimer:
    """Runs probes on a loaded model. It is the `RowSource` of their requests: those of a step have disjoint blocks."""

    def __init__(self, loaded: LoadedModel, now: Clock = time.perf_counter) -> None:
        self._executor = loaded.executor
        self._block_tokens = loaded.block_tokens
        self._now = now
        vocab, draw = loaded.spec.vocab, random.Random(1)
        ids = loaded.max_model_len + 1 + _OWN_TOKENS * _REQUESTS
        self._tokens = array("i", (draw.randrange(vocab) for _ in range(ids)))
        self._known: list[array[int]] = []
        self._requests: list[Request] = []
        self._tables: list[array[int]] = []
        loaded.executor.bind(self)

    def seconds(self, probe: Probe) -> float:
        """What the step takes, sampling included."""
        plan = self._plan(probe)
        started_s = self._now()
        self._executor.execute(plan)
        return self._now() - started_s

    def shape(self, probe: Probe, attention: Attention) -> StepShape:
        """Its shape."""
        return StepShape.of(self._plan(probe), attention, self.request)

    def request(self, request_id: int) -> Request:
        """See `RowSource`."""
        return self._requests[request_id]

    def tokens(self, request_id: int) -> Sequence[int]:
        """See `RowSource`."""
        return self._known[request_id]

    def blocks(self, request_id: int) -> Sequence[int]:
        """See `RowSource`."""
        return self._tables[request_id]

    def moves(self, step: int) -> Sequence[Move]:
        """None."""
        return ()

    def _plan(self, probe: Probe) -> StepPlan:
        chunk = [probe.chunk] if probe.chunk else []
        entries = [*((at, 1) for at in probe.decodes), *chunk]
        self._requests = [Request(i, (0,), probe.sampling) for i in range(len(entries))]
        self._known, self._tables, first = [], [], 0
        for i, (start, count) in enumerate(entries):
            own = i % _REQUESTS * _OWN_TOKENS
            self._known.append(self._tokens[own : own + start + count])
            blocks = -(-(start + count) // self._block_tokens)
            self._tables.append(array("i", range(first, first + blocks)))
            first += blocks
        starts, counts = zip(*entries, strict=True)
        samples = (True,) * len(probe.decodes) + (probe.ends,) * len(chunk)
        return StepPlan(0, tuple(range(len(entries))), starts, counts, samples, decodes=len(probe.decodes))
