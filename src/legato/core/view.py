"""Read-only views of scheduler state: what planning may see, and what an executor needs to build its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from legato.core.host import Move
from legato.core.prefix import Prefix
from legato.core.request import Request
from legato.core.tenants import Tenant


class Progress(Protocol):
    """How far one request has come: all that planning knows of it. There is no phase: `known - scheduled` says it all.

    Pending 1: a decode. More: a prefill, be it a new prompt or what a preemption has to compute again. 0: its next
    token, or its end, comes with a step in flight.
    """

    @property
    def request_id(self) -> int:
        """The caller's number for it."""

    @property
    def known(self) -> int:
        """Tokens that may be computed: prompt and generated, and the one that a step in flight will sample."""

    @property
    def scheduled(self) -> int:
        """Positions `[0, scheduled)` are computed, or will be by steps in flight."""

    @property
    def covered(self) -> int:
        """Positions `[0, covered)` have a KV block, held or reserved. A multiple of `block_tokens`; 0 while waiting."""

    @property
    def scored(self) -> int:
        """The next position whose logits score the token of the prompt after it, if below `score_stop`.

        A preemption does not set it back: nothing is scored twice.
        """

    @property
    def score_stop(self) -> int:
        """One past the last such position. 0 for a request that does not ask for it."""

    @property
    def in_flight(self) -> int:
        """Steps in flight that contain it: its blocks come back only once they are committed."""

    @property
    def arrival_s(self) -> float:
        """When it came, on the engine's clock."""

    @property
    def last_token_s(self) -> float:
        """When its newest generated token was committed, on the engine's clock; endless before the first."""

    @property
    def itl_s(self) -> float | None:
        """The longest gap wanted between its tokens; None: as everybody's."""

    @property
    def due_s(self) -> float:
        """When its first token is wanted; endless if whenever, or if that was found to be impossible."""

    @property
    def tenant(self) -> Tenant:
        """Whose request it is."""

    @property
    def priority(self) -> int:
        """As the request has it: the lower, the more important."""

    @property
    def rank(self) -> int:
        """How many requests came before it."""

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""

    @property
    def overtaken(self) -> int:
        """How many requests that came after it were admitted before it, since it did not fit."""


class SchedulerView(Protocol):
    """What `plan_step` reads. Units: tokens and blocks. Nothing here changes anything."""

    @property
    def next_step(self) -> int:
        """Number of the step to be planned."""

    @property
    def block_tokens(self) -> int:
        """Positions a KV block holds."""

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and no admitted prefill has reserved. Cached ones are among them."""

    @property
    def returning_blocks(self) -> int:
        """Blocks given up by requests whose step is still in flight: free once it is committed. 0 between steps."""

    def freed_blocks(self, request_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
        """For each of these running requests: blocks free if it and those before it are preempted, at once and in all.

        In all: once what is in flight is committed. Blocks that others hold too are not counted.
        """

    def prefix(self, request_id: int) -> Prefix:
        """What of a waiting request is cached, or being computed by somebody else."""

    @property
    def running(self) -> Sequence[Progress]:
        """Admitted requests, in order of admission."""

    @property
    def waiting(self) -> Collection[Progress]:
        """Requests not admitted, by priority, then as the policy wants to see them. Only ever read from the front."""


class RowSource(Protocol):
    """What an executor reads to carry out a plan. Read it when `execute` begins: it holds until the next `apply`."""

    def request(self, request_id: int) -> Request:
        """The frozen request."""

    def tokens(self, request_id: int) -> Sequence[int]:
        """Known token ids: prompt, then everything generated so far (an `array('i')`; do not keep it)."""

    def blocks(self, request_id: int) -> Sequence[int]:
        """Ids of the KV blocks of the request, in order of position; covers at least the planned positions."""

    def moves(self, step: int) -> Sequence[Move]:
        """Copies between the pool and host memory that come before the rows of that step, in order."""
