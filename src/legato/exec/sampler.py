"""From logits to tokens, each row for itself: neither a token nor a bit of its logprobs depends on its neighbours.

Order of operations on a row, each only where asked for:
1. repetition penalty (prompt and output), then frequency and presence penalties (output only), then `logit_bias`, then
   stop ids are ruled out while fewer than `min_tokens` were generated;
2. temperature 0: the largest logit, the lowest id among equals;
3. else logits are divided by the temperature; min-p, then top-k choose candidates; top-p chooses among the candidates,
   with their probabilities made to sum to 1; ties at an edge go to the lowest ids;
4. one uniform number, a function of (seed, position) alone, is looked up in the cumulative distribution, in id order.

Logprobs are of the model's own distribution: the log-softmax of the logits as they came, before all of the above, as
the OpenAI API and vLLM give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.plan import TokenLogprobs
from legato.core.request import Request, Sampling
from legato.exec.ops import FloatArray
from legato.exec.penalties import TokenCountsCache, has_penalties

Ids = NDArray[np.int64]

_RUN = 256  # weights summed up at once when looking for a token


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry a row. `failed`: rows whose logits had no finite maximum (NaN or infinity); their token is 0."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    failed: tuple[int, ...] = ()


class Sampler:
    """Draws the next token of each row. State: counts for penalties of up to `capacity` requests, a cache."""

    def __init__(self, capacity: int = 1024) -> None:
        self._counts = TokenCountsCache(capacity)

    def sample(
        self,
        logits: FloatArray,
        requests: Sequence[Request],
        positions: Sequence[int],
        histories: Sequence[Sequence[int]],
    ) -> Sampled:
        """Tokens for the rows of `logits [rows, vocab]`, which are not changed.

        `positions[i]`: the absolute position the new token will have. `histories[i]`: the known tokens of request i, of
        which those before its position count.
        """
        if all(_is_plain_greedy(request, at) for request, at in zip(requests, positions, strict=True)):
            tokens = logits.argmax(axis=1)  # a NaN counts as the largest, so the check below sees it
            best = logits[np.arange(len(tokens)), tokens]
            drawn = [int(t) if ok else None for t, ok in zip(tokens, np.isfinite(best), strict=True)]
        else:
            drawn = [
                self._draw(logits[row], request, position, history)
                for row, (request, position, history) in enumerate(zip(requests, positions, histories, strict=True))
            ]
        return Sampled(
            token_ids=tuple(0 if token is None else token for token in drawn),
            logprobs=tuple(
                None
                if token is None or request.sampling.logprobs is None
                else row_logprobs(logits[row], token, request.sampling.logprobs)
                for row, (request, token) in enumerate(zip(requests, drawn, strict=True))
            ),
            failed=tuple(row for row, token in enumerate(drawn) if token is None),
        )

    def _draw(self, logits: FloatArray, request: Request, position: int, history: Sequence[int]) -> int | None:
        sampling = request.sampling
        banned = request.stop.token_ids if _is_too_short(request, position) else ()
        if has_penalties(sampling) or sampling.logit_bias or banned:
            logits = logits.copy()
            if has_penalties(sampling):
                self._counts.counts(request, history, position).apply(logits, sampling)
            for token, bias in sampling.logit_bias:
                logits[token] += np.float32(bias)
            for token in banned:
                logits[token] = -np.inf
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            return None
        if sampling.temperature == 0.0:
            return best
        return draw(logits, sampling, uniform(sampling.seed, position))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` (mod 2**64) and `position` alone: Philox4x64-10 keyed with the two.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): any two keys give independent streams.
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, position], np.uint64)
    return float(int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


def draw(logits: FloatArray, sampling: Sampling, at: float) -> int:
    """The token at `at` in [0, 1) of the cumulative distribution that temperature, min-p, top-k and top-p leave.

    `logits [vocab]`: the largest is finite. Cost: O(vocab), and a sort of the few tokens that may be in the nucleus.
    """
    ids, weights = candidates(logits, sampling)
    # Sums of runs first, then within the run of the answer: a fifth of the time of summing up the whole vocabulary.
    runs = np.add.reduceat(weights, np.arange(0, len(weights), _RUN), dtype=np.float64)
    run, into = _find(runs, at * runs.sum())
    within, _ = _find(weights[run * _RUN : (run + 1) * _RUN], into)
    chosen = run * _RUN + within
    return chosen if ids is None else int(ids[chosen])


def _find(weights: NDArray[Any], target: float) -> tuple[int, float]:
    """The first index whose cumulative sum exceeds `target`, and how far into its weight `target` lies."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index == len(weights):  # rounding put the target at or past the end: the last weight that is not zero
        index = int(np.flatnonzero(weights)[-1])
    return index, target - (float(cumulative[index - 1]) if index else 0.0)


