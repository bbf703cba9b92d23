"""Does a stream stall when somebody else pastes a long prompt? Measured twice, chunked and not, and drawn.

    python benchmarks/stall.py [--model smollm2-135m] [--streams 4] [--prompt-tokens 4000] [--svg FILE] [--json FILE]

Starts `legato serve` with a step budget of `--budget` tokens, then with one that takes the whole prompt in one step
(what an engine without chunked prefill does), lets `--streams` clients stream, and sends a long prompt two seconds in.
A dot is a token: when it came, and how long its reader had waited for it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

PORT = 18923
BASE = f"http://127.0.0.1:{PORT}"
LEGATO = [sys.executable, "-m", "legato.cli.main"]


@dataclass
class Run:
    """One server's run. `gaps`: (arrival, gap) in seconds since the streams' first token; `long_…`: the long prompt."""

    name: str
    gaps: list[tuple[float, float]] = field(default_factory=list)
    long_sent_s: float = 0.0
    long_first_token_s: float = 0.0

    def summary(self) -> dict[str, float]:
        """Median, p99 and worst gap in milliseconds, and the long prompt's time to first token in seconds."""
        gaps = sorted(gap for _, gap in self.gaps)
        return {
            "gap_p50_ms": round(1e3 * statistics.median(gaps), 1),
            "gap_p99_ms": round(1e3 * gaps[int(0.99 * (len(gaps) - 1))], 1),
            "gap_worst_ms": round(1e3 * gaps[-1], 1),
            "long_ttft_s": round(self.long_first_token_s - self.long_sent_s, 2),
        }


async def stream(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> list[float]:
    """Arrival times, in seconds, of the tokens of one streamed completion."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        return [time.perf_counter() async for line in response.aiter_lines() if line.startswith("data: {")]


async def interfere(run: Run, streams: int, prompt_tokens: int, tokens: int) -> None:
    """Let `streams` clients stream, send the long prompt after two seconds, and fill in `run`."""
    draw = random.Random(1)
    async with httpx.AsyncClient(base_url=BASE, timeout=600) as client:
        tasks = [
            asyncio.create_task(stream(client, [draw.randrange(100, 40000) for _ in range(32)], tokens))
            for _ in range(streams)
        ]
        await asyncio.sleep(2.0)
        sent = time.perf_counter()
        long_arrivals = await stream(client, [draw.randrange(100, 40000) for _ in range(prompt_tokens)], 3)
        arrivals = await asyncio.gather(*tasks)
    start = min(times[0] for times in arrivals)
    run.gaps = [(b - start, b - a) for times in arrivals for a, b in itertools.pairwise(times)]
    run.long_sent_s, run.long_first_token_s = sent - start, long_arrivals[0] - start
    if max(times[-1] for times in arrivals) < long_arrivals[0]:
        raise SystemExit("void: the streams ended before the long prompt was answered; raise --tokens")


def serve(model: str, budget: int) -> subprocess.Popen[bytes]:
    """A running server with that step budget, healthy."""
    command = [*LEGATO, "serve", model, "--port", str(PORT), "--max-num-batched-tokens", str(budget)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(600):
        try:
            if httpx.get(f"{BASE}/health").status_code == 200:
                return server
        except httpx.TransportError:
            pass
        if server.poll() is not None:
            break
        time.sleep(0.1)
    server.kill()
    raise SystemExit(f"the server did not come up: {' '.join(command)}")


def draw_svg(runs: list[Run], prompt_tokens: int) -> str:
    """Both runs, one above the other, on the same axes: time against the gap before each token."""
    width, height, left, top, gap = 860, 190, 64, 34, 62
    span = max(max(t for t, _ in run.gaps) for run in runs)
    tallest = 1e3 * max(g for run in runs for _, g in run.gaps) * 1.06
    parts = []
    for number, run in enumerate(runs):
        y0 = top + number * (height + gap)
        plot = width - left - 16

        def x(t: float, plot: int = plot) -> float:
            return left + t / span * plot

        def y(ms: float, y0: int = y0) -> float:
            return y0 + height - ms / tallest * height

        worst = run.summary()["gap_worst_ms"]
        parts.append(f'<text x="{left}" y="{y0 - 10}" class="h">{run.name} — worst gap {worst:,.0f} ms</text>')
        begin, end = x(max(run.long_sent_s, 0)), x(run.long_first_token_s)
        parts.append(f'<rect x="{begin:.1f}" y="{y0}" width="{end - begin:.1f}" height="{height}" class="p"/>')
        if number == 0:
            label = f"{prompt_tokens:,}-token prompt of somebody else"
            parts.append(f'<text x="{begin + 5:.1f}" y="{y0 + 56}" class="t">{label}</text>')
        tick_ms = 10 ** math.floor(math.log10(tallest))
        for value in range(0, int(tallest), tick_ms):
            parts.append(f'<path d="M{left} {y(value):.1f}H{width - 16}" class="g"/>')
            parts.append(
                f'<text x="{left - 8}" y="{y(value) + 4:.1f}" class="t" text-anchor="end">{value:,.0f} ms</text>'
            )
        dots = "".join(f"M{x(t):.1f} {y(1e3 * g):.1f}h0" for t, g in run.gaps)
        parts.append(f'<path d="{dots}" class="d{number}"/>')
    total = top + len(runs) * (height + gap)
    for tick in range(0, int(span) + 1, 2):
        at = left + tick / span * (width - left - 16)
        parts.append(f'<text x="{at:.1f}" y="{total - gap + 18}" class="t" text-anchor="middle">{tick} s</text>')
    style = (
        "text{font:13px system-ui,sans-serif;fill:#334155}.h{font-weight:600;fill:#0f172a}"
        ".t{font-size:11px;fill:#64748b}"
        ".g{stroke:#e2e8f0}.p{fill:#fde68a;opacity:.45}path{fill:none}"
        ".d0,.d1{stroke-width:4.5;stroke-linecap:round;opacity:.75}.d0{stroke:#0d9488}.d1{stroke:#dc2626}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total - gap + 30}" role="img" '
        f'aria-label="Gap before each token, with and without chunked prefill"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Measure, print the table and a JSON line, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each stream")
    parser.add_argument("--budget", type=int, default=128, help="tokens a step in the chunked run")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    for name, budget in (
        (f"Chunked prefill, {options.budget} tokens a step", options.budget),
        ("The whole prompt in one step", options.prompt_tokens + options.streams + 1),
    ):
        server = serve(options.model, budget)
        try:
            run = Run(name)
            asyncio.run(interfere(run, options.streams, options.prompt_tokens, options.tokens))
            runs.append(run)
        finally:
            server.terminate()
            server.wait(30)
        print(f"{name:40} {json.dumps(run.summary())}")
    print(json.dumps({run.name: run.summary() for run in runs}))
    if options.svg:
        options.svg.write_text(draw_svg(runs, options.prompt_tokens))
    if options.json:
        options.json.write_text(json.dumps([asdict(run) for run in runs]) + "\n")


if __name__ == "__main__":
    main()
