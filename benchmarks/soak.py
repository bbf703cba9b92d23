"""Many clients, a third of which leave at random, on a pool of a quarter of what they ask for: does anything leak?

    python benchmarks/soak.py [--minutes 20] [--requests 2000] [--model smollm2-135m] [--json]

Starts `legato serve` and keeps `--clients` requests of mixed sizes open until both the time and the number are reached;
some bodies are sent again, so that prefixes are shared, some are greedy, some sampled with a seed, and every answer to
a body must be the same text. At the end no block may be missing, nobody may be left, and the resident memory of server
and engine is compared with that after the first tenth of the requests. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PORT = 18924
BASE = f"http://127.0.0.1:{PORT}"
TEXT_VOCAB = (300, 20_000)
# Far more than a queue of all clients takes, on a busy machine, for the least important of them.
STUCK_S = 1200.0
# Half have a patience of so many seconds on average; the quick ones among them are answered before: a third leaves.
LEAVING, LEAVE_S = 0.5, 1.5


@dataclass
class Soak:
    """What came of it. `stuck`: requests without an end in 20 minutes. `different`: equal bodies, unequal answers."""

    sent: int = 0
    left: int = 0
    answered: dict[str, int] = field(default_factory=dict)
    stuck: int = 0
    failed: list[str] = field(default_factory=list)
    different: int = 0
    slowest_s: float = 0.0
    texts: dict[str, str] = field(default_factory=dict)
    rss: list[tuple[int, int]] = field(default_factory=list)

    def drift(self) -> float:
        """Growth of the resident memory since a tenth of the requests, as a share."""
        early = [nbytes for sent, nbytes in self.rss if sent >= self.sent // 10][:5]
        late = [nbytes for _, nbytes in self.rss[-5:]]
        return sum(late) / len(late) / (sum(early) / len(early)) - 1.0


def bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests of mixed sizes: short questions, long documents, conversations that share their beginning."""
    documents = [[rng.randrange(*TEXT_VOCAB) for _ in range(1200)] for _ in range(12)]
    out: list[dict[str, Any]] = []
    while len(out) < count:
        if out and rng.random() < 0.25:
            out.append(rng.choice(out))
            continue
        length = int(min(1200, max(1, rng.lognormvariate(5.0, 1.1))))
        shared = rng.choice(documents)[: int(length * rng.choice((0.0, 0.5, 0.9, 1.0)))]
        prompt = shared + [rng.randrange(*TEXT_VOCAB) for _ in range(length - len(shared))]
        body = {"prompt": prompt, "max_tokens": int(min(400, max(1, rng.lognormvariate(4.2, 0.8))))}
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(1000)}
        body |= sampled if rng.random() < 0.3 else {"temperature": 0}
        out.append({**body, "priority": rng.choice((0, 0, 1))})
    return out


