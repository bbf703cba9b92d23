"""The command line and the measuring loop that every peer script shares. Standard library only.

    python NAME.py --model FILE --threads 2 --measure prefill:512 --measure decode:8 --repeat 5
    python NAME.py --model FILE --serve          # one measure name a line on stdin, one JSON line each on stdout

`prefill:N` is the time from N fresh token ids to the logits (or first token) of the last. `decode:B` is the time of
one step that gives one greedy token to each of B sequences with a context of about 128. No prompt repeats, so that no
prefix cache can answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any, Protocol

from prompts import DECODE_STEPS, decode_prompts, random_prompt

DEFAULT_MEASURES = ["prefill:512", "prefill:2048", "decode:1", "decode:8", "decode:32"]


class Peer(Protocol):
    """An engine with its model loaded."""

    name: str
    version: str
    settings: dict[str, Any]

    def prefill_s(self, prompt: list[int]) -> float:
        """Seconds from the ids of a fresh prompt to its first greedy token."""

    def decode_s(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps, all prompts in one batch, after an untimed prefill."""


def parse_measure(name: str) -> tuple[str, int]:
    """("prefill", tokens) or ("decode", sequences); raises ValueError for a measure it does not know."""
    kind, _, count = name.partition(":")
    if kind not in ("prefill", "decode") or not count.isdigit() or int(count) < 1:
        raise ValueError(f"unknown measure {name!r}: write prefill:TOKENS or decode:SEQUENCES")
    return kind, int(count)


def measure(peer: Peer, name: str, repeat: int, seeds: itertools.count[int]) -> dict[str, Any]:
    """One JSON-ready record: milliseconds (median over `repeat` runs, best, all runs) and tokens per second.

    A run of `decode:B` is the median over its steps. Raises ValueError for a measure it does not know.
    """
    kind, count = parse_measure(name)
    runs_s = []
    for _ in range(repeat):
        seed = next(seeds)
        if kind == "prefill":
            runs_s.append(peer.prefill_s(random_prompt(count, seed)))
        else:
            runs_s.append(statistics.median(peer.decode_s(decode_prompts(count, seed), DECODE_STEPS)))
    median_s, best_s = statistics.median(runs_s), min(runs_s)
    return {
        "peer": peer.name,
        "version": peer.version,
        "measure": name,
        "tokens_per_s": round(count / median_s, 2),
        "ms": round(median_s * 1e3, 3),
        "best_tokens_per_s": round(count / best_s, 2),
        "best_ms": round(best_s * 1e3, 3),
        "runs": [round(run * 1e3, 3) for run in runs_s],
        "settings": peer.settings,
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The options common to all peers; a script may add its own."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", required=True, help="path of the GGUF file")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--measure", action="append", help="prefill:TOKENS or decode:SEQUENCES; may be repeated")
    options.add_argument("--repeat", type=int, default=5, help="runs a measure (in --serve mode: 1 unless given)")
    options.add_argument("--serve", action="store_true", help="read measure names from stdin, one a line")
    options.add_argument("--seed", type=int, default=0, help="the first prompt's seed")
    return options


def main(options: argparse.Namespace, load: Callable[[argparse.Namespace], Peer]) -> None:
    """Loads the peer, warms it up, then answers the measures asked for."""
    answers = claim_stdout()
    peer = load(options)
    seeds = itertools.count(options.seed)
    wanted = options.measure or DEFAULT_MEASURES
    for name in dict.fromkeys(wanted):
        measure(peer, name, 1, itertools.count(options.seed + 500_000))
    if options.serve:
        print(json.dumps({"peer": peer.name, "ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            if name := line.strip():
                print(json.dumps(answer(peer, name, seeds)), file=answers, flush=True)
        return
    for name in wanted:
        print(json.dumps(measure(peer, name, options.repeat, seeds)), file=answers, flush=True)


def answer(peer: Peer, name: str, seeds: itertools.count[int]) -> dict[str, Any]:
    """The record of one run of `name`, or a record with an `error`, so that the outer harness can go on."""
    try:
        return measure(peer, name, 1, seeds)
    except Exception as error:  # a peer's failure is a result too
        return {"peer": peer.name, "measure": name, "error": f"{type(error).__name__}: {error}"}


def claim_stdout() -> Any:
    """A stream on the real standard output; what the engines themselves print goes to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
