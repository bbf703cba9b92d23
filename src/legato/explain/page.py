"""A trace as one HTML page: a timeline, where the time of each step went, and the worst gaps. Needs no network."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from legato.explain.attribute import Attribution, Explanation, Gap
from legato.explain.lanes import Lane, lanes_of
from legato.explain.parts import KINDS
from legato.explain.sentence import Teller

# A page with every late token of a bad day would be tens of megabytes; the worst tell enough.
_MOST_LATE, _LISTED = 2000, 40


def draw_page(found: Explanation) -> str:
    """The page. Size: about 100 bytes a step, 300 a late gap."""
    teller = Teller(found)
    begin_s = teller.begin_s
    lanes = lanes_of(found.trace)
    worst = found.worst(_LISTED)
    late = sorted(found.late, key=lambda gap: -gap.over_s)[:_MOST_LATE]
    listed = [gap for gap, _ in worst]
    known = {(gap.request_id, gap.token) for gap in listed}
    shown = listed + [gap for gap in late if (gap.request_id, gap.token) not in known]
    places = {lane.request_id: place for place, lane in enumerate(lanes)}
    data = {
        "budget": None if found.budget_s is None else _ms(found.budget_s),
        "kv": found.trace.header.engine.kv_blocks,
        "kinds": KINDS,
        "steps": _steps(found, begin_s),
        "lanes": [_lane(found, lane, begin_s) for lane in lanes],
        "gaps": [_gap(teller, gap, places, begin_s) for gap in shown],
    }
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    title = f"{found.trace.header.model}: why was this token late?"
    filled = {
        "TITLE": escape(title),
        "SUMMARY": escape(_summary(found)),
        "CAUSES": _causes(found),
        "CAPTION": _caption(found, len(late)),
        "ROWS": "".join(_row(teller, n, gap, others, begin_s) for n, (gap, others) in enumerate(worst)),
        "DATA": encoded,
    }
    page = files("legato.explain").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\[\[([A-Z]+)\]\]", lambda found: filled[found[1]], page)


def _summary(found: Explanation) -> str:
    trace, tokens = found.trace, sum(map(len, found.tokens.values()))
    seconds = trace.steps[-1].ended_s - trace.steps[0].started_s
    counts = f"{seconds:,.1f} s, {len(trace.steps):,} steps, {len(trace.requests):,} requests, {tokens:,} tokens"
    if found.budget_s is None:
        return f"{counts}. The server planned for no gap, so none is late."
    late = f"{len(found.late):,} of {found.gaps:,} are" if found.late else f"none of {found.gaps:,} is"
    return f"{counts}. A gap may be {_ms(found.budget_s):,.0f} ms: {late} longer."


def _causes(found: Explanation) -> str:
    cells = [
        f'<li><i class="{cause}"></i><b>{count:,}</b> {escape(cause.replace("_", " "))}'
        f" <small>{1000 * over_s:,.0f} ms over, {escape(KINDS[cause])}</small></li>"
        for cause, (count, over_s) in found.causes.items()
    ]
    return f'<ul class="causes">{"".join(cells)}</ul>' if cells else ""


def _caption(found: Explanation, late: int) -> str:
    which = "The worst gaps" if found.late else "The longest gaps"
    left_out = len(found.late) - late
    more = f" Of {len(found.late):,} late ones the worst {late:,} are marked above." if left_out > 0 else ""
    return escape(f"{which}, one a step.{more}")


def _row(teller: Teller, place: int, gap: Gap, others: int, begin_s: float) -> str:
    beside = f" <small>and {others:,} more</small>" if others else ""
    late = ' class="late"' if gap.is_late else ""
    times = f"<td>{gap.ends_s - begin_s:,.2f} s</td><td{late}>{_ms(gap.seconds):,.1f}</td>"
    return (
        f'<tr data-gap="{place}" tabindex="0">{times}'
        f'<td><i class="{gap.cause}"></i> {gap.cause.replace("_", " ")}</td>'
        f"<td>{escape(teller.sentence(gap))}{beside}</td></tr>\n"
    )


def _steps(found: Explanation, begin_s: float) -> dict[str, list[Any]]:
    """Columns, milliseconds; `k`: blocks in use after each."""
    steps, attribution = found.trace.steps, Attribution(found.trace)
    parts = [attribution.split(index) for index in range(len(steps))]
    blocks = found.trace.header.engine.kv_blocks
    return {
        "n": [step.step for step in steps],
        "t": [_ms(step.started_s - begin_s) for step in steps],
        "d": [_ms(step.step_s) for step in steps],
        "e": [_ms(step.dispatched_s - begin_s) for step in steps],
        "decodes": [_ms(part.decodes) for part in parts],
        "sampling": [_ms(part.sampling) for part in parts],
        "chunks": [_ms(sum(seconds for _, seconds in part.chunks)) for part in parts],
        "planning": [_ms(part.planning) for part in parts],
        "noise": [_ms(part.noise) for part in parts],
        "b": [None if step.budget_s is None else _ms(step.budget_s) for step in steps],
        "q": [step.decodes for step in steps],
        "r": [sum(step.counts) for step in steps],
        "w": [step.waiting for step in steps],
        "k": [blocks - step.free_blocks for step in steps],
    }


def _lane(found: Explanation, lane: Lane, begin_s: float) -> dict[str, Any]:
    asked, end = found.trace.requests.get(lane.request_id), found.trace.ends.get(lane.request_id)
    return {
        "id": lane.request_id,
        "a": _ms(lane.begins_s - begin_s),
        "b": _ms(lane.ends_s - begin_s),
        "prompt": None if asked is None else asked.prompt_tokens,
        "end": "open" if end is None else end.reason,
        "waits": [[what, _ms(start_s - begin_s), _ms(stop_s - begin_s)] for what, start_s, stop_s in lane.waits],
        "chunks": lane.chunks,
        "runs": lane.runs,
    }


def _gap(teller: Teller, gap: Gap, places: dict[int, int], begin_s: float) -> dict[str, Any]:
    return {
        "lane": places[gap.request_id],
        "a": _ms(gap.begins_s - begin_s),
        "b": _ms(gap.ends_s - begin_s),
        "late": gap.is_late,
        "cause": gap.cause,
        "why": teller.sentence(gap),
        "parts": {kind: _ms(seconds) for kind, seconds in gap.parts.seconds.items()},
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
