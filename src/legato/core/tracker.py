"""`CostTracker`: keeps a `StepCost` true while the machine changes, and knows how far to trust it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence

from legato.core.cost import Sample, StepCost
from legato.core.shape import StepShape

# How fast the machine is now: the median of this many steps, at first of five. It has followed a change after eight,
# and no outlier.
_NOW_STEPS, _FEWEST_STEPS = 15, 5
# Beyond this the machine has changed; what is less is noise, and averaged.
_CHANGED = math.log(1.1)
_AVERAGED_STEPS = 16
# Residuals are kept of this many steps; with fewer than the second number, the margin is the first one.
_RECENT_STEPS, _ENOUGH_STEPS = 512, 64
# An interruption lasts as long whatever the step is: a larger margin would cost work and keep none of them out.
_MOST_MARGIN = 1.5
# Samples kept to fit anew: the last of each kind of step, and so many kinds. Decodes do not push chunks out.
_SAMPLES_A_KIND, _KINDS = 6, 48


class CostTracker:
    """Takes the shape and duration of every step. `cost` is the best prediction, `safe` the one that most steps keep.

    What the machine's speed does is followed within some ten steps, whatever a single step does. What terms cost
    against each other changes only in `adopt`: when there is time, `tracker.adopt(fit(tracker.samples, attention))`,
    in another thread if need be. State is bounded; equal steps give equal answers.
    """

    def __init__(
        self, cost: StepCost, samples: Sequence[Sample] = (), *, quantile: float = 0.95, margin: float = 1.2
    ) -> None:
        """`samples`: what `cost` was fitted to. `quantile`: the share of steps that keep `safe`. `margin`: at first."""
        self._terms = cost.scaled(1.0)
        self._drift = math.log(cost.scale)  # the machine now, over the machine of the terms
        self._quantile = quantile
        self._first_margin = margin
        self._calibrated = tuple(samples)
        self._kinds: OrderedDict[tuple[int, ...], deque[Sample]] = OrderedDict()
        self._drifts: deque[float] = deque(maxlen=_NOW_STEPS)
        self._settled = 0  # steps since the machine changed, at most those that are averaged
        self._ratios: deque[float] = deque()  # actual over predicted
        self._ascending: list[float] = []  # the same
        self.cost = cost
        """Predictions as of now: its `scale` follows the machine. A new object after each step."""
        self.safe = cost.scaled(cost.scale * margin)
        """`cost`, longer by `margin`."""

    @property
    def margin(self) -> float:
        """Actual over predicted seconds that `quantile` of the last 512 steps kept, between 1 and 1.5.

        Predictions are those made before the step was carried out.
        """
        if len(self._ratios) < _ENOUGH_STEPS:
            return self._first_margin
        kept = self._ascending[int(self._quantile * (len(self._ascending) - 1) + 0.5)]
        return min(max(1.0, kept), _MOST_MARGIN)

    @property
    def median_error(self) -> float:
        """Of the last 512 steps, |actual / predicted - 1|. 0 before the first."""
        return self._error(0.5)

    @property
    def p95_error(self) -> float:
        """The same; 95 % of steps are nearer."""
        return self._error(0.95)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What to fit anew to: the calibration's and the last steps of each kind, as if the machine had not changed."""
        return (*self._calibrated, *(sample for kind in self._kinds.values() for sample in kind))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns from a step that took `seconds`. One that took no time, or has no rows, says nothing. Cost: 8 µs."""
        expected_s = self._terms.predict(shape)
        if seconds <= 0.0 or expected_s <= 0.0:
            return
        self._keep_ratio(seconds / (expected_s * self.cost.scale))
        self._keep_sample(shape, seconds)
        self._follow(math.log(seconds / expected_s))
        scale = math.exp(self._drift)
        self.cost = self._terms.scaled(scale)
        self.safe = self._terms.scaled(scale * self.margin)

    def adopt(self, cost: StepCost) -> None:
        """Goes on with terms that were fitted to `samples`."""
        self._terms = cost.scaled(1.0)
        self._drifts.clear()
        self.cost = cost.scaled(self.cost.scale)
        self.safe = cost.scaled(self.safe.scale)

    def _follow(self, drift: float) -> None:
        drifts = self._drifts
        drifts.append(drift)
        if len(drifts) < _FEWEST_STEPS:
            return
        self._settled = min(self._settled + 1, _AVERAGED_STEPS)
        off = sorted(drifts)[len(drifts) // 2] - self._drift
        if abs(off) <= _CHANGED:
            self._drift += off / self._settled
            return
        while len(drifts) > _NOW_STEPS // 2 + 1:  # what was before the change
            drifts.popleft()
        self._drift = sorted(drifts)[len(drifts) // 2]
        self._settled = 1

    def _keep_ratio(self, ratio: float) -> None:
        ratios, ascending = self._ratios, self._ascending
        ratios.append(ratio)
        insort(ascending, ratio)
        if len(ratios) > _RECENT_STEPS:
            del ascending[bisect_left(ascending, ratios.popleft())]

    def _keep_sample(self, shape: StepShape, seconds: float) -> None:
        kind = (shape.rows.bit_length(), shape.pairs.bit_length() // 2, shape.drawn_rows.bit_length())
        kept = self._kinds.get(kind)
        if kept is None:
            kept = self._kinds[kind] = deque(maxlen=_SAMPLES_A_KIND)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        kept.append(Sample(shape, seconds / self.cost.scale))

    def _error(self, quantile: float) -> float:
        errors = sorted(abs(ratio - 1.0) for ratio in self._ratios)
        return errors[int(quantile * (len(errors) - 1) + 0.5)] if errors else 0.0