def candidates(logits: FloatArray, sampling: Sampling) -> tuple[Ids | None, FloatArray]:
    """Ids that may be drawn, ascending (None: all), and their weights: probabilities up to a common factor."""
    largest = logits.max()
    ids: Ids | None = None
    kept = logits
    if sampling.min_p > 0.0:
        ids = np.flatnonzero(kept >= largest + np.float32(sampling.temperature * np.log(min(sampling.min_p, 1.0))))
        kept = kept[ids]
    if 0 < sampling.top_k < len(kept):
        ids, kept = _keep(ids, kept, _largest(kept, sampling.top_k))
    # A temperature too small for float32 is greedy: dividing by the smallest normal number keeps 0 / t at 0.
    weights = np.exp((kept - largest) / max(np.float32(sampling.temperature), np.finfo(np.float32).tiny))
    if sampling.top_p < 1.0:
        ids, weights = _keep(ids, weights, _nucleus(weights, kept, sampling.top_p))
    return ids, weights


def row_logprobs(logits: FloatArray, token: int, top: int) -> TokenLogprobs:
    """Log-softmax of `logits [vocab]` at `token`, its rank, and the `top` largest with their ids, best first.

    Of equals the lowest id comes first, in `top` as in the rank.
    """
    largest = logits.max()
    log_total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    best = _largest(logits, min(top, len(logits))) if top else np.empty(0, np.int64)
    best = best[np.argsort(-logits[best], kind="stable")]
    chosen = logits[token]
    return TokenLogprobs(
        chosen=float(chosen) - log_total,
        top=tuple((int(i), float(logits[i]) - log_total) for i in best),
        rank=1 + int(np.count_nonzero(logits > chosen) + np.count_nonzero(logits[:token] == chosen)),
    )


def _is_too_short(request: Request, position: int) -> bool:
    return position - len(request.prompt) < request.stop.min_tokens


def _is_plain_greedy(request: Request, position: int) -> bool:
    sampling = request.sampling
    return (
        sampling.temperature == 0.0
        and not sampling.logit_bias
        and not has_penalties(sampling)
        and not (request.stop.token_ids and _is_too_short(request, position))
    )


def _keep(ids: Ids | None, values: FloatArray, where: Ids) -> tuple[Ids, FloatArray]:
    return where if ids is None else ids[where], values[where]


def _largest(values: NDArray[Any], count: int) -> Ids:
    """Indices, ascending, of the `count` largest values; the lowest indices among values equal to the last one."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    return _at_least(values, edge, count)


def _at_least(values: NDArray[Any], edge: Any, count: int, ranks: NDArray[Any] | None = None) -> Ids:
    """Indices, ascending, of `count` values from `edge` up; of equals the highest in `ranks`, then the first."""
    kept = values > edge
    equal = np.flatnonzero(values == edge)
    if ranks is not None:
        equal = equal[np.argsort(-ranks[equal], kind="stable")]
    kept[equal[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _nucleus(weights: FloatArray, logits: FloatArray, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights whose sum reaches `top_p` of the total.

    Logits that differ may have equal weights in float32: the larger logit comes first, so that the largest is always
    kept; then the lower index.
    """
    total = weights.sum(dtype=np.float64)
    # Weights under this bound sum to less than half of what may be left out, so no rounding can put one in the nucleus:
    # of a vocabulary of 49,152, a few hundred remain to be sorted.
    bound = 0.5 * (1.0 - top_p) * total / len(weights)
    descending = np.sort(weights[weights >= bound])[::-1]
    reached = np.cumsum(descending, dtype=np.float64)
    count = min(int(np.searchsorted(reached, top_p * total, side="left")) + 1, len(descending))
    return _at_least(weights, descending[count - 1], count, logits)
