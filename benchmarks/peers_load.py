"""The same load on Legato and on other servers: `legato bench` against each in turn, in interleaved rounds.

    python benchmarks/peers_load.py interference --model FILE.gguf --weights FOLDER --rounds 3 -- --streams 8
    python benchmarks/peers_load.py interference --model FILE.gguf --servers llama.cpp:64,llama.cpp:256,openvino:128
    python benchmarks/peers_load.py capacity --model FILE.gguf --servers legato:100 -- --itl-ms 100 --ttft-ms 5000

`--servers`: NAME:KNOB, ... Each is started for its run, alone, and stopped after it; a round runs each once, and every
round begins with another. The knob is the server's own limit of a step: for legato milliseconds (`--itl-ms`), or
tokens as in `legato:512t`; for the others tokens (llama.cpp: `-b` and `-ub`; vllm and openvino:
`max_num_batched_tokens`). More of a server's own options: `--legato`, `--llama.cpp`, `--vllm`, `--openvino`, written
as in `--llama.cpp='-np 8'`. What follows `--` goes to `legato bench`: see `legato bench interference --help`.

Set up before: `peers/setup.sh llama_server`, `vllm_cpu`, `openvino_genai`; vllm reads `--weights`, a folder made by
`peers/dequantise.py`. One JSON line a run, then a table of medians, steal the most of any run. A run that shows nothing
is told with its reasons, and is not in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
LEGATO = [sys.executable, "-m", "legato.cli.main"]
NAMES = ("legato", "llama.cpp", "vllm", "openvino")
START_LIMIT_S = 600.0  # vLLM compiles when it starts: minutes the first time
STOP_LIMIT_S = 20.0
SLOTS = 20


def command(server: str, knob: str, options: argparse.Namespace) -> list[str]:
    """What starts a server with a knob."""
    model, context, port = str(options.model), options.context, ["--port", str(options.port)]
    more = shlex.split(getattr(options, server))
    if server == "legato":
        budget = ["--max-num-batched-tokens", knob[:-1]] if knob.endswith("t") else ["--itl-ms", knob]
        return [*LEGATO, "serve", model, *port, *budget, *more]
    if server == "llama.cpp":
        binary = next((PEERS / ".venv-llama_server").rglob("bin/llama-server"), Path("llama-server"))
        slots = ["-np", str(SLOTS), "-c", str(SLOTS * context), "-b", knob, "-ub", knob, "-t", "2", "-tb", "2"]
        # Else prompts of slots that are taken anew are copied aside, up to 8 GiB of them.
        plain = ["-fa", "on", "--cache-ram", "0"]
        return [str(binary), "-m", model, *port, *slots, *plain, *more]
    if server == "vllm":
        limits = ["--max-num-seqs", "32", "--max-model-len", str(context), "--max-num-batched-tokens", knob]
        plain = ["--dtype", "float32", "--no-enable-prefix-caching", "--generation-config", "vllm"]
        # `vllm serve` asks for the version of a package named vllm, and this one is named vllm-cpu.
        program = [str(PEERS / ".venv-vllm_cpu/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
        return [*program, "--model", str(options.weights), *port, *limits, *plain, *more]
    program = [str(PEERS / ".venv-openvino_genai/bin/python"), str(PEERS / "openvino_server.py")]
    return [*program, "--model", model, *port, "--batched-tokens", knob, *more]


@contextlib.contextmanager
def serving(server: str, knob: str, options: argparse.Namespace) -> Iterator[str | None]:
    """Runs a server until the end of the block, which is told why the server does not answer, or None if it does."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", options.port)) == 0:
            raise SystemExit(f"something listens on port {options.port}; stop it, or choose another --port")
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log, words = Path(tempfile.gettempdir()) / f"peers_load-{server}.log", command(server, knob, options)
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)
    except OSError as error:
        raise SystemExit(f"{words[0]} does not run ({error.strerror}); see peers/setup.sh") from error
    try:
        yield None if answers(process, options.port) else log.read_text(errors="replace")[-2000:]
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        # A server of several processes may leave some behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until it does; False if it ended before, or takes too long."""
    limit_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return True
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    return False


