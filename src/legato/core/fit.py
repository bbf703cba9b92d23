"""`fit`: the cost of steps from samples, by robust non-negative least squares in relative error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from legato.core.cost import Curve, Sample, StepCost
from legato.core.shape import Attention, StepShape

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LOGIT_KNOTS = (1, 8, 32)
# Blocks of rows that kernels are known to work in: 6, 12 and 16 on CPUs, 64 and 128 on GPUs.
TILES = (1, 6, 12, 16, 64, 128)
# A curve has a knot where so many samples are beyond it, or this share of them if that is less: fewer do not tell the
# slope there from noise, and what is larger than any sample goes on with it.
_BEYOND, _BEYOND_SHARE = 6, 1 / 8

_ROUNDS = 4
# Residuals, in units of their spread, from which on a sample counts less. Whoever shares the machine makes a step
# longer, never shorter: a long one is doubted sooner.
_LONG, _SHORT = 2.0, 4.0
_LEAST_SPREAD = 0.005
# Two slopes of the rows' curve that differ by as much as they are count as a sample that is off by this: where samples
# do not tell, the curve goes on as it was.
_STIFFNESS = 0.01


def fit(samples: Sequence[Sample], attention: Attention, tiles: Sequence[int] = TILES) -> StepCost:
    """The `StepCost` that explains `samples` best, outliers aside. Deterministic.

    Minimises squared relative errors, each sample with a weight that falls as its residual exceeds the spread of all.
    The size of a block of rows is the one of `tiles` that leaves least. Terms that no sample has are 0; rows beyond the
    largest sample cost what the last ones do. Cost: 0.1 s for 150 samples. Raises ValueError for no samples.
    """
    if not samples:
        raise ValueError("no samples to fit a cost of steps to")
    candidates = [_fit(samples, attention, tile) for tile in tiles]
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _fit(samples: Sequence[Sample], attention: Attention, tile: int) -> tuple[float, StepCost]:
    """What is left unexplained, and the cost, for blocks of `tile` rows."""
    row_knots = _knots(ROW_KNOTS, (s.shape.rows for s in samples))
    logit_knots = _knots(LOGIT_KNOTS, (s.shape.logit_rows for s in samples))
    table = [[t / s.seconds for t in _terms(s.shape, row_knots, logit_knots, tile)] for s in samples]
    prior = _smooth(samples, row_knots, len(table[0]))
    weights = [1.0] * len(samples)
    coefficients: list[float] = []
    for _ in range(_ROUNDS):
        coefficients = _solve(table, weights, prior)
        # Relative to the prediction: 1 / (sum of terms / seconds) - 1.
        residuals = [1.0 / max(sum(map(float.__mul__, coefficients, row)), 1e-9) - 1.0 for row in table]
        spread = max(1.4826 * median(abs(r) for r in residuals), _LEAST_SPREAD)
        weights = [_weight(r / spread) for r in residuals]
    left = sum(min(abs(r), 3 * spread) for r in residuals) / len(residuals)
    return left, _cost(coefficients, attention, row_knots, logit_knots, tile)


def _weight(residual: float) -> float:
    """Of a squared residual, in units of the spread: 1 near 0, falling with its square where it is large."""
    limit = _LONG if residual > 0 else _SHORT
    return 1.0 if abs(residual) <= limit else (limit / residual) ** 2


def _knots(knots: tuple[int, ...], counts: Iterable[int]) -> tuple[int, ...]:
    ascending = sorted(counts)
    beyond = min(_BEYOND, max(1, int(_BEYOND_SHARE * len(ascending))))
    return tuple(knot for knot in knots if knot < ascending[-beyond]) or knots[:1]


def _smooth(samples: Sequence[Sample], row_knots: tuple[int, ...], terms: int) -> list[list[float]]:
    """Rows of the least-squares table, with target 0, that hold each two slopes of the rows' curve together."""
    table = []
    for i, knot in enumerate(row_knots[1:], 1):
        shortest_s = min(s.seconds for s in samples if s.shape.rows > knot)
        row = [0.0] * terms
        row[i] = _STIFFNESS * knot / shortest_s
        row[i + 1] = -row[i]
        table.append(row)
    return table


