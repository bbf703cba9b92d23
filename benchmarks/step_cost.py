"""How well the duration of a step is predicted on this machine: calibrated as at a start, then asked about other steps.

    python benchmarks/step_cost.py [--model smollm2-135m] [--steps 200] [--limit 8] [--json]
    python benchmarks/step_cost.py --cpu-time

Held-out steps are drawn at random, none as in the calibration: 0 to 32 decodes, contexts and prefixes up to 8,192 or
the model's, a chunk of 1 to 1,024 rows or none. Each is carried out three times, in three rounds of an order of their
own, since other tenants interrupt single steps. Two tables:
  calibrated  the median of the three against the calibration, which knows nothing of what came after it
  followed    each single step against the prediction made just before it, drift followed as it is in the engine
With --cpu-time, on a busy machine: one thread, and the time that it was on a core instead of the clock's.
Bar: median error 5 %, 95 % of the steps within 15 %. `steal`: the share of this machine's time that went elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from legato import _native
from legato.core.budget import StepBudget
from legato.core.cost import Sample
from legato.core.fit import fit
from legato.core.shape import StepShape
from legato.core.tracker import CostTracker
from legato.exec.calibrate import GREEDY, MOST_PREFIX, NUCLEUS, Probe, StepTimer, attention_of, calibrate, fits
from legato.exec.cost_file import cpu_name
from legato.exec.model import LoadedModel, load_model
from legato.models.pull import resolve

ROUNDS = 3
MOST_DECODES, MOST_CHUNK = 32, 1024
MEDIAN_BAR, P95_BAR = 0.05, 0.15


def cpu_ticks() -> tuple[int, int]:
    """Ticks stolen by the hypervisor, and all, over all cores since the start of the machine."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[7], sum(fields)


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


def kind_of(probe: Probe) -> str:
    """The line of the table it belongs to."""
    if probe.chunk is None:
        return "decodes"
    return "decodes and a chunk" if probe.decodes else "a chunk"


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


def table(rows: Sequence[tuple[Probe, float, float]]) -> list[dict[str, Any]]:
    """A line for each kind of step, and one for all."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for probe, predicted, actual in rows:
        for kind in (kind_of(probe), "greedy" if probe.sampling is GREEDY else "drawn, top-p"):
            kinds.setdefault(kind, []).append((predicted, actual))
    lines = [line(kind, kinds[kind]) for kind in sorted(kinds)]
    return [*lines, line("all", [(predicted, actual) for _, predicted, actual in rows])]


def print_table(title: str, lines: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title:<22}{'steps':>7}{'ms':>9}{'median':>9}{'p95':>9}{'worst':>9}{'bias':>9}")
    for row in lines:
        shares = "".join(f"{100 * row[name]:>8.1f}%" for name in ("median", "p95", "worst", "bias"))
        print(f"{row['kind']:<22}{row['steps']:>7}{row['ms']:>9.2f}{shares}")


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
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, instead of the clock's")
    options = parser.parse_args()
    now = time.process_time if options.cpu_time else time.perf_counter
    budget = StepBudget(MOST_CHUNK + MOST_DECODES, 64)
    loaded = load_model(
        resolve(options.model),
        max_num_batched_tokens=budget.max_tokens,
        max_num_seqs=budget.max_seqs,
        threads=1 if options.cpu_time else options.threads,
    )
    load_average, before, started_s = os.getloadavg()[0], cpu_ticks(), time.perf_counter()
    samples = calibrate(loaded, budget, limit_s=options.limit, now=now)
    calibrated_s = time.perf_counter()
    attention = attention_of(loaded.spec)
    cost = fit(samples, attention)
    fitted_s = time.perf_counter()

    timer, probes, order = (
        StepTimer(loaded, now),
        held_out(loaded, budget, options.steps, options.seed),
        random.Random(2),
    )
    shapes: dict[Probe, StepShape] = {probe: timer.shape(probe, attention) for probe in probes}
    taken_s: dict[Probe, list[float]] = {probe: [] for probe in probes}
    tracker, followed = CostTracker(cost, samples), []
    for _ in range(ROUNDS):
        order.shuffle(probes)
        for probe in probes:
            seconds = timer.seconds(probe)
            taken_s[probe].append(seconds)
            followed.append((probe, tracker.cost.predict(shapes[probe]), seconds))
            tracker.observe(shapes[probe], seconds)
    measured_s = time.perf_counter()
    calibrated = [(probe, cost.predict(shapes[probe]), statistics.median(taken_s[probe])) for probe in taken_s]
    after = cpu_ticks()
    lines, followed_lines = table(calibrated), table(followed)
    document = {
        "benchmark": "step_cost",
        "model": options.model,
        "cpu": cpu_name(),
        "isa": _native.isa(),
        "threads": loaded.threads,
        "clock": now.__name__,
        "samples": len(samples),
        "calibrate_s": round(calibrated_s - started_s, 2),
        "fit_s": round(fitted_s - calibrated_s, 3),
        "measure_s": round(measured_s - fitted_s, 1),
        "load_average": load_average,
        "steal": round((after[0] - before[0]) / max(1, after[1] - before[1]), 4),
        "tile": cost.tile,
        "margin": round(tracker.margin, 3),
        "drift": round(tracker.cost.scale, 3),
        "calibrated": lines,
        "followed": followed_lines,
        "meets_bar": lines[-1]["median"] <= MEDIAN_BAR and lines[-1]["p95"] <= P95_BAR,
    }
    if options.raw:
        write_raw(Path(options.raw), samples, [(probe, shapes[probe], taken_s[probe]) for probe in taken_s])
    if options.json:
        print(json.dumps(document))
        return
    for name in (
        "cpu",
        "isa",
        "threads",
        "clock",
        "samples",
        "calibrate_s",
        "fit_s",
        "measure_s",
        "load_average",
        "steal",
    ):
        print(f"{name:<14}{document[name]}")
    print_table("calibrated", lines)
    print_table("followed", followed_lines)
    print(f"\nmargin {tracker.margin:.3f}, drift {tracker.cost.scale:.3f}, blocks of {cost.tile} rows")
    print(f"median {100 * MEDIAN_BAR:g} %, p95 {100 * P95_BAR:g} %: {'met' if document['meets_bar'] else 'missed'}")


def write_raw(path: Path, samples: Sequence[Sample], steps: Sequence[tuple[Probe, StepShape, list[float]]]) -> None:
    """Everything that was measured, to look for what a prediction lacks."""
    from dataclasses import asdict

    data = {
        "samples": [(asdict(sample.shape), sample.seconds) for sample in samples],
        "held_out": [
            (probe.decodes, probe.chunk, probe.ends, asdict(shape), seconds) for probe, shape, seconds in steps
        ],
    }
    path.write_text(json.dumps(data), encoding="utf-8")


if __name__ == "__main__":
    main()
