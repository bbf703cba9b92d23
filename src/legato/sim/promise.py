"""The gap between tokens that a simulated engine keeps, as `legato serve` chooses it."""

from __future__ import annotations

from legato.core.cost import StepCost
from legato.core.promise import USUAL_CONTEXT, decode_seconds, usual_gap
from legato.errors import ConfigError


def gap_of(
    cost: StepCost, itl_ms: float | None, max_num_batched_tokens: int | None, max_num_seqs: int, context: int
) -> float | None:
    """Seconds: as asked for; by default what the machine chooses; None if a budget in tokens is given alone.

    Raises ConfigError, with what is feasible, for one below a step of a single stream.
    """
    if itl_ms is None:
        if max_num_batched_tokens is not None:
            return None
        return usual_gap(cost, max_num_seqs, min(USUAL_CONTEXT, context - 1))
    least_s = decode_seconds(cost, 1, 0)
    if itl_ms / 1000 <= least_s:
        raise ConfigError(
            f"a step of one stream alone takes {1000 * least_s:.2f} ms there, and {itl_ms:g} are asked for;"
            f" {1250 * least_s:.2g} ms and more can be kept, and leave prompts a fifth"
        )
    return itl_ms / 1000
