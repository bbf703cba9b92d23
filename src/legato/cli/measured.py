"""What the measurements of servers found, as lines for the terminal and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.bench.capacity import Plan, Probe
    from legato.bench.dialect import Dialect
    from legato.bench.interference import Figures, Run, Settings
    from legato.bench.machine import Meter
    from legato.bench.plot import Picture
    from legato.bench.record import Spread


def interference_rows(found: Figures, settings: Settings, meter: Meter) -> list[tuple[str, str]]:
    """Labels and texts."""
    lengths = " and ".join(f"{tokens:,}" for tokens in settings.prompt_tokens)
    rows = [
        ("load", f"{settings.streams} streams · a prompt of {lengths} tokens every {settings.every_s:g} s"),
        ("ITL", f"{_spread(found.itl)} · between tokens of the streams"),
        ("  beside", f"{_spread(found.itl_beside)} · while a long prompt was in flight"),
        ("  apart", f"{_spread(found.itl_apart)} · while none was"),
        (
            "stalls",
            f"{found.stalls:,} gaps over {settings.budget_ms:g} ms: {100 * found.late_share:.2f} % of the tokens late",
        ),
        ("TTFT, long", f"{_waits(found.long_ttft_all)} · {found.long_completed} of {found.long_sent} long prompts"),
    ]
    if len(found.long_ttft) > 1:
        rows += [(f"  {tokens:,}", _waits(value)) for tokens, value in found.long_ttft.items()]
    rows += [
        ("TTFT, streams", f"{_waits(found.stream_ttft)} · when they asked anew"),
        ("output", f"{found.output_tokens_per_s:,.1f} tokens/s"),
        ("prompts", f"{found.prompt_tokens_per_s:,.1f} tokens/s of long prompts"),
    ]
    if found.tokens_per_chunk is None:
        rows.append(("chunks", "taken for tokens: the server did not tell how many tokens an answer had"))
    elif abs(found.tokens_per_chunk - 1) > 0.02:
        rows.append(("chunks", f"{found.tokens_per_chunk:.2f} tokens each: a gap is between chunks, not tokens"))
    return [*rows, ("client", _client(meter))]


def capacity_rows(best: Probe, plan: Plan, meter: Meter) -> list[tuple[str, str]]:
    """The same of the highest rate that met both limits."""
    limits = plan.limits
    return [
        ("load", f"prompts of {plan.prompt} tokens, answers of {plan.output} · Poisson · seed {plan.seed}"),
        (
            "capacity",
            f"[bold]{best.rate:.3g} requests/s[/]{' or more (--max-rate)' if best.rate >= plan.max_rate else ''}",
        ),
        ("TTFT", f"p99 {_ms(best.ttft, 'p99_ms')} of {limits.ttft_ms:g} ms"),
        ("ITL", f"p99 {_ms(best.itl, 'p99_ms')} of {limits.itl_ms:g} ms"),
        ("goodput", f"{best.good_requests_per_s:.3g} requests/s · {best.good_tokens_per_s:,.1f} tokens/s meet both"),
        ("requests", f"{best.sent:,} at this rate{'' if best.sent >= 100 else ': p99 is the worst of them'}"),
        ("client", _client(meter)),
    ]


def probe_line(probe: Probe) -> str:
    """One rate, told as soon as it is known."""
    verdict = "meets" if probe.meets else f"misses: {'; '.join(probe.misses)}"
    return (
        f"{probe.rate:8.3g} requests/s · {probe.sent:4} sent, {probe.completed:4} completed"
        f" · p99 TTFT {_ms(probe.ttft, 'p99_ms')}, ITL {_ms(probe.itl, 'p99_ms')} · {verdict}"
    )


def picture_of(run: Run, found: Figures, dialect: Dialect) -> Picture:
    """Every token of the streams."""
    from legato.bench.plot import Picture

    gaps, settings = run.gaps(), run.settings
    spans = [(prompt.span_s(run.cut_s), prompt.served_tokens) for prompt in run.long]
    ends_s = [begin + length - run.start_s for begin, length in zip(gaps.begin_s, gaps.length_s, strict=True)]
    lengths = " and ".join(f"{tokens:,}" for tokens in settings.prompt_tokens)
    worst = f"p50 {_ms(found.itl, 'p50_ms')}, p99 {_ms(found.itl, 'p99_ms')}, worst {_ms(found.itl, 'max_ms')}"
    return Picture(
        title=f"{dialect.model}: {settings.streams} streams while prompts of {lengths} tokens are read",
        subtitle=f"Gap before each token: {worst}",
        duration_s=settings.duration_s,
        budget_ms=settings.budget_ms,
        at_s=ends_s,
        gap_ms=[1e3 * length for length in gaps.length_s],
        spans=[(sent_s - run.start_s, first_s - run.start_s, tokens) for (sent_s, first_s), tokens in spans],
    )


def _spread(value: Spread | None) -> str:
    if value is None:
        return "none"
    return f"p50 {value.p50_ms:,.1f} ms · p99 {value.p99_ms:,.1f} · worst {value.max_ms:,.1f}"


def _waits(value: Spread | None) -> str:
    return "none" if value is None else f"p50 {value.p50_ms / 1e3:,.2f} s · worst {value.max_ms / 1e3:,.2f} s"


def _ms(value: Spread | None, name: str) -> str:
    return "–" if value is None else f"{getattr(value, name):,.0f} ms"


def _client(meter: Meter) -> str:
    lag = "" if meter.lag is None else f" · woken {meter.lag.p99_ms:.1f} ms late (p99)"
    steal = "" if meter.steal_share is None else f" · steal {100 * meter.steal_share:.1f} % of this machine"
    return f"{100 * meter.cores:.0f} % of a core{lag}{steal}"
