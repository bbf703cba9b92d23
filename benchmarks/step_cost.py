"""How well the duration of a step is predicted on this machine: calibrated as at a start, then asked about other steps.

    python benchmarks/step_cost.py [--model smollm2-135m] [--steps 200] [--limit 8] [--json]
    python benchmarks/step_cost.py --cpu-time
    python benchmarks/step_cost.py --raw FILE; python benchmarks/step_cost.py --replay FILE

Held-out steps are drawn at random, none as in the calibration: 0 to 32 decodes, contexts and prefixes up to 8,192 or
the model's, a chunk of 1 to 1,024 rows or none. Each is carried out three times, in three rounds of an order of their
own, since other tenants interrupt single steps. Two tables:
  calibrated  the median of the three against the calibration, which knows nothing of what came after it
  followed    each single step against the prediction made just before it, while drift is followed and terms are fitted
              anew, as in the engine
Bar, for what is followed: median error 5 %, 95 % of the steps within 15 %.

--cpu-time, on a busy machine: one thread, and the time that it was on a core instead of the clock's. --replay: no step
is carried out; this version fits to recorded ones and follows them. `steal`: the share of this machine's time that went
elsewhere. `noise`: see `legato.exec.calibrate.Timing`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from legato import _native
from legato.bench.machine import cpu_times, steal_between
from legato.core.budget import StepBudget
from legato.core.cost import Sample
from legato.core.fit import fit
from legato.core.shape import Attention, StepShape
from legato.core.tracker import CostTracker
from legato.exec.calibrate import GREEDY, MOST_PREFIX, NUCLEUS, Probe, StepTimer, attention_of, calibrate, fits
from legato.exec.cost_file import cpu_name
from legato.exec.model import LoadedModel, load_model
from legato.models.pull import resolve

ROUNDS = 3
MOST_DECODES, MOST_CHUNK = 32, 1024
MEDIAN_BAR, P95_BAR = 0.05, 0.15
# So often the engine would have been idle: terms are fitted anew if that is worth it.
IDLE_EVERY = 64


def held_out(loaded: LoadedModel, budget: StepBudget, count: int, seed: int) -> list[Probe]:
    """Random steps, evenly spread in the logarithm of contexts and chunks; a third of them are not greedy."""
    draw = random.Random(seed)
    probes: list[Probe] = []
    longest = min(MOST_PREFIX, loaded.max_model_len)
    while len(probes) < count:
        decodes = draw.choice((0, draw.randint(1, MOST_DECODES), draw.randint(1, MOST_DECODES)))
        chunk = None
        if not decodes or draw.random() < 0.6:
            rows = int(2 ** draw.uniform(0.0, MOST_CHUNK.bit_length() - 1))
            chunk = (draw.choice((0, draw.randint(0, longest - rows))), rows) if rows < longest else (0, longest)
        positions = tuple(int(longest ** draw.uniform(0.3, 1.0)) - 1 for _ in range(decodes))
        probe = Probe(positions, chunk, draw.random() < 0.5, draw.choice((GREEDY, GREEDY, NUCLEUS)))
        if fits(probe, loaded, budget):
            probes.append(probe)
    return probes


@dataclass(frozen=True, slots=True)
class Step:
    """A held-out step that was carried out: the probe's number, the lines of the table it belongs to, what it took."""

    probe: int
    kinds: tuple[str, str]
    shape: StepShape
    seconds: float


def kinds_of(probe: Probe) -> tuple[str, str]:
    """The lines of the table it belongs to."""
    kind = "decodes" if probe.chunk is None else "decodes and a chunk" if probe.decodes else "a chunk"
    return kind, "greedy" if probe.sampling is GREEDY else "drawn, top-p"


