"""Does the gap between tokens hold while a prompt grows, and while somebody takes a core? On the real engine, drawn.

    python benchmarks/pace.py drift [--itl-ms 200] [--streams 4] [--prompt-tokens 8000] [--data FILE]
    python benchmarks/pace.py change [--itl-ms 200] [--streams 4] [--seconds 30] [--data FILE]

drift   one long prompt beside running streams, with steps of 512 tokens and with a gap to keep: how long each step of
        the prompt takes. Flat is a coefficient of variation of 0.1 at most.
change  prompts of 4,000 tokens one after the other; after `--seconds` another process computes on one core for as long,
        and then is gone. Prints after how many steps the median of five is within 5 % of the gap again, and after how
        many, once it is gone, chunks are as large as before.

`--data` keeps every step, for `make figures`. In this process, without a server.
`steal` is the share of the machine's time that went elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.panels import Panel, Series, draw

from legato.bench.machine import cpu_times, steal_between
from legato.core.request import Request, StopRule
from legato.core.trace import StepRecord
from legato.llm import LLM

_HOG = "import os; os.sched_setaffinity(0, {0}) if hasattr(os, 'sched_setaffinity') else None\nwhile True: pass"
_WINDOW = 5


@dataclass(frozen=True, slots=True)
class Step:
    """A step that had prompt rows. `at_s`: when it ended, from the start of the measurement."""

    at_s: float
    seconds: float
    rows: int
    position: int


class Bench:
    """A model with streams that decode for ever."""

    def __init__(self, llm: LLM, streams: int) -> None:
        self.llm = llm
        self._ids = itertools.count(1)
        self._draw = random.Random(0)
        for _ in range(streams):
            self.ask(32, llm.engine.state.context)
        while llm.engine.state.waiting or any(s.known - s.scheduled > 1 for s in llm.engine.state.running):
            llm.engine.step()
        self.start_s = time.perf_counter()

    def ask(self, prompt_tokens: int, max_tokens: int) -> int:
        """A request with a prompt of its own."""
        prompt = tuple(self._draw.randrange(300, 20000) for _ in range(prompt_tokens))
        stop = StopRule(min(max_tokens, self.llm.engine.state.context - prompt_tokens))
        request_id = next(self._ids)
        self.llm.engine.submit(Request(request_id, prompt, stop=stop, arrival_s=time.perf_counter()))
        return request_id

    def run(self, prompt_tokens: int, goes_on: Callable[[], bool] | None = None) -> list[Step]:
        """Steps of a prompt until it is answered, or of one after the other as long as `goes_on`."""
        steps: list[Step] = []
        while True:
            request_id, answered = self.ask(prompt_tokens, 1), False
            while not answered:
                events = self.llm.engine.step()
                answered = request_id in events.request_ids
                if events.record is not None and request_id in events.record.plan.request_ids:
                    steps.append(self._step(events.record, request_id))
                if goes_on is not None and not goes_on():
                    self.llm.engine.abort(request_id)
                    return steps
            if goes_on is None:
                return steps

    def _step(self, record: StepRecord, request_id: int) -> Step:
        plan = record.plan
        n = plan.request_ids.index(request_id)
        at_s = record.started_s + record.step_s - self.start_s
        return Step(at_s, record.step_s, record.prefill_rows, plan.starts[n])


def variation(steps: Sequence[Step]) -> float:
    """The coefficient of variation of their seconds."""
    seconds = [step.seconds for step in steps]
    return statistics.stdev(seconds) / statistics.mean(seconds)


def drift(options: argparse.Namespace) -> dict[str, object]:
    """One prompt with each kind of budget. The first and the last chunk, which are not whole, are left out."""
    runs: dict[str, list[Step]] = {}
    for name, settings in (
        ("512 tokens a step", {"max_num_batched_tokens": 512}),
        (f"a gap of {options.itl_ms:g} ms", {"itl_ms": options.itl_ms}),
    ):
        llm = LLM(options.model, max_num_seqs=options.streams + 4, **settings)
        runs[name] = Bench(llm, options.streams).run(options.prompt_tokens)
        llm.engine.close()
    fixed, kept = (steps[1:-1] for steps in runs.values())
    if options.data:
        _keep(options, {name: steps[1:-1] for name, steps in runs.items()})
    return {
        "fixed_first_ms": round(1000 * fixed[0].seconds),
        "fixed_last_ms": round(1000 * fixed[-1].seconds),
        "fixed_rise": round(fixed[-1].seconds / fixed[0].seconds, 2),
        "fixed_variation": round(variation(fixed), 3),
        "kept_variation": round(variation(kept), 3),
        "kept_median_ms": round(1000 * statistics.median(s.seconds for s in kept), 1),
        "kept_worst_ms": round(1000 * max(s.seconds for s in kept), 1),
        "kept_chunks": [kept[0].rows, kept[-1].rows],
        "steps": len(kept),
    }


def change(options: argparse.Namespace) -> dict[str, object]:
    """Before, with somebody on a core, and after."""
    llm = LLM(options.model, itl_ms=options.itl_ms, max_num_seqs=options.streams + 4)
    bench = Bench(llm, options.streams)
    bench.run(options.prompt_tokens)  # whatever is learned at first is learned
    bench.start_s = time.perf_counter()
    before = bench.run(options.prompt_tokens, lambda: time.perf_counter() - bench.start_s < options.seconds)
    hog = subprocess.Popen([sys.executable, "-c", _HOG])
    try:
        begun_s = time.perf_counter() - bench.start_s
        during = bench.run(options.prompt_tokens, lambda: time.perf_counter() - bench.start_s < 2 * options.seconds)
    finally:
        hog.kill()
        hog.wait()
    ended_s = time.perf_counter() - bench.start_s
    after = bench.run(options.prompt_tokens, lambda: time.perf_counter() - bench.start_s < 3 * options.seconds)
    llm.engine.close()
    itl_s = options.itl_ms / 1000
    # Rows are compared at like depths: late chunks are smaller.
    usual = _rows_a_second(before)
    if options.data:
        _keep(options, {"steps": [*before, *during, *after]}, taken_s=[begun_s, ended_s])
    return {
        "before": _figures(before, itl_s),
        "during": _figures(during, itl_s),
        "after": _figures(after, itl_s),
        "steps_to_adapt": _first(during, lambda window: statistics.median(s.seconds for s in window) <= 1.05 * itl_s),
        "steps_to_recover": _first(after, lambda window: _rows_a_second(window) >= 0.9 * usual),
    }


def _keep(options: argparse.Namespace, runs: dict[str, list[Step]], **more: object) -> None:
    """Columns of each run's steps: seconds from the start, milliseconds, rows, position."""
    columns = {
        name: [[round(s.at_s, 3), round(1000 * s.seconds, 2), s.rows, s.position] for s in steps]
        for name, steps in runs.items()
    }
    settings = {name: getattr(options, name) for name in ("itl_ms", "streams", "prompt_tokens", "seconds")}
    options.data.write_text(json.dumps({**settings, **more, "runs": columns}) + "\n")


