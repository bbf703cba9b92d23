"""What a budget promises: seconds until a prompt is answered beside running streams, from predictions alone."""

from __future__ import annotations

from legato.core.cost import StepCost
from legato.core.shape import StepShape


def decode_seconds(cost: StepCost, streams: int, context: int) -> float:
    """A step of `streams` decodes, each at position `context`."""
    return cost.predict(StepShape.of_decodes([context] * streams, cost.attention))


def prompt_seconds(
    cost: StepCost, itl_s: float, max_tokens: int, prompt_tokens: int, streams: int, context: int
) -> float:
    """From the admission of a prompt to its first token, beside `streams` that decode at position `context`.

    The steps that `plan_step` would make: as many rows each as fit `itl_s`, at least 1. Cost: O(steps).
    """
    decodes = StepShape.of_decodes([context] * streams, cost.attention)
    start, seconds = 0, 0.0
    while start < prompt_tokens:
        most = min(prompt_tokens - start, max_tokens - streams)
        limit_s = itl_s if streams else float("inf")
        rows = max(cost.rows_within(decodes, start, most, limit_s, int(start + most == prompt_tokens)), 1)
        seconds += cost.predict(decodes.with_chunk(cost.attention, start, rows, int(start + rows == prompt_tokens)))
        start += rows
    return seconds