def line(kind: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Errors of (predicted, actual) seconds. `bias`: the median of actual over predicted, less 1."""
    ratios = [actual / predicted - 1.0 for predicted, actual in pairs]
    errors = sorted(map(abs, ratios))
    return {
        "kind": kind,
        "steps": len(pairs),
        "ms": round(1e3 * statistics.median(actual for _, actual in pairs), 2),
        "median": round(statistics.median(errors), 4),
        "p95": round(errors[int(0.95 * (len(errors) - 1) + 0.5)], 4),
        "worst": round(errors[-1], 4),
        "bias": round(statistics.median(ratios), 4),
    }


def table(rows: Sequence[tuple[Step, float, float]]) -> list[dict[str, Any]]:
    """A line for each kind of step, and one for all."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for step, predicted, actual in rows:
        for kind in step.kinds:
            kinds.setdefault(kind, []).append((predicted, actual))
    lines = [line(kind, kinds[kind]) for kind in sorted(kinds)]
    return [*lines, line("all", [(predicted, actual) for _, predicted, actual in rows])]


def evaluate(samples: Sequence[Sample], attention: Attention, steps: Sequence[Step]) -> dict[str, Any]:
    """Fits to `samples`, follows `steps` in their order: both tables, and what was learnt."""
    started_s = time.perf_counter()
    cost = fit(samples, attention)
    fit_s = time.perf_counter() - started_s
    tracker, followed, refits = CostTracker(cost, samples), [], 0
    taken_s: dict[int, list[float]] = {}
    for number, step in enumerate(steps, 1):
        taken_s.setdefault(step.probe, []).append(step.seconds)
        followed.append((step, tracker.cost.predict(step.shape), step.seconds))
        tracker.observe(step.shape, step.seconds)
        if number % IDLE_EVERY == 0:
            refits += tracker.refit()
    once = {step.probe: step for step in steps}
    calibrated = [(once[n], cost.predict(once[n].shape), statistics.median(runs)) for n, runs in taken_s.items()]
    lines = table(followed)
    return {
        "samples": len(samples),
        "fit_s": round(fit_s, 3),
        "tile": cost.tile,
        "margin": round(tracker.margin, 3),
        "drift": round(tracker.cost.scale, 3),
        "memory_drift": round(tracker.cost.memory_scale, 3),
        "refits": refits,
        "calibrated": table(calibrated),
        "followed": lines,
        "meets_bar": lines[-1]["median"] <= MEDIAN_BAR and lines[-1]["p95"] <= P95_BAR,
    }


def print_table(title: str, lines: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title:<22}{'steps':>7}{'ms':>9}{'median':>9}{'p95':>9}{'worst':>9}{'bias':>9}")
    for row in lines:
        shares = "".join(f"{100 * row[name]:>8.1f}%" for name in ("median", "p95", "worst", "bias"))
        print(f"{row['kind']:<22}{row['steps']:>7}{row['ms']:>9.2f}{shares}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrates, carries out the held-out steps, and evaluates."""
    now = time.process_time if options.cpu_time else time.perf_counter
    budget = StepBudget(MOST_CHUNK + MOST_DECODES, 64)
    loaded = load_model(
        resolve(options.model),
        max_num_batched_tokens=budget.max_tokens,
        max_num_seqs=budget.max_seqs,
        threads=1 if options.cpu_time else options.threads,
    )
    load_average, before, started_s = os.getloadavg()[0], cpu_times(), time.perf_counter()
    timing = calibrate(loaded, budget, limit_s=options.limit, now=now)
    calibrated_s = time.perf_counter()
    attention = attention_of(loaded.spec)
    timer, probes = StepTimer(loaded, now), held_out(loaded, budget, options.steps, options.seed)
    order, steps = random.Random(2), list[Step]()
    shapes = [timer.shape(probe, attention) for probe in probes]
    for _ in range(ROUNDS):
        for n in order.sample(range(len(probes)), len(probes)):
            steps.append(Step(n, kinds_of(probes[n]), shapes[n], timer.seconds(probes[n])))
    measured_s, after = time.perf_counter(), cpu_times()
    facts = {
        "benchmark": "step_cost",
        "model": options.model,
        "cpu": cpu_name(),
        "isa": _native.isa(),
        "threads": loaded.threads,
        "clock": now.__name__,
        "calibrate_s": round(calibrated_s - started_s, 2),
        "measure_s": round(measured_s - calibrated_s, 1),
        "load_average": load_average,
        "steal": round(steal_between(before, after) or 0.0, 4),
        "noise": round(timing.noise, 3),
    }
    if options.raw:
        data = {
            "facts": facts,
            "attention": asdict(attention),
            "samples": [(asdict(sample.shape), sample.seconds) for sample in timing.samples],
            "held_out": [(step.probe, step.kinds, asdict(step.shape), step.seconds) for step in steps],
        }
        Path(options.raw).write_text(json.dumps(data), encoding="utf-8")
    return {**facts, **evaluate(timing.samples, attention, steps)}


def replay(path: Path) -> dict[str, Any]:
    """Evaluates what --raw wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    attention = Attention(
        tuple((n, window) for n, window in data["attention"]["layers"]), data["attention"]["block_rows"]
    )
    samples = [Sample(StepShape(**shape), seconds) for shape, seconds in data["samples"]]
    steps = [Step(n, tuple(kinds), StepShape(**shape), seconds) for n, kinds, shape, seconds in data["held_out"]]
    return {**data["facts"], **evaluate(samples, attention, steps)}


def main() -> None:
    """Calibrate, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="held-out steps")
    parser.add_argument("--limit", type=float, default=8.0, help="seconds of calibration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of tables")
    parser.add_argument("--raw", metavar="FILE", help="writes every sample and every held-out step there, as JSON")
    parser.add_argument("--replay", metavar="FILE", help="evaluates what --raw wrote instead of measuring")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, instead of the clock's")
    options = parser.parse_args()
    document = replay(Path(options.replay)) if options.replay else measure(options)
    if options.json:
        print(json.dumps(document))
        return
    for name, value in document.items():
        if not isinstance(value, (list, bool)) and name != "benchmark":
            print(f"{name:<14}{value}")
    print_table("calibrated", document["calibrated"])
    print_table("followed", document["followed"])
    print(f"\nmedian {100 * MEDIAN_BAR:g} %, p95 {100 * P95_BAR:g} %: {'met' if document['meets_bar'] else 'missed'}")


if __name__ == "__main__":
    main()
