"""Reports of streams that stall in other engines, once on the real one: what each must hold, and what it does here.

    python -m benchmarks.cases [--model smollm2-135m] [--itl-ms 200] [--json]

FreeToken#483, llama.cpp#29175  one stream; then a prompt of 8,192 tokens (or what the model holds), 3 to answer: the
                                worst gap is at most 1.2 times the budget, the prompt's first token at most 1.5 times
                                as late as without the stream
imp#1643                        one stream; 1, 3, 8 prompts of 2,500 at once: the worst gap does not grow with them
mlxcel#1013                     8 streams for ever renewed, a prompt of 14 x 128 tokens: it is answered in bounded time
ATOM#1835, sglang#34623         50 tokens 2 s after 20,000 (or what the model holds) have begun, and three of 5,000:
                                the short one waits for nobody, the three advance together, the long one loses little

The same on a clock that has no noise: tests/core/test_step_time.py, test_fairness.py. Exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from legato.bench.machine import cpu_times, steal_between
from legato.core.request import Request, StopRule
from legato.llm import LLM


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a case is measured by. `most`: what it may be."""

    case: str
    what: str
    value: float
    most: float

    @property
    def holds(self) -> bool:
        """Whether it is kept."""
        return self.value <= self.most


class Run:
    """Requests on an engine, and when their tokens came."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.context = llm.info.context
        self._ids = itertools.count(int(time.time()) << 8)
        self._draw = random.Random()
        self.asked_s: dict[int, float] = {}
        self.token_s: dict[int, list[float]] = {}
        self.rows: dict[int, list[int]] = {}
        self.mixed = 0

    def ask(self, prompt_tokens: int, max_tokens: int) -> int:
        """A request with a prompt of its own, now."""
        request_id = next(self._ids)
        prompt = tuple(self._draw.randrange(300, 20000) for _ in range(prompt_tokens))
        self.asked_s[request_id] = time.perf_counter()
        stop = StopRule(min(max_tokens, self.context - prompt_tokens))
        self.engine.submit(Request(request_id, prompt, stop=stop, arrival_s=self.asked_s[request_id]))
        return request_id

    def step(self) -> None:
        """One step of the engine."""
        events = self.engine.step()
        now_s = time.perf_counter()
        for request_id in events.request_ids:
            self.token_s.setdefault(request_id, []).append(now_s)
        if events.record is not None:
            plan = events.record.plan
            self.mixed += 0 < plan.decodes < len(plan.request_ids)
            for request_id, count in zip(plan.request_ids, plan.counts, strict=True):
                self.rows.setdefault(request_id, []).append(count)

    def until(self, is_over: Callable[[], bool]) -> None:
        """Steps until then."""
        while not is_over():
            self.step()

    def answered(self, *request_ids: int) -> bool:
        """Whether each has a token."""
        return all(request_id in self.token_s for request_id in request_ids)

    def ttft_s(self, request_id: int) -> float:
        """From asking to the first token."""
        return self.token_s[request_id][0] - self.asked_s[request_id]

    def worst_gap_s(self, request_id: int, since_s: float) -> float:
        """Between two tokens, the second of which came after that."""
        times = self.token_s[request_id]
        return max(b - a for a, b in itertools.pairwise(times) if b > since_s)

    def stream(self) -> int:
        """One that decodes for long, and has begun."""
        request_id = self.ask(32, 100_000)
        self.until(lambda: self.answered(request_id))
        return request_id

    def end(self) -> None:
        """Takes everything back."""
        for request_id in self.asked_s:
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()


def long_beside_stream(llm: LLM, itl_s: float) -> list[Verdict]:
    tokens = min(8192, llm.info.context - 4)
    ttft_s = {}
    worst_s = 0.0
    for beside in (False, True):
        run = Run(llm)
        stream = run.stream() if beside else 0
        begun_s = time.perf_counter()
        long = run.ask(tokens, 3)
        run.until(lambda run=run, long=long: run.answered(long))  # type: ignore[misc]
        ttft_s[beside] = run.ttft_s(long)
        if beside:
            assert run.mixed > 10, "no step mixed both: the run shows nothing"
            worst_s = run.worst_gap_s(stream, begun_s)
        run.end()
    case = "FreeToken#483"
    return [
        Verdict(case, "worst gap over the budget", worst_s / itl_s, 1.2),
        Verdict(case, "first token of the prompt, over that without the stream", ttft_s[True] / ttft_s[False], 1.5),
    ]


def several_at_once(llm: LLM, itl_s: float) -> list[Verdict]:
    worst_s = {}
    for k in (1, 3, 8):
        run = Run(llm)
        stream = run.stream()
        begun_s = time.perf_counter()
        prompts = [run.ask(2500, 1) for _ in range(k)]
        run.until(lambda run=run, prompts=prompts: run.answered(*prompts))  # type: ignore[misc]
        worst_s[k] = run.worst_gap_s(stream, begun_s)
        run.end()
    return [Verdict("imp#1643", "worst gap with 8 prompts over that with one", worst_s[8] / worst_s[1], 1.25)]


def streams_renewed(llm: LLM, itl_s: float) -> list[Verdict]:
    run = Run(llm)
    alone = run.ask(14 * 128, 1)
    run.until(lambda: run.answered(alone))
    streams = [run.ask(8, 5) for _ in range(8)]
    run.until(lambda: run.answered(*streams))
    prompt = run.ask(14 * 128, 1)
    while not run.answered(prompt):
        run.step()
        for n, request_id in enumerate(streams):
            if len(run.token_s.get(request_id, ())) == 5:
                streams[n] = run.ask(8, 5)
    ratio = run.ttft_s(prompt) / run.ttft_s(alone)
    run.end()
    # Prompts have a fifth of the time in any case; those of the renewed streams are among them.
    return [Verdict("mlxcel#1013", "first token of the prompt, over that alone", ratio, 5.0)]


def short_and_long(llm: LLM, itl_s: float) -> list[Verdict]:
    case, tokens = "ATOM#1835", min(20_000, llm.info.context - 4)
    run = Run(llm)
    run.stream()
    long = run.ask(tokens, 1)
    begun_s = time.perf_counter()
    run.until(lambda: time.perf_counter() - begun_s > 2.0)
    short = run.ask(50, 1)
    run.until(lambda: run.answered(short))
    short_s = run.ttft_s(short)
    run.until(lambda: run.answered(long))
    together_s = run.ttft_s(long)
    run.end()
    run = Run(llm)
    run.stream()
    long = run.ask(tokens, 1)
    run.until(lambda: run.answered(long))
    alone_s = run.ttft_s(long)
    run.end()
    run = Run(llm)
    run.stream()
    three = [run.ask(5000, 1) for _ in range(3)]
    for _ in range(30):
        run.step()
    shares = [len(run.rows.get(request_id, ())) for request_id in three]
    run.end()
    return [
        Verdict(case, "first token of the short prompt, over the budget", short_s / itl_s, 4.0),
        Verdict(case, "first token of the long prompt, over that without the short one", together_s / alone_s, 1.1),
        Verdict(case, "of 30 steps, those in which one of three prompts had no row", 30 - min(shares), 2),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--itl-ms", type=float, default=200.0)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    options = parser.parse_args()
    llm = LLM(options.model, itl_ms=options.itl_ms, enable_prefix_caching=False)
    before = cpu_times()
    verdicts = [
        verdict
        for case in (long_beside_stream, several_at_once, streams_renewed, short_and_long)
        for verdict in case(llm, options.itl_ms / 1000)
    ]
    steal = steal_between(before, cpu_times())
    if options.json:
        rows = [{"case": v.case, "what": v.what, "value": round(v.value, 3), "most": v.most} for v in verdicts]
        print(json.dumps({"benchmark": "cases", "steal": steal and round(steal, 3), "rows": rows}))
    else:
        for v in verdicts:
            print(f"{'holds ' if v.holds else 'FAILS '} {v.case:14} {v.value:8.2f} of {v.most:8.2f}  {v.what}")
    raise SystemExit(0 if all(v.holds for v in verdicts) else 1)


if __name__ == "__main__":
    main()
