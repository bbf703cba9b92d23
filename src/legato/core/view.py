"""Read-only views of scheduler state: what planning may see, and what an executor needs to build its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from legato.core.request import Request


class RowSource(Protocol):
    """What an executor reads to carry out a plan, between `apply` and `commit`."""

    def request(self, request_id: int) -> Request:
        """The frozen request."""

    def tokens(self, request_id: int) -> Sequence[int]:
        """Known token ids: prompt, then everything generated so far (an `array('i')`; do not keep it)."""

    def blocks(self, request_id: int) -> Sequence[int]:
        """Ids of the KV blocks of the request, in order of position; covers at least the planned positions."""
