"""`CostTracker`: keeps a `StepCost` true while the machine changes, and knows how far to trust it."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

from legato.core.cost import Sample, StepCost
from legato.core.fit import fit
from legato.core.shape import StepShape

# Variance that a step adds to the logarithm of both speeds and to that of each by itself: of a follower that averages
# and knows one speed only, of one that averages both, and of one that turns quickly.
_PACES = ((3e-5, 0.0), (3e-5, 3e-5), (1e-3, 3e-3))
# Weight of the last step in how far off each follower is of late; an error beyond the second number counts as that.
_LATE_WEIGHT, _MOST_ERROR = 0.03, 0.3
# Errors are of this many steps. With fewer steps with prompts than the second number, the margin is the first one.
_RECENT_STEPS, _ENOUGH_STEPS = 512, 64
# The margin is of this many steps with prompts: where these are rare, further back the machine was another one.
_MARGIN_STEPS = 256
# An interruption lasts as long whatever the step is: a larger margin would cost work and keep none of them out.
_MOST_MARGIN = 1.5
# Samples kept to fit anew: the last of each kind of step, and so many kinds. Decodes do not push chunks out.
_SAMPLES_A_KIND, _KINDS = 6, 48
# Fitting anew is tried after so many steps, if predictions are further off than this, and adopted if the error of
# samples it has not seen falls to this share.
_REFIT_STEPS, _GOOD_MEDIAN, _GOOD_P95, _BETTER = 128, 0.025, 0.08, 0.9


class CostTracker:
    """Takes the shape and duration of every step. `cost` is the best prediction, `safe` the one that most steps keep.

    The speeds of arithmetic and of memory are followed within some ten steps, whatever a single step does. What other
    terms cost against each other changes only in `refit`, for when there is time. State is bounded; equal steps give
    equal answers.
    """

    def __init__(
        self, cost: StepCost, samples: Sequence[Sample] = (), *, quantile: float = 0.98, margin: float = 1.2
    ) -> None:
        """`samples`: what `cost` was fitted to. `quantile`: the share of steps that keep `safe`. `margin`: at first."""
        self._terms = cost.scaled(1.0, 1.0)
        self._followers = [_Follower(cost.scale, cost.memory_scale, *pace) for pace in _PACES]
        self._quantile = quantile
        self._first_margin = margin
        self._calibrated = tuple(samples)
        self._kinds: OrderedDict[tuple[int, ...], deque[Sample]] = OrderedDict()
        self._errors = _Window(_RECENT_STEPS)
        self._kept = _Window(_MARGIN_STEPS)
        self._steps_since_fit = 0
        self._scales = (cost.scale, cost.memory_scale)
        self._cost: StepCost | None = None  # made when somebody asks
        self._safe: StepCost | None = None

    @property
    def cost(self) -> StepCost:
        """Predictions as of now: its scales follow the machine. A new object after each step."""
        if self._cost is None:
            self._cost = self._terms.scaled(*self._scales)
        return self._cost

    @property
    def safe(self) -> StepCost:
        """`cost`, longer by `margin`."""
        if self._safe is None:
            scale, memory_scale = self._scales
            self._safe = self._terms.scaled(scale * self.margin, memory_scale)
        return self._safe

    @property
    def margin(self) -> float:
        """Actual over predicted seconds that `quantile` of the last 256 steps with prompts kept, between 1 and 1.5.

        Those alone are planned by it: decodes are in every step. Predictions are those made before the step was
        carried out.
        """
        if len(self._kept) < _ENOUGH_STEPS:
            return self._first_margin
        return min(max(1.0, self._kept.quantile(self._quantile)), _MOST_MARGIN)

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
        """What to fit anew to: the last steps of each kind, as if the machine had not changed, and the calibration's.

        Of these only kinds that were not seen since: they would hold on to what terms cost then.
        """
        return (*self._only_calibrated(), *(sample for kind in self._kinds.values() for sample in kind))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns from a step that took `seconds`. One that took no time, or has no rows, says nothing. Cost: 20 µs."""
        total_s, memory_s = self._terms.predict(shape), self._terms.memory_seconds(shape)
        if seconds <= 0.0 or total_s <= 0.0:
            return
        scale, memory_scale = self._scales
        ratio = seconds / (scale * (total_s + (memory_scale - 1.0) * memory_s))
        self._errors.append(ratio)
        if shape.rows > shape.sequences:
            self._kept.append(ratio)
        self._keep_sample(shape, seconds / math.exp(self._followers[0].arithmetic))
        for follower in self._followers:
            follower.follow(total_s - memory_s, memory_s, seconds)
        self._steps_since_fit += 1
        self._say()

    def adopt(self, cost: StepCost) -> None:
        """Goes on with terms that were fitted to `samples`."""
        self._terms = cost.scaled(1.0, 1.0)
        for follower in self._followers:
            follower.arithmetic = follower.memory = self._followers[0].arithmetic
        self._say()

    def refit(self) -> bool:
        """Fits terms to `samples` if predictions are poor of late, and adopts them if they are better. Whether it did.

        Better: a fit to every other sample of each kind predicts those left out better. Then all count. Cost: 60 ms;
        nothing where there is no need, or within 128 steps of the last try.
        """
        if self._steps_since_fit < _REFIT_STEPS:
            return False
        if self.median_error <= _GOOD_MEDIAN and self.p95_error <= _GOOD_P95:
            return False
        self._steps_since_fit = 0
        fitted_to, unseen = self._only_calibrated(), list[Sample]()
        for kind in self._kinds.values():
            for i, sample in enumerate(kind):
                (unseen if i % 2 else fitted_to).append(sample)
        scale, memory_scale = self._scales
        now = self._terms.scaled(scale / math.exp(self._followers[0].arithmetic), memory_scale)
        if not unseen or _mean_error(self._fitted(fitted_to), unseen) > _BETTER * _mean_error(now, unseen):
            return False
        self.adopt(self._fitted(self.samples))
        return True

    def _fitted(self, samples: Sequence[Sample]) -> StepCost:
        """The terms of `samples`; what copies cost stays as it was where none were made."""
        cost = fit(samples, self._terms.attention, tiles=(self._terms.tile,))
        if any(sample.shape.copied_blocks for sample in samples):
            return cost
        return dataclasses.replace(cost, copy_s=self._terms.copy_s)

    def _only_calibrated(self) -> list[Sample]:
        """Samples of the calibration of kinds that were not seen since."""
        return [sample for sample in self._calibrated if _kind(sample.shape) not in self._kinds]

    def _say(self) -> None:
        """Predicts by the follower that has been nearest of late."""
        nearest = min(self._followers, key=_ERROR)
        self._scales = (math.exp(nearest.arithmetic), math.exp(nearest.memory - nearest.arithmetic))
        self._cost = self._safe = None

    def _keep_sample(self, shape: StepShape, seconds: float) -> None:
        kind = _kind(shape)
        kept = self._kinds.get(kind)
        if kept is None:
            kept = self._kinds[kind] = deque(maxlen=_SAMPLES_A_KIND)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        kept.append(Sample(shape, seconds))

    def _error(self, quantile: float) -> float:
        errors = sorted(abs(ratio - 1.0) for ratio in self._errors)
        return errors[int(quantile * (len(errors) - 1) + 0.5)] if errors else 0.0


