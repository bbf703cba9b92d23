"""What a simulation found, as numbers: for JSON, for tables, for comparison with a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from legato.sim.ledger import Ledger
from legato.sim.sketch import Sketch

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))


def spread(sketch: Sketch) -> dict[str, float] | None:
    """Mean, quantiles and largest, in milliseconds; None of none."""
    if not sketch.count:
        return None
    values = sketch.quantiles(share for _, share in QUANTILES)
    found = {"mean": sketch.mean, **{name: value for (name, _), value in zip(QUANTILES, values, strict=True)}}
    return {name: _ms(value) for name, value in {**found, "max": sketch.most}.items()}


def report(ledger: Ledger, replicas: int = 1, price_per_hour: float | None = None) -> dict[str, Any]:
    """All figures of a run. Rates are from the first arrival to the last token. `price_per_hour`: of one replica."""
    seconds = ledger.seconds or 1e-9
    wanted = ledger.objectives
    asked = {
        "ttft_ms": wanted.ttft_s,
        "itl_ms": wanted.itl_s,
        "tpot_ms": wanted.tpot_s,
    }
    objectives = {name: 1000 * value for name, value in asked.items() if value is not None}
    goodput = None
    if objectives:
        goodput = {
            "objectives": objectives,
            "requests_per_s": round(ledger.good / seconds, 4),
            "tokens_per_s": round(ledger.good_tokens / seconds, 2),
            "share": round(ledger.good / max(ledger.completed, 1), 4),
        }
    stalls = None
    if wanted.stall_s is not None:
        share = ledger.stalls / max(ledger.itl.count, 1)
        stalls = {"over_ms": 1000 * wanted.stall_s, "gaps": ledger.stalls, "share": round(share, 6)}
    return {
        "requests": {
            "arrived": ledger.arrived,
            "completed": ledger.completed,
            "unfinished": ledger.unfinished,
            "refused": sum(ledger.refusals.values()),
            "refusals": ledger.refusals,
        },
        "seconds": round(ledger.seconds, 3),
        "requests_per_s": round(ledger.completed / seconds, 4),
        "ttft_ms": spread(ledger.ttft),
        "itl_ms": spread(ledger.itl),
        "tpot_ms": spread(ledger.tpot),
        "e2e_ms": spread(ledger.e2e),
        "goodput": goodput,
        "stalls": stalls,
        "output_tokens_per_s": round(ledger.output_tokens / seconds, 2),
        "prompt_tokens_per_s": round(ledger.prompt_tokens / seconds, 2),
        "cached_share": round(ledger.cached_tokens / max(ledger.prompt_tokens, 1), 4),
        "kv": {
            "mean": round(ledger.kv_share_s / max(ledger.busy_s, 1e-9), 4),
            "max": round(ledger.most_kv_share, 4),
        },
        "preemptions": ledger.preemptions,
        "busy_share": round(ledger.busy_s / seconds / replicas, 4),
        "steps": ledger.step_count,
        "fairness": fairness(ledger),
        "cost": None if price_per_hour is None else cost(ledger, replicas, price_per_hour),
    }


def curves(ledger: Ledger) -> dict[str, Any]:
    """For pictures: quantiles in hundredths; and over time, as rows of [second, running, waiting, share of KV]."""
    shares = [n / 100 for n in range(101)]
    quantiles = {
        name: [_ms(value) for value in sketch.quantiles(shares)]
        for name, sketch in (("ttft_ms", ledger.ttft), ("itl_ms", ledger.itl), ("e2e_ms", ledger.e2e))
    }
    return {**quantiles, "series": [[round(value, 4) for value in row] for row in ledger.series]}


def fairness(ledger: Ledger) -> dict[str, Any] | None:
    """Of tenants; None if there is one. `jain`: Jain's index of the tokens a second, prompt and answer, that each got
    while it had unfinished requests: 1 if all got alike, 1/n if one got everything.
    """
    if len(ledger.tenants) < 2:
        return None
    tenants = {
        name: {
            "completed": tenant.finished,
            "tokens_per_s": round(tenant.tokens_per_s, 2),
            "ttft_ms": spread(tenant.ttft),
        }
        for name, tenant in sorted(ledger.tenants.items())
    }
    return {"jain": round(jain([t.tokens_per_s for t in ledger.tenants.values()]), 4), "tenants": tenants}


def jain(values: Sequence[float]) -> float:
    """Square of the sum over n times the sum of squares (Jain, Chiu, Hawe, 1984). 1 of nothing."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def cost(ledger: Ledger, replicas: int, price_per_hour: float) -> dict[str, float]:
    """What it costs to keep so many replicas so long, and that by a million tokens."""
    total = replicas * price_per_hour * ledger.seconds / 3600
    millions = ledger.output_tokens / 1e6
    return {
        "price_per_hour": price_per_hour,
        "total": round(total, 4),
        "per_million_output_tokens": round(total / millions, 4) if millions else 0.0,
        "per_million_tokens": round(total / (millions + ledger.prompt_tokens / 1e6), 4) if millions else 0.0,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
