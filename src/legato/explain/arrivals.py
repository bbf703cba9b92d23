"""The requests of a trace, to be sent or simulated once more."""

from __future__ import annotations

from collections.abc import Iterator

from legato.explain.read import Trace
from legato.workload.arrivals import Arrival


def arrivals_of(trace: Trace, speed: float = 1.0) -> Iterator[Arrival]:
    """In order of time, the first at 0, `speed` times as fast as they came. Prompts share what they shared then.

    Answers are as long as they became; of a request whose end is not in the trace, as long as they were allowed to be.
    Those that began before the trace does, and those that got no token, are left out.
    """
    width = trace.header.engine.block_tokens
    asked = sorted((r for r in trace.requests.values() if not r.generated), key=lambda r: r.arrival_s)
    first_s = asked[0].arrival_s if asked else 0.0
    for request in asked:
        end = trace.ends.get(request.id)
        tokens = request.max_tokens if end is None else end.generated
        if tokens:
            shared = tuple((name, width) for name in request.blocks)
            at_s = (request.arrival_s - first_s) / speed
            yield Arrival(at_s, request.prompt_tokens, tokens, shared, request.tenant)
