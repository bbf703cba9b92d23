"""What follows from predictions alone: seconds until a prompt is answered beside running streams, prices of work."""

from __future__ import annotations

from legato.core.cost import StepCost
from legato.core.shape import StepShape
from legato.core.tenants import Price

USUAL_CONTEXT = 1024
_ROWS, _DECODES, _FAR, _GAP_STEPS = 256, 16, 4096, 5


def decode_seconds(cost: StepCost, streams: int, context: int) -> float:
    """A step of `streams` decodes, each at position `context`."""
    return cost.predict(StepShape.of_decodes([context] * streams, cost.attention))


def usual_gap(cost: StepCost, limit: int, most_context: int) -> float:
    """The gap between tokens where nobody asks for one: five times a step of 16 streams at 1,024 positions each.

    Of fewer streams or positions where there are no more.
    """
    return _GAP_STEPS * decode_seconds(cost, min(_DECODES, limit), min(USUAL_CONTEXT, most_context))


def most_streams(cost: StepCost, step_s: float, limit: int, context: int) -> int:
    """The most streams, at most `limit`, whose decodes alone take `step_s`; at least 1."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if decode_seconds(cost, middle, context) <= step_s:
            low = middle
        else:
            high = middle - 1
    return low


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


def price_of(cost: StepCost) -> Price:
    """What work counts for when tenants share: the seconds that it takes on this machine.

    A prompt's row as one of 256, a decode as one of 16: alone in a step both would pay for reading the weights. What
    lies behind a row as at 4,096 positions.
    """
    attention = cost.attention
    near = cost.predict(StepShape().with_chunk(attention, 0, _ROWS))
    far = cost.predict(StepShape().with_chunk(attention, _FAR, _ROWS))
    return Price(near / _ROWS, max(far - near, 0.0) / _ROWS / _FAR, decode_seconds(cost, _DECODES, 1) / _DECODES)