def _terms(shape: StepShape, row_knots: tuple[int, ...], logit_knots: tuple[int, ...], tile: int) -> list[float]:
    return [
        *_segments(shape.rows, row_knots),
        *_segments(shape.logit_rows, logit_knots),
        float(-(-shape.rows // tile)) if tile > 1 else 0.0,
        float(shape.pairs),
        float(shape.kv_tokens),
        float(shape.sequences),
        float(shape.drawn_rows),
        float(shape.nucleus_rows),
        float(shape.logprob_rows),
        float(shape.copied_blocks),
    ]


def _segments(x: int, knots: tuple[int, ...]) -> list[float]:
    """1 if there is anything, then how much of x lies between each two knots, and beyond the last."""
    if x < knots[0]:
        return [0.0] * (len(knots) + 1)
    inner = [float(max(0, min(x, high) - low)) for low, high in pairwise(knots)]
    return [1.0, *inner, float(max(0, x - knots[-1]))]


def _cost(
    coefficients: list[float], attention: Attention, row_knots: tuple[int, ...], logit_knots: tuple[int, ...], tile: int
) -> StepCost:
    rows, rest = coefficients[: len(row_knots) + 1], coefficients[len(row_knots) + 1 :]
    logits, rest = rest[: len(logit_knots) + 1], rest[len(logit_knots) + 1 :]
    tile_s, pair_s, kv_token_s, sequence_s, drawn_row_s, nucleus_row_s, logprob_row_s, copy_s = rest
    return StepCost(
        attention=attention,
        rows=_curve(row_knots, rows),
        tile=tile,
        tile_s=tile_s,
        pair_s=pair_s,
        kv_token_s=kv_token_s,
        sequence_s=sequence_s,
        logits=_curve(logit_knots, logits),
        drawn_row_s=drawn_row_s,
        nucleus_row_s=nucleus_row_s,
        logprob_row_s=logprob_row_s,
        copy_s=copy_s,
    )


def _curve(knots: tuple[int, ...], coefficients: list[float]) -> Curve:
    values = [coefficients[0]]
    for (low, high), slope in zip(pairwise(knots), coefficients[1:], strict=False):
        values.append(values[-1] + slope * (high - low))
    return Curve(knots, tuple(values), coefficients[-1])


def _solve(table: list[list[float]], weights: list[float], prior: list[list[float]]) -> list[float]:
    """x >= 0 that brings `table` x nearest to 1 and `prior` x to 0, in weighted squares."""
    columns = list(zip(*table, *prior, strict=True))
    weights = weights + [1.0] * len(prior)
    weighted = [[w * v for w, v in zip(weights, column, strict=True)] for column in columns]
    reached = len(table)
    n = len(columns)
    gram = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            gram[i][j] = gram[j][i] = sum(map(float.__mul__, weighted[i], columns[j]))
    scales = [math.sqrt(gram[i][i]) for i in range(n)]
    live = [i for i in range(n) if scales[i] > 0.0]
    small = [[gram[i][j] / (scales[i] * scales[j]) for j in live] for i in live]
    target = [sum(weighted[i][:reached]) / scales[i] for i in live]
    x = [0.0] * n
    for i, value in zip(live, _nnls(small, target), strict=True):
        x[i] = value / scales[i]
    return x


def _nnls(gram: list[list[float]], target: list[float]) -> list[float]:
    """x >= 0 with the least x' gram x / 2 - target' x, ones on gram's diagonal: Lawson and Hanson (1974), ch. 23."""
    n = len(target)
    x = [0.0] * n
    free: list[int] = []
    tolerance = 1e-9 * max(map(abs, target), default=0.0)
    for _ in range(3 * n):
        slopes = [t - sum(map(float.__mul__, row, x)) for t, row in zip(target, gram, strict=True)]
        entering = max((i for i in range(n) if i not in free), key=slopes.__getitem__, default=None)
        if entering is None or slopes[entering] <= tolerance:
            break
        free.append(entering)
        while True:
            solution = _cholesky_solve([[gram[i][j] for j in free] for i in free], [target[i] for i in free])
            if min(solution) > 0.0:
                break
            # As far towards the solution as nothing turns negative; what reaches 0 is bound again.
            step, bound = min((x[i] / (x[i] - v), i) for i, v in zip(free, solution, strict=True) if v <= 0.0)
            for i, v in zip(free, solution, strict=True):
                x[i] += step * (v - x[i])
            x[bound] = 0.0
            free.remove(bound)
            if not free:
                return x
        for i, v in zip(free, solution, strict=True):
            x[i] = v
    return x


def _cholesky_solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Solution of a positive definite system; a trace of the identity is added, so that collinear terms do no harm."""
    n = len(target)
    lower: list[list[float]] = []
    y: list[float] = []
    for i in range(n):
        row: list[float] = []
        for j in range(i):
            row.append((matrix[i][j] - sum(map(float.__mul__, row, lower[j][:j]))) / lower[j][j])
        row.append(math.sqrt(max(matrix[i][i] + 1e-10 - sum(v * v for v in row), 1e-12)))
        lower.append(row)
        y.append((target[i] - sum(map(float.__mul__, row, y))) / row[i])
    for i in reversed(range(n)):
        y[i] /= lower[i][i]
        for j in range(i):
            y[j] -= lower[i][j] * y[i]
    return y
