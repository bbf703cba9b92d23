"""Counts of the tokens a request has seen, for the penalties: kept from step to step, O(new tokens) a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.request import Request, Sampling
from legato.exec.ops import FloatArray

_GROWTH = 256


def has_penalties(sampling: Sampling) -> bool:
    """Whether any penalty changes the logits."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class TokenCounts:
    """Distinct tokens of one request (prompt and output), and how often each was generated."""

    def __init__(self, prompt: Sequence[int]) -> None:
        ids = np.unique(np.fromiter(prompt, np.int64, len(prompt)))
        self._index = {int(token): at for at, token in enumerate(ids)}
        self._ids: NDArray[np.int64] = np.concatenate([ids, np.zeros(_GROWTH, np.int64)])
        self._generated: FloatArray = np.zeros(len(self._ids), np.float32)
        self._counted = len(prompt)

    def advance(self, tokens: Sequence[int], stop: int) -> None:
        """Counts known tokens up to position `stop`. Tokens once generated stay, so a recomputation changes nothing."""
        for token in tokens[self._counted : stop]:
            at = self._index.setdefault(token, len(self._index))
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(at, np.int64)])
                self._generated = np.concatenate([self._generated, np.zeros(at, np.float32)])
            self._ids[at] = token
            self._generated[at] += 1
        self._counted = max(self._counted, stop)

    def apply(self, logits: NDArray[Any], sampling: Sampling) -> None:
        """Changes `logits [vocab]` in place: repetition for prompt and output, the other two for output only."""
        seen = len(self._index)
        ids, generated = self._ids[:seen], self._generated[:seen]
        values = logits[ids]
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values = values - np.float32(sampling.frequency_penalty) * generated
        logits[ids] = values - np.float32(sampling.presence_penalty) * (generated > 0)


class TokenCountsCache:
    """Counts of the most recently sampled requests. A miss costs O(history) once, and gives the same counts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[int, tuple[Request, TokenCounts]] = OrderedDict()

    def counts(self, request: Request, tokens: Sequence[int], stop: int) -> TokenCounts:
        """Counts of `tokens[:stop]`, which begin with the prompt of `request`."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry[0] is not request:
            entry = self._entries[request.request_id] = (request, TokenCounts(request.prompt))
        self._entries.move_to_end(request.request_id)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        entry[1].advance(tokens, stop)
        return entry[1]
