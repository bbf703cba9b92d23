"""`Alone`: what a request gives by itself: its prompt in one piece, nothing cached, nobody beside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.certify.rig import Rig
from legato.core.host import Move
from legato.core.plan import StepPlan
from legato.core.request import Request, Sampling, StopRule
from legato.exec.kv import KvDtype
from legato.exec.ops import FloatArray

Bits = NDArray[np.uint32]
DEFAULT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Alone:
    """Tokens, and the float32 logits that each was drawn from, as bits `[tokens, vocab]`."""

    token_ids: tuple[int, ...]
    logits: Bits


class AloneCache:
    """Answers of requests alone, the least recently used forgotten beyond `max_bytes` of logits."""

    def __init__(self, rig: Rig, max_bytes: int = DEFAULT_BYTES) -> None:
        self._rig = rig
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._known: OrderedDict[tuple[tuple[int, ...], Sampling, KvDtype], Alone] = OrderedDict()

    def get(self, prompt: tuple[int, ...], sampling: Sampling, max_tokens: int, kv_dtype: KvDtype) -> Alone:
        """At least `max_tokens` tokens of that request."""
        key = (prompt, sampling, kv_dtype)
        found = self._known.get(key)
        if found is not None and len(found.token_ids) >= max_tokens:
            self._known.move_to_end(key)
            return found
        if found is not None:
            self._nbytes -= self._known.pop(key).logits.nbytes
        alone = compute_alone(self._rig, Request(0, prompt, sampling, StopRule(max_tokens)), kv_dtype)
        self._known[key] = alone
        self._nbytes += alone.logits.nbytes
        while self._nbytes > self._max_bytes and len(self._known) > 1:
            self._nbytes -= self._known.popitem(last=False)[1].logits.nbytes
        return alone


def compute_alone(rig: Rig, request: Request, kv_dtype: KvDtype) -> Alone:
    """Runs `request` without a scheduler, on one thread: one step for its prompt, one for each further token."""
    shape = rig.shape
    length, max_tokens = len(request.prompt), request.stop.max_tokens
    assert length <= shape.max_rows, f"a prompt of {length} tokens does not fit in one step of {shape.max_rows}"
    blocks = -(-(length + max_tokens) // shape.block_tokens)
    executor = rig.executor(kv_dtype, blocks=blocks, host_blocks=0, threads=1)
    source = _OneRequest(request, blocks)
    logits: Bits = np.empty((max_tokens, shape.vocab), np.uint32)

    def keep(plan: StepPlan, row: FloatArray) -> None:
        logits[plan.step] = row.view(np.uint32)[0]

    executor.bind(source)
    executor.observe = keep
    start = 0
    for step in range(max_tokens):
        stop = length + step
        plan = StepPlan(step, (request.request_id,), (start,), (stop - start,), (True,))
        source.known.extend(executor.execute(plan).token_ids)
        start = stop
    return Alone(tuple(source.known[length:]), logits)


class _OneRequest:
    """The `RowSource` of a request that has all blocks for itself."""

    def __init__(self, request: Request, blocks: int) -> None:
        self.known = list(request.prompt)
        self._request = request
        self._blocks = range(blocks)

    def request(self, request_id: int) -> Request:
        return self._request

    def tokens(self, request_id: int) -> Sequence[int]:
        return self.known

    def blocks(self, request_id: int) -> Sequence[int]:
        return self._blocks

    def moves(self, step: int) -> Sequence[Move]:
        return ()
