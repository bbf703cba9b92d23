"""A model that computes nothing: its executor lets a clock go on by what a known `StepCost` predicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

from legato.core.cost import StepCost
from legato.core.plan import StepPlan, StepResult
from legato.core.shape import StepShape
from legato.core.view import RowSource
from legato.exec.model import LoadedModel
from legato.exec.spec import ModelSpec


class VirtualMachine:
    """Executor and clock. Checks that what a plan needs is there: tokens, and blocks that no other request has."""

    def __init__(self, cost: StepCost, block_tokens: int = 32, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.now_s = 0.0
        self.steps = 0
        self._cost = cost
        self._block_tokens = block_tokens
        self._noise = noise
        self._source: RowSource | None = None

    def bind(self, source: RowSource) -> None:
        self._source = source

    def now(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        source = self._source
        assert source is not None
        taken: set[int] = set()
        for request_id, start, count in zip(plan.request_ids, plan.starts, plan.counts, strict=True):
            assert len(source.tokens(request_id)) >= start + count
            blocks = set(source.blocks(request_id))
            assert len(blocks) * self._block_tokens >= start + count
            assert not blocks & taken, "two requests of a step have a block in common"
            taken |= blocks
        assert not source.moves(plan.step)
        self.steps += 1
        self.now_s += self._cost.predict(StepShape.of(plan, self._cost.attention, source.request)) * self._noise()
        return StepResult(plan.step, plan.request_ids, (0,) * len(plan.request_ids))


def loaded_on(
    machine: VirtualMachine, spec: ModelSpec, *, kv_blocks: int = 1500, max_model_len: int = 8192
) -> LoadedModel:
    """A `LoadedModel` as far as calibration looks at it."""
    return LoadedModel(
        spec=spec,
        executor=cast("Any", machine),
        backend=cast("Any", None),
        footprint=cast("Any", None),
        kv_blocks=kv_blocks,
        block_tokens=32,
        max_model_len=max_model_len,
        threads=2,
    )


def noisy(seed: int, spread: float = 0.02, interrupted: float = 0.05) -> Callable[[], float]:
    """Factors by which steps on a shared machine are longer or shorter: some of them much longer."""
    draw = random.Random(seed)

    def factor() -> float:
        return draw.lognormvariate(0.0, spread) * (draw.uniform(1.3, 4.0) if draw.random() < interrupted else 1.0)

    return factor
