"""A `RowSource` and plans made by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from legato.core.host import Move
from legato.core.plan import StepPlan
from legato.core.request import Request


class FakeSource:
    """Requests with tokens and blocks written down by the test."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.known: dict[int, array[int]] = {}
        self.tables: dict[int, array[int]] = {}

    def add(self, request: Request, blocks: Sequence[int], generated: Sequence[int] = ()) -> None:
        self.requests[request.request_id] = request
        self.known[request.request_id] = array("i", (*request.prompt, *generated))
        self.tables[request.request_id] = array("i", blocks)

    def request(self, request_id: int) -> Request:
        return self.requests[request_id]

    def tokens(self, request_id: int) -> array[int]:
        return self.known[request_id]

    def blocks(self, request_id: int) -> array[int]:
        return self.tables[request_id]

    def moves(self, step: int) -> Sequence[Move]:
        return ()


def plan(*entries: tuple[int, int, int, bool], step: int = 0) -> StepPlan:
    """A plan of (request id, start, count, samples) entries."""
    ids, starts, counts, samples = zip(*entries, strict=True) if entries else ((), (), (), ())
    return StepPlan(step, ids, starts, counts, samples)
