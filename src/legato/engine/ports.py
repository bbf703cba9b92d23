"""What the engine needs from the outside: an executor, a clock, perhaps an archive of blocks, perhaps a recorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from legato.core.plan import StepPlan, StepResult
from legato.core.request import Request
from legato.core.trace import TracedStep
from legato.core.view import RowSource
from legato.engine.terms import Terms


class Executor(Protocol):
    """Carries out plans on a model. The CPU backend, the torch backend and the fakes of the tests are executors."""

    def bind(self, source: RowSource) -> None:
        """Says where tokens and block tables are read from. Called once, before the first step."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes every row of `plan`, writes its K and V into the blocks, samples where `plan.samples` says so.

        Before that come the copies between pool and host memory that the source names for this step. Reads the bound
        source only when it begins. An exception fails the requests of this step and no others; it must leave the
        executor able to carry out the next plan. A plan made ahead of a step that fails is given up, its preemptions
        with it: whoever keeps state by request takes a start of 0 for a new beginning.
        """


class AheadExecutor(Executor, Protocol):
    """An executor that can compute a step while the next one is planned."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Reads the source's blocks and moves; what it returns carries out the plan, in any thread.

        Meanwhile steps may be applied and requests aborted: requests and tokens can still be read, blocks cannot.
        """


class Clock(Protocol):
    """`time.perf_counter`, or the virtual clock of a simulation."""

    def __call__(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class Fetch(Protocol):
    """Blocks on their way from an archive to memory."""

    @property
    def done(self) -> bool:
        """Whether all is read that will be."""

    @property
    def blocks(self) -> Sequence[tuple[bytes, bytes]]:
        """(key, content) of what was found, from the first key on without a gap."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until `done`, or so long. Returns `done`."""


class Archive(Protocol):
    """Keeps blocks beyond the life of the engine. It has its own threads; nothing here waits for a disk."""

    def __contains__(self, key: object) -> bool:
        """Whether a fetch would probably find it."""

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        """Begins to read the content of `keys`, up to the first that is not there."""

    def load(self, slot: int, content: bytes) -> None:
        """Puts what was fetched into a slot of host memory."""

    def save(self, key: bytes, block: int) -> None:
        """Copies a block of the pool, to be written when there is time; or not: it is a cache."""

    def close(self) -> None:
        """Writes what is queued, within seconds."""


class Recorder(Protocol):
    """Hears, in the server's process, of all that the question "why was this token late?" needs. Seconds: its clock."""

    def begins(self, cost: dict[str, Any] | None) -> None:
        """Steps are foreseen by `cost` (of `StepCost.to_dict`) from now on, or not at all. Comes before all else."""

    def asked(self, request: Request, terms: Terms, tokenized_s: tuple[float, float] | None) -> None:
        """A request was sent to the engine. `tokenized_s`: when its text was turned into tokens."""

    def stepped(self, step: TracedStep, dispatched_s: float) -> None:
        """A step was carried out, and its tokens handed to their streams then."""

    def ended(self, request_id: int, reason: str, now_s: float) -> None:
        """Nothing more comes of a request."""
