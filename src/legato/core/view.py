"""Read-only views of scheduler state: what planning may see, and what an executor needs to build its rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from legato.core.request import Request


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
    def in_flight(self) -> int:
        """Steps in flight that contain it: its blocks come back only once they are committed."""


class SchedulerView(Protocol):
    """What `plan_step` reads. Units: tokens and blocks.

    The blocks always add up: `free_blocks + returning_blocks + sum(covered // block_tokens over running)` is the pool.
    """

    @property
    def next_step(self) -> int:
        """Number of the step to be planned."""

    @property
    def block_tokens(self) -> int:
        """Positions a KV block holds."""

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and no admitted prefill has reserved."""

    @property
    def returning_blocks(self) -> int:
        """Blocks given up by requests whose step is still in flight: free once it is committed. 0 between steps."""

    @property
    def running(self) -> Sequence[Progress]:
        """Admitted requests, in order of admission."""

    @property
    def waiting(self) -> Collection[Progress]:
        """Requests not admitted yet, in order of arrival, preempted ones in front. Only ever read from the front."""


class RowSource(Protocol):
    """What an executor reads to carry out a plan. Read it when `execute` begins: it holds until the next `apply`."""

    def request(self, request_id: int) -> Request:
        """The frozen request."""

    def tokens(self, request_id: int) -> Sequence[int]:
        """Known token ids: prompt, then everything generated so far (an `array('i')`; do not keep it)."""

    def blocks(self, request_id: int) -> Sequence[int]:
        """Ids of the KV blocks of the request, in order of position; covers at least the planned positions."""
