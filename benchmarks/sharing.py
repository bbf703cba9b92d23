"""What a common beginning saves: many prompts after one prefix, with the prefix cache and without, in turn.

    python benchmarks/sharing.py [--model smollm2-135m] [--requests 32] [--prefix 1500] [--suffix 20] [--rounds 3]

All requests arrive at once, at an engine that has never seen the prefix. Counted are rows computed for prompts, and the
time to the first token of each request; round by round, one side after the other, on the same loaded model.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass

from legato import LLM, SamplingParams


@dataclass(frozen=True)
class Run:
    """One side, once. `rows`: computed for prompts; `ttft_s`: of each request, ascending."""

    rows: int
    ttft_s: list[float]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Run:
    """All prompts at once."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    before = [record.plan.step for record in llm.engine.trace][-1:]
    completions = llm.generate(prompts, params, progress=False)
    first = before[0] + 1 if before else 0
    rows = sum(record.prefill_rows for record in llm.engine.trace if record.plan.step >= first)
    return Run(rows, sorted(one.ttft_s for one in completions))


def prompts_of(rng: random.Random, requests: int, prefix: int, suffix: int, vocab: int) -> list[list[int]]:
    """Random ids: what they say does not matter, and no round finds another one's."""
    common = [rng.randrange(300, vocab) for _ in range(prefix)]
    return [common + [rng.randrange(300, vocab) for _ in range(suffix)] for _ in range(requests)]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1500, help="tokens they have in common")
    parser.add_argument("--suffix", type=int, default=20, help="tokens each has for itself")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Both pools hold all prompts at once, shared or not, so that only the computing differs.
    pool = options.requests * (options.prefix + options.suffix + options.max_tokens + 64)
    sides = {
        name: LLM(options.model, kv_tokens=pool, enable_prefix_caching=on)
        for name, on in (("off", False), ("on", True))
    }
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    rng = random.Random(1)
    for _ in range(options.rounds):
        vocab = sides["on"].text.vocab
        prompts = prompts_of(rng, options.requests, options.prefix, options.suffix, vocab)
        for name, llm in sides.items():
            runs[name].append(run(llm, prompts, options.max_tokens))
    report = {
        name: {
            "prefill_rows": one[0].rows,
            "ttft_first_s": round(statistics.median(r.ttft_s[0] for r in one), 2),
            "ttft_p50_s": round(statistics.median(statistics.median(r.ttft_s) for r in one), 2),
            "ttft_last_s": round(statistics.median(r.ttft_s[-1] for r in one), 2),
        }
        for name, one in runs.items()
    }
    if options.json:
        print(json.dumps(report))
        return
    sizes = f"{options.prefix} tokens in common, {options.suffix} each"
    print(f"{options.requests} requests: {sizes}; {options.rounds} rounds")
    print(f"{'prefix cache':<14}{'prefill rows':>14}{'TTFT first':>12}{'median':>10}{'last':>10}")
    for name, one in report.items():
        first, median, last = one["ttft_first_s"], one["ttft_p50_s"], one["ttft_last_s"]
        print(f"{name:<14}{one['prefill_rows']:>14,}{first:>10} s{median:>8} s{last:>8} s")


if __name__ == "__main__":
    main()