def demand_tokens(requests: list[dict[str, Any]], clients: int) -> int:
    """KV tokens that so many open requests ask for, on average."""
    return clients * sum(len(r["prompt"]) + r["max_tokens"] for r in requests) // len(requests)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave_s: float | None, soak: Soak) -> None:
    """One request, to its end or until its client leaves."""
    text, reason, sent_s = "", "", time.monotonic()

    async def read() -> None:
        nonlocal text, reason
        async with client.stream("POST", f"{BASE}/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                soak.failed.append(f"{response.status_code}: {(await response.aread())[:200]!r}")
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        soak.failed.append(str(event["error"])[:200])
                        return
                    text += event["choices"][0]["text"]
                    reason = event["choices"][0]["finish_reason"] or reason

    try:
        await asyncio.wait_for(read(), leave_s if leave_s is not None else STUCK_S)
    except TimeoutError:
        if leave_s is None:
            soak.stuck += 1
        else:
            soak.left += 1
        return
    soak.answered[reason] = soak.answered.get(reason, 0) + 1
    soak.slowest_s = max(soak.slowest_s, time.monotonic() - sent_s)
    key = json.dumps(body, sort_keys=True)
    if reason in ("length", "stop") and soak.texts.setdefault(key, text) != text:
        soak.different += 1


def resident_bytes(pid: int) -> int:
    """Of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
    return own * 1024 + sum(resident_bytes(int(child)) for child in children)


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample without its labels; of several with one name, the sum."""
    samples: dict[str, float] = {}
    for line in (await client.get(f"{BASE}/metrics")).text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            samples[name] = samples.get(name, 0.0) + float(value)
    return samples


async def soak_server(
    options: argparse.Namespace, pid: int, requests: list[dict[str, Any]], soak: Soak
) -> dict[str, float]:
    """Sends requests, a constant number of them open; the metrics at the end."""
    rng = random.Random(options.seed + 1)
    places = asyncio.Semaphore(options.clients)
    sample_s = max(1.0, 0.6 * options.minutes)
    async with httpx.AsyncClient(timeout=STUCK_S, limits=httpx.Limits(max_connections=None)) as client:
        await up(client)
        start_s = sampled_s = time.monotonic()

        async def one(body: dict[str, Any], leave_s: float | None) -> None:
            try:
                await ask(client, body, leave_s, soak)
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            while soak.sent < options.requests or time.monotonic() - start_s < 60 * options.minutes:
                await places.acquire()
                leave_s = rng.expovariate(1 / LEAVE_S) if rng.random() < LEAVING else None
                group.create_task(one(requests[soak.sent % len(requests)], leave_s))
                soak.sent += 1
                if time.monotonic() - sampled_s >= sample_s:
                    sampled_s = time.monotonic()
                    soak.rss.append((soak.sent, resident_bytes(pid)))
                    if sys.stderr.isatty():
                        print(f"\r{soak.sent} sent, {soak.left} left", end="", file=sys.stderr)
        await asyncio.sleep(1.0)
        soak.rss += [(soak.sent, resident_bytes(pid)) for _ in range(5)]
        return await metrics(client)


async def up(client: httpx.AsyncClient) -> None:
    """Returns when the server answers."""
    for _ in range(600):
        try:
            (await client.get(f"{BASE}/health")).raise_for_status()
            return
        except httpx.HTTPError:
            await asyncio.sleep(0.2)
    sys.exit("the server did not come up in two minutes")


def main() -> None:
    """Soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32, help="requests open at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--swap-space", default="0")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    requests = bodies(random.Random(options.seed), options.requests)
    demand = demand_tokens(requests, options.clients)
    pool = max(1600, demand // 4)
    command = [sys.executable, "-m", "legato.cli.main", "serve", options.model, "--port", str(PORT)]
    command += ["--kv-tokens", str(pool), "--swap-space", options.swap_space]
    soak, start_s = Soak(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            end = asyncio.run(soak_server(options, server.pid, requests, soak))
        finally:
            server.terminate()
    report = {
        "minutes": round((time.monotonic() - start_s) / 60, 1),
        "requests": soak.sent,
        "left": soak.left,
        "answered": soak.answered,
        "pool_tokens": pool,
        "demand_tokens": demand,
        "preemptions": int(end["vllm:num_preemptions_total"]),
        "hit_rate": round(end["legato_prefix_cache_hit_rate"], 3),
        "evictions": int(end["legato_prefix_cache_evictions_total"]),
        "overtakes": int(end["legato_overtakes_total"]),
        "lost_blocks": int(end["legato_kv_blocks"] - end["legato_kv_free_blocks"]),
        "still_open": int(end["vllm:num_requests_running"] + end["vllm:num_requests_waiting"]),
        "stuck": soak.stuck,
        "slowest_s": round(soak.slowest_s, 1),
        "failed": soak.failed,
        "different_answers": soak.different,
        "rss_mib": [round(nbytes / 2**20, 1) for _, nbytes in (soak.rss[len(soak.rss) // 10], soak.rss[-1])],
        "rss_drift": round(soak.drift(), 4),
    }
    wrong = [name for name in ("lost_blocks", "still_open", "stuck", "failed", "different_answers") if report[name]]
    if soak.drift() >= 0.02:
        wrong.append("rss_drift")
    report["wrong"] = wrong
    print(json.dumps(report) if options.json else "\n".join(f"{name:<18}{value}" for name, value in report.items()))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