def measure(server: str, knob: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run: what the bench says, or why it says nothing. `seconds`: the bench alone, and the server's start."""
    begin_s = time.monotonic()
    run: dict[str, Any] = {"server": server, "knob": knob, "more": getattr(options, server)}
    with serving(server, knob, options) as fault:
        start_s = time.monotonic() - begin_s
        if fault is not None:
            return {**run, "valid": False, "reasons": [f"the server did not come up; the end of its log: {fault}"]}
        url = f"http://127.0.0.1:{options.port}"
        bench = [*LEGATO, "bench", options.measure, "--json", "--url", url, *options.bench]
        ran = subprocess.run(bench, capture_output=True, text=True)
    run["seconds"] = {"start": round(start_s, 1), "bench": round(time.monotonic() - begin_s - start_s, 1)}
    last = (ran.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith("{"):
        return {**run, "valid": False, "reasons": [ran.stderr.strip()[-600:]]}
    document = json.loads(last)
    document["dialect"] = document.pop("server")
    return {**run, "steal_share": document["machine"]["steal_share"], **document}


def figures(run: dict[str, Any]) -> dict[str, float]:
    """What the table shows of a valid run."""
    if run["bench"] == "capacity":
        best = run["at_capacity"] or {}
        return {
            "requests/s": run["requests_per_s"] or 0.0,
            "p99 TTFT, s": (best.get("ttft_ms") or {}).get("p99", 0.0) / 1e3,
            "p99 gap, ms": (best.get("itl_ms") or {}).get("p99", 0.0),
            "good tokens/s": best.get("good_tokens_per_s", 0.0),
        }
    shown = run["figures"]
    gaps, beside = shown["itl_ms"] or {}, shown["itl_beside_long_ms"] or {}
    waits = {
        f"TTFT {int(tokens):,}, s": spread["p50"] / 1e3
        for tokens, spread in shown["long_ttft_by_tokens_ms"].items()
        if spread
    }
    return {
        "worst gap, ms": gaps.get("max", 0.0),
        "p99": gaps.get("p99", 0.0),
        "p50": gaps.get("p50", 0.0),
        "p50 beside": beside.get("p50", 0.0),
        **waits,
        "unanswered": shown["long_sent"] - shown["long_completed"],
        "tokens/s": shown["output_tokens_per_s"],
        "stalls": shown["stalls"],
        "late, %": 100 * shown["late_share"],
    }


def outcome(run: dict[str, Any]) -> str:
    """A run in a line."""
    if not run["valid"]:
        return f"shows nothing: {'; '.join(run['reasons'])}"
    told = "  ".join(f"{name} {value:,.6g}" for name, value in figures(run).items())
    return f"{told}  steal {100 * (run['steal_share'] or 0.0):.1f} %"


def table(pairs: list[tuple[str, str]], runs: list[dict[str, Any]]) -> list[list[str]]:
    """Heads, then a row for each server and knob: medians of its valid runs."""
    rows: list[list[str]] = []
    heads: dict[str, None] = {}
    medians = []
    for pair in pairs:
        mine = [run for run in runs if (run["server"], run["knob"]) == pair]
        valid = [run for run in mine if run["valid"]]
        shown = [figures(run) for run in valid]
        names = dict.fromkeys(name for one in shown for name in one)
        heads.update(names)
        steal = 100 * max((run["steal_share"] or 0.0 for run in valid), default=0.0)
        middle = {name: statistics.median(one[name] for one in shown if name in one) for name in names}
        medians.append((pair, f"{len(valid)} of {len(mine)}", middle, steal))
    rows.append(["server", "runs", *heads, "steal, %"])
    for (server, knob), count, middle, steal in medians:
        cells = [f"{middle[name]:,.2f}".rstrip("0").rstrip(".") if name in middle else "–" for name in heads]
        rows.append([f"{server} {knob}", count, *cells, f"{steal:.1f}"])
    return rows


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. `servers`: pairs of name and knob; `bench`: what followed `--`."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s {interference,capacity} --model FILE.gguf [options] [-- options of legato bench]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measure", choices=("interference", "capacity"))
    parser.add_argument("--servers", default="legato:100,llama.cpp:64,vllm:64,openvino:64", help="NAME:KNOB, ...")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--weights", type=Path, help="the same dequantised, for vllm")
    parser.add_argument("--context", type=int, default=8192, help="tokens of one sequence, prompt and answer")
    parser.add_argument("--port", type=int, default=18931)
    parser.add_argument("--json", action="store_true", help="no table")
    for name in NAMES:
        parser.add_argument(f"--{name}", dest=name, default="", metavar="OPTIONS", help=f"more options of {name}")
    mark = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:mark])
    options.bench = arguments[mark + 1 :]
    options.servers = [(name, knob) for name, _, knob in (entry.partition(":") for entry in options.servers.split(","))]
    for name, knob in options.servers:
        if name not in NAMES or not knob.removesuffix("t" if name == "legato" else "").isdecimal():
            parser.error(f"--servers has '{name}:{knob}'; it should look like {NAMES[0]}:100, with one of {NAMES}")
        if name == "vllm" and options.weights is None:
            parser.error("vllm does not read GGUF: make a folder with peers/dequantise.py and name it with --weights")
    return options


def main() -> None:
    """Runs the rounds; a line a run on standard error too."""
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the server, as an interrupt does
    pairs: list[tuple[str, str]] = options.servers
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        turn = number % len(pairs)
        for server, knob in (*pairs[turn:], *pairs[:turn]):
            run = measure(server, knob, options)
            runs.append(run)
            at = f"round {number + 1} of {options.rounds}, run {len(runs)} of {options.rounds * len(pairs)}"
            print(f"{at}: {server} {knob}: {outcome(run)}", file=sys.stderr, flush=True)
            print(json.dumps(run), flush=True)
    if not options.json:
        rows = table(pairs, runs)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
