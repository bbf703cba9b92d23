"""What the engine needs from the outside: something that computes steps, and a clock."""

from __future__ import annotations

from typing import Protocol

from legato.core.plan import StepPlan, StepResult
from legato.core.view import RowSource


class Executor(Protocol):
    """Carries out plans on a model. The CPU backend, the torch backend and the fakes of the tests are executors."""

    def bind(self, source: RowSource) -> None:
        """Says where tokens and block tables are read from. Called once, before the first step."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes every row of `plan`, writes its K and V into the blocks, samples where `plan.samples` says so.

        Reads the bound source only when it begins. An exception fails the requests of this step and no others; it must
        leave the executor able to carry out the next plan. A plan made ahead of a step that fails is given up, its
        preemptions with it: whoever keeps state by request takes a start of 0 for a new beginning.
        """


class Clock(Protocol):
    """`time.perf_counter`, or the virtual clock of a simulation."""

    def __call__(self) -> float:
        """Seconds since some fixed moment; never goes back."""
