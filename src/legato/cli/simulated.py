"""What a simulation found, on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def show(document: dict[str, Any]) -> None:
    """Prints what a simulation found."""
    show_rows(_title(document), _rows(document))


def show_rows(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Prints labels and texts under each other."""
    from rich.console import Console

    rows = list(rows)
    width = max(len(label) for label, _ in rows) + 2
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\n{title}\n")
    for label, text in rows:
        console.print(f"  [dim]{label:{width}}[/]{text}")
    console.print()


def rows_of_times(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Of those that it has."""
    kinds = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms"))
    return [(label, _spread(document[name])) for label, name in kinds if document[name] is not None]


def _title(document: dict[str, Any]) -> str:
    named, fleet = document["simulate"], document["fleet"]
    times = f"{fleet['replicas']} replicas, {fleet['router']}, " if fleet["replicas"] > 1 else ""
    cut = "" if document["complete"] else " · [yellow]interrupted[/]"
    return f"[bold cyan]{named['model']}[/] on {times}{named['device']}{cut}"


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    engine, requests, simulation = document["engine"], document["requests"], document["simulation"]
    bound = f"{engine['max_num_batched_tokens']:,} tokens a step"
    if engine["itl_ms"] is not None:
        bound = f"{engine['itl_ms']:,.1f} ms between tokens, {bound} at most"
    refused = f" · [yellow]{requests['refused']:,} refused[/]" if requests["refused"] else ""
    open_ = f" · {requests['unfinished']:,} unfinished" if requests["unfinished"] else ""
    rows = [
        ("engine", f"{bound} · {engine['max_num_seqs']} at once · {engine['policy']}"),
        (
            "requests",
            f"{requests['completed']:,} completed in {_span(document['seconds'])}{refused}{open_}",
        ),
    ]
    rows += [(kind, f"{times:,} ×") for kind, times in requests["refusals"].items()]
    rows += rows_of_times(document)
    if (goodput := document["goodput"]) is not None:
        wanted = ", ".join(f"{k.removesuffix('_ms').upper()} ≤ {v:g} ms" for k, v in goodput["objectives"].items())
        share = f"[bold]{goodput['requests_per_s']:,.3g} requests/s[/] ({100 * goodput['share']:.1f} %) with {wanted}"
        rows.append(("goodput", f"{share} · {goodput['tokens_per_s']:,.0f} tokens/s"))
    if (stalls := document["stalls"]) is not None:
        rows.append(("stalls", f"{stalls['gaps']:,} gaps over {stalls['over_ms']:,.1f} ms"
                               f" ({100 * stalls['share']:.3f} %)"))  # fmt: skip
    cached = f" · {100 * document['cached_share']:.1f} % of prompts from the cache" if document["cached_share"] else ""
    rows += [
        ("output", f"{document['output_tokens_per_s']:,.0f} tokens/s"),
        ("prompts", f"{document['prompt_tokens_per_s']:,.0f} tokens/s{cached}"),
        (
            "KV cache",
            f"{100 * document['kv']['mean']:.1f} % in use, {100 * document['kv']['max']:.1f} % at most"
            f" · {document['preemptions']:,} preemptions",
        ),
        ("busy", f"{100 * document['busy_share']:.1f} % of the time · {document['steps']:,} steps"),
    ]
    if (fairness := document["fairness"]) is not None:
        rows.append(("fairness", f"{fairness['jain']:.3f} (Jain) of {len(fairness['tenants'])} tenants' tokens/s"))
        for name, of in list(fairness["tenants"].items())[:8]:
            rows.append((f"  {name[:9]}", f"{of['completed']:,} completed · {of['tokens_per_s']:,.0f} tokens/s"
                                          f" · TTFT {_spread(of['ttft_ms'])}"))  # fmt: skip
    if (cost := document["cost"]) is not None:
        with_prompts = f"{cost['per_million_tokens']:,.2f} with prompts · {cost['total']:,.2f} in all"
        rows.append(("cost", f"{cost['per_million_output_tokens']:,.2f} a million tokens of answers · {with_prompts}"))
    rows.append(("simulated", f"in {_span(simulation['wall_s'])}: {simulation['steps_per_s']:,} steps/s"))
    return rows


def _spread(value: dict[str, float] | None) -> str:
    if value is None:
        return "none"
    return (
        f"p50 {_time(value['p50'])} · p90 {_time(value['p90'])} · p99 {_time(value['p99'])} · max {_time(value['max'])}"
    )


def _time(ms: float) -> str:
    return f"{ms:,.1f} ms" if ms < 1000 else f"{ms / 1000:,.2f} s"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.2f} h"
