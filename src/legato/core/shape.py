"""`StepShape`: all of a step that its duration depends on, as a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from legato.core.plan import StepPlan
from legato.core.request import Request


@dataclass(frozen=True, slots=True)
class Attention:
    """What the rows of a model look back at. Counts are sums over all layers.

    `layers`: (number of layers, window): a row at position p of such a layer sees `min(p + 1, window)` keys, all
    `p + 1` if that is None. `block_rows`: consecutive rows of a sequence that share one reading of its keys and values.
    """

    layers: tuple[tuple[int, int | None], ...] = ((1, None),)
    block_rows: int = 16

    def pairs(self, start: int, rows: int) -> int:
        """Pairs of a query and a key that rows `[start, start + rows)` of a sequence visit."""
        return sum(layers * _pairs(start, rows, window) for layers, window in self.layers)

    def kv_tokens(self, start: int, rows: int) -> int:
        """Positions whose keys and values those rows read: once a block of rows."""
        return sum(layers * _kv_tokens(start, rows, window, self.block_rows) for layers, window in self.layers)

    def decoded(self, starts: Sequence[int]) -> int:
        """Both of these counts, for one row at each of `starts`. Cost: O(starts) for each kind of layer."""
        count, plain = len(starts), sum(starts)
        return sum(
            layers * (count + (plain if window is None else sum(min(start, window - 1) for start in starts)))
            for layers, window in self.layers
        )


@dataclass(frozen=True, slots=True)
class StepShape:
    """Work in one step. `pairs` and `kv_tokens` as `Attention` counts them.

    `rows`: tokens through the layers. `sequences`: requests that have any. `logit_rows`: rows whose logits are needed,
    to sample or to score a prompt. Of these, `drawn_rows` are not greedy, `nucleus_rows` of those choose among
    candidates (top-p, top-k, min-p), and `logprob_rows` have log-probabilities computed. `copied_blocks`: of KV, to or
    from host memory, before the rows.
    """

    rows: int = 0
    sequences: int = 0
    pairs: int = 0
    kv_tokens: int = 0
    logit_rows: int = 0
    drawn_rows: int = 0
    nucleus_rows: int = 0
    logprob_rows: int = 0
    copied_blocks: int = 0

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        attention: Attention,
        request: Callable[[int], Request] | None = None,
        copied_blocks: int = 0,
    ) -> StepShape:
        """The shape of `plan`. `request` gives requests by id; without it, all rows count as greedy, without logprobs.

        `copied_blocks`: how many moves the step begins with; a plan does not say. Cost: O(sequences); 3 µs for 32
        decodes, 10 with their requests.
        """
        pairs = kv_tokens = attention.decoded(plan.starts[: plan.decodes])
        for i in range(plan.decodes, len(plan.starts)):
            pairs += attention.pairs(plan.starts[i], plan.counts[i])
            kv_tokens += attention.kv_tokens(plan.starts[i], plan.counts[i])
        scored = sum(stop - start for _, start, stop in plan.scores)
        drawn = nucleus = logprobs = 0
        if request is not None:
            for request_id, samples in zip(plan.request_ids, plan.samples, strict=True):
                if not samples:
                    continue
                sampling = request(request_id).sampling
                if sampling.temperature > 0.0:
                    drawn += 1
                    nucleus += sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
                logprobs += sampling.logprobs is not None
        return cls(
            rows=sum(plan.counts),
            sequences=len(plan.request_ids),
            pairs=pairs,
            kv_tokens=kv_tokens,
            logit_rows=sum(plan.samples) + scored,
            drawn_rows=drawn,
            nucleus_rows=nucleus,
            logprob_rows=logprobs + scored,
            copied_blocks=copied_blocks,
        )

    @classmethod
    def of_decodes(cls, starts: Sequence[int], attention: Attention) -> StepShape:
        """One row at each position of `starts`, a request each, all sampled. Cost: O(requests); 3 µs for 32."""
        n, seen = len(starts), attention.decoded(starts)
        return cls(n, n, seen, seen, n)

    def with_chunk(self, attention: Attention, start: int, rows: int, logit_rows: int = 0) -> StepShape:
        """This step with rows `[start, start + rows)` of one more request, `logit_rows` of which give logits."""
        return StepShape(
            self.rows + rows,
            self.sequences + 1,
            self.pairs + attention.pairs(start, rows),
            self.kv_tokens + attention.kv_tokens(start, rows),
            self.logit_rows + logit_rows,
            self.drawn_rows,
            self.nucleus_rows,
            self.logprob_rows,
            self.copied_blocks,
        )


def _pairs(start: int, rows: int, window: int | None) -> int:
    """Sum of `min(start + i + 1, window)` over `rows` rows i."""
    growing = rows if window is None else min(rows, max(0, window - start))
    return growing * start + growing * (growing + 1) // 2 + (rows - growing) * (window or 0)


def _kv_tokens(start: int, rows: int, window: int | None, block_rows: int) -> int:
    """Sum over blocks of rows of the positions from the first that its first row sees to its last row's own."""
    full, rest = divmod(rows, block_rows)
    seen = 0
    if full:
        # A full block that ends at position s sees min(s, window + block_rows - 1): a window slides along with it.
        most = None if window is None else window + block_rows - 1
        growing = full if most is None else min(full, max(0, (most - start) // block_rows))
        seen = growing * start + block_rows * growing * (growing + 1) // 2 + (full - growing) * (most or 0)
    if rest:
        stop = start + rows
        seen += stop if window is None else min(stop, window + rest - 1)
    return seen
