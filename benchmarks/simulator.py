"""How fast the simulator is: steps a second on one core, and a million requests over 64 replicas.

python benchmarks/simulator.py             32 running, answers of several lengths, with and without steps taken at once
python benchmarks/simulator.py --fleet     10^6 requests over 64 replicas: time and memory
python benchmarks/simulator.py --profile   where the time goes, for answers of 256 tokens
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import statistics
import sys
import time

from legato.sim import catalog
from legato.sim.fleet import Fleet, Setup, bounded
from legato.sim.ideal import Ideal
from legato.sim.ledger import Ledger, Objectives
from legato.sim.router import router
from legato.workload.arrivals import Process, Traffic
from legato.workload.lengths import Lengths

_H100 = Ideal(catalog.model("llama-3.1-8b"), catalog.device("h100")).cost
_RUNS = 5


def crowded(output: int, *, leaps: bool, requests: int = 0, itl_s: float | None = 0.03) -> Ledger:
    """32 requests run at any time, others wait: prompts of 512 tokens, answers of `output` on average."""
    setup = Setup(_H100, 30_000, max_num_seqs=32, itl_s=itl_s)
    ledger = Ledger(Objectives(1.0, 0.05))
    fleet = Fleet(setup, ledger)
    if not leaps:
        fleet.replicas = [setup.replica(ledger, leaps=False)]
    traffic = Traffic(Process(1000.0), Lengths(512, 0.6), Lengths(output, 0.6))
    for _ in fleet.run(bounded(traffic, requests or max(100, 400_000 // output), None)):
        pass
    return ledger


def speed(output: int, *, leaps: bool) -> dict[str, float]:
    """Steps a second, the median of five runs."""
    rates, ledger = [], None
    for _ in range(_RUNS):
        started_s = time.perf_counter()
        ledger = crowded(output, leaps=leaps)
        rates.append(ledger.step_count / (time.perf_counter() - started_s))
    assert ledger is not None
    running = ledger.output_tokens / ledger.step_count
    return {"output_tokens": output, "at_once": leaps, "tokens_a_step": round(running, 1),
            "steps_per_s": round(statistics.median(rates))}  # fmt: skip


def fleet(requests: int, replicas: int) -> dict[str, float]:
    """Time and memory of a large run."""
    ledger = Ledger(Objectives(1.0, 0.05))
    setup = Setup(_H100, 30_000, itl_s=0.03)
    traffic = Traffic(Process(12.0 * replicas), Lengths(512, 0.8), Lengths(128, 0.6), tenants=8)
    started_s, most = time.perf_counter(), 0
    for number in Fleet(setup, ledger, replicas, router("least-loaded")).run(bounded(traffic, requests, None)):
        most = max(most, ledger.unfinished)
        if not number % (requests // 50):
            print(f"\r{number:,} of {requests:,}", end="", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started_s
    print(file=sys.stderr)
    return {
        "requests": ledger.completed,
        "replicas": replicas,
        "simulated_s": round(ledger.seconds),
        "steps": ledger.step_count,
        "tokens_a_step": round(ledger.output_tokens / ledger.step_count, 1),
        "wall_s": round(seconds, 1),
        "steps_per_s": round(ledger.step_count / seconds),
        "most_unfinished": most,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    options = parser.parse_args()
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(crowded, 256, leaps=True)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        return
    if options.fleet:
        print(json.dumps(fleet(options.requests, options.replicas)))
        return
    for output in (64, 256, 1024, 4096):
        for leaps in (False, True):
            print(json.dumps(speed(output, leaps=leaps)), flush=True)


if __name__ == "__main__":
    main()