def draw_drift(data: dict[str, Any]) -> str:
    """Of what `drift --data` kept: an SVG."""
    runs = {name: list(zip(*steps, strict=True)) for name, steps in data["runs"].items()}
    panels = [
        Panel(f"Milliseconds of each step: {name}", "ms", [Series("", run[3], run[1])], data["itl_ms"] if n else None)
        for n, (name, run) in enumerate(runs.items())
    ]
    kept = list(runs.values())[-1]
    panels.append(Panel("Tokens of each chunk", "", [Series("", kept[3], kept[2])]))
    title = f"A prompt of {data['prompt_tokens']:,} tokens beside {data['streams']} streams"
    return draw(title, panels, "tokens before")


def draw_change(data: dict[str, Any]) -> str:
    """Of what `change --data` kept: an SVG."""
    at_s, ms, rows, _ = zip(*data["runs"]["steps"], strict=True)
    band = [tuple(data["taken_s"])]
    panels = [
        Panel("Milliseconds of each step", "ms", [Series("", at_s, ms)], data["itl_ms"], band),
        Panel("Tokens of each chunk", "", [Series("", at_s, rows)], None, band),
    ]
    return draw(f"A core is taken for {data['seconds']:g} s", panels, "s")


def _figures(steps: Sequence[Step], itl_s: float) -> dict[str, float]:
    seconds = sorted(step.seconds for step in steps)
    return {
        "steps": len(steps),
        "median_ms": round(1000 * statistics.median(seconds), 1),
        "p99_ms": round(1000 * seconds[int(0.99 * (len(seconds) - 1))], 1),
        "worst_ms": round(1000 * seconds[-1], 1),
        "late_share": round(sum(s > 1.05 * itl_s for s in seconds) / len(seconds), 3),
        "prompt_tokens_a_second": round(sum(step.rows for step in steps) / sum(seconds), 1),
    }


def _rows_a_second(steps: Sequence[Step]) -> float:
    return sum(step.rows for step in steps) / sum(step.seconds for step in steps)


def _first(steps: Sequence[Step], holds: Callable[[Sequence[Step]], bool]) -> int | None:
    """Steps before the first window of five in which it holds; None if there is none."""
    return next((n for n in range(len(steps) - _WINDOW + 1) if holds(steps[n : n + _WINDOW])), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("drift", "change"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--itl-ms", type=float, default=200.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, help="default: 8000 for drift, 4000 for change")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the three parts of change")
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    if options.prompt_tokens is None:
        options.prompt_tokens = 8000 if options.experiment == "drift" else 4000
    before = cpu_times()
    figures = {"drift": drift, "change": change}[options.experiment](options)
    steal = steal_between(before, cpu_times())
    settings = {"streams": options.streams, "itl_ms": options.itl_ms, "cores": os.cpu_count()}
    print(json.dumps({"experiment": options.experiment, **settings, **figures, "steal": steal and round(steal, 3)}))


if __name__ == "__main__":
    main()
