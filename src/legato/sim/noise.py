"""`Recorded`: how much longer steps took than they should have, at each moment of a run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from legato.core.shape import StepShape


class Recorded:
    """Ratios of what steps took to what they should have. A step has that of the one of its kind which began nearest.

    `decodes`: (second, ratio) of steps of decodes alone, `prompts`: of the others; each ascending. Of a kind that was
    not seen, steps take what they should.
    """

    def __init__(self, decodes: Sequence[tuple[float, float]], prompts: Sequence[tuple[float, float]]) -> None:
        self._kinds = decodes, prompts

    def __call__(self, shape: StepShape, begin_s: float) -> float:
        """Of a step that begins then. Cost: O(log steps)."""
        kind = self._kinds[shape.rows > shape.sequences]
        if not kind:
            return 1.0
        at = bisect_left(kind, (begin_s, 0.0))
        near = kind[max(at - 1, 0) : at + 1] or kind[-1:]
        return min(near, key=lambda entry: abs(entry[0] - begin_s))[1]