def _kind(shape: StepShape) -> tuple[int, ...]:
    """Equal for steps that tell about the same of what terms cost."""
    return (
        shape.rows.bit_length(),
        shape.pairs.bit_length() // 2,
        shape.drawn_rows.bit_length(),
        int(shape.copied_blocks > 0),
    )


def _mean_error(cost: StepCost, samples: Sequence[Sample]) -> float:
    """Of predictions, as logarithms; what is far off counts as one limit."""
    errors = (abs(math.log(sample.seconds / max(cost.predict(sample.shape), 1e-9))) for sample in samples)
    return sum(min(error, _MOST_ERROR) for error in errors) / len(samples)


# A step counts in full up to this distance from what is foreseen, in units of the usual one, and less beyond: others
# make a step longer, never shorter, so a long one is doubted sooner.
_LONG, _SHORT = 2.0, 3.0
# The usual distance: at first, and its bounds. Weight of the last step in it.
_SPREAD, _LEAST_SPREAD, _MOST_SPREAD, _SPREAD_WEIGHT = 0.05, 0.02, 0.15, 0.05
# Variances of both logarithms at first, and what a change of the machine adds.
_UNSURE, _CHANGE = 0.01, 0.02
# How far the speeds of arithmetic and of memory may part: more is another cause, and for `refit`.
_MOST_APART = math.log(3)
# The machine has changed where all of the last few steps, or half of some more, are further off than this, the same
# way. Up to five interruptions in a row are none.
_FEW_STEPS, _SOME_STEPS, _FAR = 6, 15, math.log(1.1)


