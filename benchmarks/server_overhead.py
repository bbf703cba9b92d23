"""What the server costs: CPU time a token in its process, and what 32 streaming clients do to the engine's steps.

    python benchmarks/server_overhead.py                    # the default model: server and engine alone, in turn
    python benchmarks/server_overhead.py --fake-step-ms 20    # no model: the server's own cost alone
    python benchmarks/server_overhead.py --json

A round runs the same prompts through the engine alone (its own process, no server) and through the server, with every
stream read by one client process at the lowest priority. Compared are steps in which all streams decode and nothing
else happens: `step` is the engine's time in the step, `period` from one step's end to the next one's.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from legato.engine.wire import StepStats

ROOT = Path(__file__).resolve().parent.parent
TOPICS = ("tides", "bread", "violins", "glaciers", "trains", "bees", "printing", "kites")


def prompts(count: int) -> list[str]:
    """Different prompts of about 25 tokens."""
    return [
        f"Tell a long story, number {i}, about {TOPICS[i % len(TOPICS)]} and the people near them."
        for i in range(count)
    ]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def config_of(arguments: argparse.Namespace) -> Any:
    from legato.config import EngineConfig

    return EngineConfig(arguments.model, max_num_seqs=max(arguments.streams, 64), threads=arguments.threads)


def offline(arguments: argparse.Namespace) -> None:
    """The engine alone: prints the durations of its pure decode steps."""
    from legato.engine.params import SamplingParams
    from legato.llm import LLM

    llm = LLM(arguments.model, max_num_seqs=max(arguments.streams, 64), threads=arguments.threads)
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    tokens = [llm.chat_tokens([{"role": "user", "content": text}]) for text in prompts(arguments.streams)]
    llm.generate(tokens, params, progress=False)
    known = len(llm.engine.trace)
    started_s = time.perf_counter()
    llm.generate(tokens, params, progress=False)
    wall_s = time.perf_counter() - started_s
    records = [r for r in list(llm.engine.trace)[known:] if r.plan.rows == arguments.streams == r.plan.decodes]
    starts = [r.started_s for r in records]
    periods = [b - a for a, b in pairwise(starts)]
    print(json.dumps({"step_s": [r.step_s for r in records], "period_s": periods, "wall_s": wall_s}))


async def serve_round(arguments: argparse.Namespace) -> dict[str, Any]:
    """The server in this process, the clients in another."""
    from legato.assemble import engine_factory, open_text, resolve_model
    from legato.engine.service import EngineService
    from legato.server.app import build_app
    from legato.server.run import HttpServer, listen
    from legato.server.served import ServedModel

    steps: list[StepStats] = []
    if arguments.fake_step_ms is not None:
        sys.path.insert(0, str(ROOT / "tests"))
        from server.fake_engine import factory
        from server.fake_model import fake_model

        served = fake_model()
        step_s = arguments.fake_step_ms / 1000
        make = factory(step_s=step_s, max_seqs=arguments.streams, blocks=4096, max_model_len=4096)
    else:
        config = config_of(arguments)
        path = resolve_model(config)
        served = ServedModel(("bench",), 0, open_text(config, path))
        make = engine_factory(config, path)
    service = EngineService(make, on_step=steps.append)
    await service.start()
    sock = listen("127.0.0.1", 0)
    server = HttpServer(build_app(service, served), sock, lambda: service.end_streams("cut"))
    task = asyncio.create_task(server.serve())
    command = [sys.executable, __file__, "--role", "clients", "--port", str(sock.getsockname()[1])]
    command += ["--streams", str(arguments.streams), "--tokens"]
    begin = functools.partial(asyncio.create_subprocess_exec, preexec_fn=functools.partial(os.nice, 19), stdout=-1)
    # Once unmeasured: imports, the template, and the first touch of the KV pool's pages, which costs a step tens of ms.
    await (await begin(*command, str(arguments.tokens))).communicate()
    steps.clear()
    client = await begin(*command, str(arguments.tokens))
    cpu_before_s = time.process_time()
    started_s = time.perf_counter()
    output, _ = await client.communicate()
    wall_s = time.perf_counter() - started_s
    cpu_s = time.process_time() - cpu_before_s
    server.stop()
    server.stop()
    await task
    await service.stop()
    tokens = arguments.streams * arguments.tokens
    pure = [s for s in steps if s.rows == arguments.streams and not s.chunk_tokens]
    return {
        "step_s": [s.duration_s for s in pure],
        "period_s": [s.duration_s + s.gap_s for s in pure if s.gap_s >= 0],
        "gap_s": [s.gap_s for s in pure if s.gap_s >= 0],
        "server_us_per_token": cpu_s / tokens * 1e6,
        "wall_s": wall_s,
        "client": json.loads(output),
    }


async def clients(arguments: argparse.Namespace) -> None:
    """Reads every stream, cheaply: bytes and events are counted, nothing is parsed."""

    async def one(text: str) -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", arguments.port)
        body = {"stream": True, "max_tokens": arguments.tokens, "ignore_eos": True, "temperature": 0}
        content = json.dumps({**body, "messages": [{"role": "user", "content": text}]}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        events = size = 0
        while data := await reader.read(1 << 16):
            events += data.count(b'"delta":{"content"')
            size += len(data)
        writer.close()
        return events, size

    results = await asyncio.gather(*(one(text) for text in prompts(arguments.streams)))
    print(json.dumps({"events": sum(r[0] for r in results), "bytes": sum(r[1] for r in results)}))


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles of each round in milliseconds, and their median over the rounds."""
    out: dict[str, Any] = {}
    for name in ("step_s", "period_s", "gap_s"):
        for share in (0.5, 0.99):
            values = [round(percentile(one[name], share) * 1e3, 3) for one in rounds if name in one]
            if values:
                key = f"{name[:-2]}_p{int(share * 100)}_ms"
                out[key] = statistics.median(values)
                out[f"{key}_rounds"] = values
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--fake-step-ms", type=float)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("clients", "offline"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "clients":
        asyncio.run(clients(arguments))
        return
    if arguments.role == "offline":
        offline(arguments)
        return
    import uvloop

    alone: list[dict[str, Any]] = []
    served: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        if arguments.fake_step_ms is None:
            command = [sys.executable, __file__, "--role", "offline", "--model", arguments.model]
            command += ["--streams", str(arguments.streams), "--tokens", str(arguments.tokens)]
            command += ["--threads", str(arguments.threads)]
            alone.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            served.append(runner.run(serve_round(arguments)))
    report: dict[str, Any] = {
        "benchmark": "server_overhead",
        "model": arguments.model if arguments.fake_step_ms is None else f"fake, {arguments.fake_step_ms} ms a step",
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "server_us_per_token": [round(one["server_us_per_token"], 1) for one in served],
        "server": summary(served),
    }
    if alone:
        report["offline"] = summary(alone)
        for name in ("step_p50_ms", "step_p99_ms", "period_p50_ms", "period_p99_ms"):
            report[f"{name[:-3]}_ratio"] = round(report["server"][name] / report["offline"][name], 3)
    print(json.dumps(report) if arguments.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
