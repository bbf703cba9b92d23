"""Legato's engine, in process, behind the command line of the peers: see `benchmarks/peers/`.

    python benchmarks/legato_engine.py --model FILE --threads 2 --measure prefill:512 --measure decode:8 [--repeat 5]

Everything goes through the scheduler and the executor, as in the server: a prefill is timed from submitting a fresh
prompt to its first token, a decode step from its plan to its tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness
import prompts

import legato
from legato import _native
from legato.assemble import build_engine
from legato.config import EngineConfig
from legato.core.request import Request, StopRule
from legato.exec.cpu.backend import CpuBackend
from legato.exec.executor import ModelExecutor
from legato.exec.profile import StepClock, profile_table


class LegatoPeer:
    """The engine with one model loaded, planning and executing as it does when it serves."""

    name = "legato"

    def __init__(self, options: argparse.Namespace) -> None:
        config = EngineConfig(
            model=options.model,
            max_num_batched_tokens=options.budget,
            max_num_seqs=64,
            kv_tokens=16384,
            threads=options.threads,
            activations=options.activations,
        )
        self.version = legato.__version__
        self.settings: dict[str, Any] = {
            "isa": _native.isa(),
            "budget": options.budget,
            "threads": options.threads,
            "activations": options.activations,
        }
        self._engine, _ = build_engine(config, Path(options.model), lambda *_: None)
        self._next_id = self._first_id = 0

    def profile(self, measure: str) -> str:
        """Milliseconds a step by phase and kind of operation, of `prefill:TOKENS` or `decode:SEQUENCES`."""
        executor = self._engine._executor
        assert isinstance(executor, ModelExecutor)
        assert isinstance(executor._backend, CpuBackend)
        program = executor._backend.program
        kind, count = harness.parse_measure(measure)
        if kind == "decode":
            self._begin_decode(prompts.decode_prompts(count, seed=987_654), prompts.DECODE_STEPS)
        executor.clock = StepClock(time.perf_counter)
        program.set_profile(True)
        if kind == "decode":
            for _ in range(prompts.DECODE_STEPS):
                self._engine.step()
        else:
            self.prefill_s(prompts.random_prompt(count, seed=987_654))
        table = profile_table(executor.clock, program.profile())
        program.set_profile(False)
        executor.clock = None
        self._abort_all()
        return table

    def prefill_s(self, prompt: list[int]) -> float:
        """Seconds from submitting `prompt` to its first greedy token."""
        started_s = time.perf_counter()
        self._submit(prompt, 1)
        while self._engine.has_work:
            self._engine.step()
        return time.perf_counter() - started_s

    def decode_s(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Seconds of each of `steps` steps in which every prompt, prefilled before, gets one greedy token."""
        self._begin_decode(prompts, steps)
        durations = []
        for _ in range(steps):
            started_s = time.perf_counter()
            counts = self._step_counts()
            durations.append(time.perf_counter() - started_s)
            if counts != (1,) * len(prompts):
                raise RuntimeError(f"not a decode step of {len(prompts)}: {counts}")
        self._abort_all()
        return durations

    def _begin_decode(self, prompts: list[list[int]], steps: int) -> None:
        """Prefills `prompts`, which then have `steps` steps and a few more to go."""
        self._first_id = self._next_id
        for prompt in prompts:
            self._submit(prompt, steps + len(prompts) + 2)
        while any(count > 1 for count in self._step_counts()):
            pass

    def _abort_all(self) -> None:
        for request_id in range(self._first_id, self._next_id):
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()

    def _submit(self, prompt: list[int], max_tokens: int) -> None:
        self._engine.submit(Request(self._next_id, tuple(prompt), stop=StopRule(max_tokens=max_tokens)))
        self._next_id += 1

    def _step_counts(self) -> tuple[int, ...]:
        record = self._engine.step().record
        return record.plan.counts if record is not None else ()


if __name__ == "__main__":
    options = harness.parser(__doc__ or "")
    options.add_argument("--budget", type=int, default=512, help="tokens a step")
    options.add_argument("--activations", choices=["int8", "bf16", "f32"], default="int8")
    options.add_argument(
        "--profile", metavar="MEASURE", help="where the time of prefill:TOKENS or decode:SEQUENCES goes; then ends"
    )
    arguments = options.parse_args()
    if arguments.profile:
        peer = LegatoPeer(arguments)
        peer.profile(arguments.profile)
        print(peer.profile(arguments.profile))
    else:
        harness.main(arguments, LegatoPeer)