class _Follower:
    """Logarithms of how slow arithmetic and memory are now: a Kalman filter that single steps do not move.

    Both drift together by the variance `both` a step, each by itself by `own`.
    """

    __slots__ = ("_both", "_covariance", "_own", "_recent", "_spread", "_variances", "arithmetic", "error", "memory")

    def __init__(self, scale: float, memory_scale: float, both: float, own: float) -> None:
        self.arithmetic = math.log(scale)
        self.memory = self.arithmetic + math.log(memory_scale)
        self.error = 0.0
        self._both, self._own = both, own
        self._variances, self._covariance = (_UNSURE, _UNSURE), (0.8 if own else 1.0) * _UNSURE
        self._spread = _SPREAD
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_SOME_STEPS)

    def foresee(self, arithmetic_s: float, memory_s: float) -> tuple[float, float]:
        """What these two parts of a step take now."""
        return arithmetic_s * math.exp(self.arithmetic), memory_s * math.exp(self.memory)

    def follow(self, arithmetic_s: float, memory_s: float, seconds: float) -> None:
        """Learns from a step of these two parts, as calibrated, that took `seconds`."""
        slow, slow_memory = self.foresee(arithmetic_s, memory_s)
        off = math.log(seconds / (slow + slow_memory))
        self.error += _LATE_WEIGHT * (min(abs(off), _MOST_ERROR) - self.error)
        limit = (_LONG if off > 0 else _SHORT) * self._spread
        noise = self._spread * max(1.0, abs(off) / limit)
        part = slow / (slow + slow_memory)  # of the step's time, what is arithmetic
        rest = 1.0 - part
        drifted = self._both + self._own
        a, m, c = self._variances[0] + drifted, self._variances[1] + drifted, self._covariance + self._both
        a_off, m_off = a * part + c * rest, c * part + m * rest
        total = part * a_off + rest * m_off + noise * noise
        a_gain, m_gain = a_off / total, m_off / total
        self.arithmetic += a_gain * off
        self.memory += m_gain * off
        apart = self.memory - self.arithmetic
        self.memory -= apart - min(max(apart, -_MOST_APART), _MOST_APART)
        self._variances, self._covariance = (a - a_gain * a_off, m - m_gain * m_off), c - a_gain * m_off
        usual = 1.25 * min(abs(off), 3.0 * self._spread)
        spread = self._spread + _SPREAD_WEIGHT * (usual - self._spread)
        self._spread = min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)
        self._recent.append((arithmetic_s, memory_s, seconds))
        if abs(off) > _FAR:
            self._turn()

    def _turn(self) -> None:
        """Takes both speeds from the last steps if the machine has changed."""
        offs = [math.log(seconds / sum(self.foresee(*parts))) for *parts, seconds in self._recent]
        few, some = sorted(offs[-_FEW_STEPS:]), sorted(offs)
        if len(few) == _FEW_STEPS and (few[0] > _FAR or few[-1] < -_FAR):
            change = few[_FEW_STEPS // 2]
        elif len(some) == _SOME_STEPS and abs(some[_SOME_STEPS // 2]) > _FAR:
            change = some[_SOME_STEPS // 2]
        else:
            return
        self.arithmetic += change
        self.memory += change
        self._variances = (self._variances[0] + _CHANGE, self._variances[1] + _CHANGE)
        self._covariance += (0.8 if self._own else 1.0) * _CHANGE
        while len(self._recent) > _FEW_STEPS:  # what was before the change
            self._recent.popleft()


_ERROR = attrgetter("error")


class _Window:
    """The last `size` numbers, also in ascending order. Cost of a number more: O(size), 1 µs."""

    __slots__ = ("_ascending", "_last", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: deque[float] = deque()
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def __iter__(self) -> Iterator[float]:
        return iter(self._ascending)

    def append(self, value: float) -> None:
        self._last.append(value)
        insort(self._ascending, value)
        if len(self._last) > self._size:
            del self._ascending[bisect_left(self._ascending, self._last.popleft())]

    def quantile(self, share: float) -> float:
        """That so large a share of them does not exceed."""
        return self._ascending[int(share * (len(self._ascending) - 1) + 0.5)]
