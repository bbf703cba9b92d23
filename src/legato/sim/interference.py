"""Streams that decode, and long prompts that arrive: what `legato bench interference` sends, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from legato.core.request import Finished, Request
from legato.core.shape import StepShape
from legato.sim.fleet import Setup, request_of
from legato.sim.replica import Replica
from legato.sim.sketch import Sketch
from legato.workload.arrivals import Arrival, periodic

_SHORT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` clients read, each asking anew at once when its answer of `stream_tokens` ends. A prompt of so many
    tokens, in turn, comes every `every_s`. Figures are of `duration_s`, after `warmup_s`.
    """

    streams: int = 8
    prompt_tokens: tuple[int, ...] = (4000,)
    every_s: float = 10.0
    duration_s: float = 30.0
    warmup_s: float = 3.0
    stream_tokens: int = 512


class Interference:
    """A run, and what was seen: `itl` of the streams while a long prompt was in flight, `ttft` of the long prompts."""

    def __init__(self, setup: Setup, load: Load) -> None:
        self.itl, self.ttft = Sketch(), Sketch()
        self.output_tokens = self.prompt_tokens = 0
        self._load = load
        self._replica = setup.replica(self)
        self._last_s: dict[int, float] = {}
        self._long: dict[int, Request] = {}
        self._agenda: list[tuple[float, int, bool]] = []  # when, tokens, whether it is a stream
        self._ids = 0
        self._stop_s = load.warmup_s + load.duration_s
        for number in range(load.streams):
            # The first answers differ in length, so that not all ask anew at one moment.
            tokens = max(1, load.stream_tokens * (number + 1) // load.streams)
            heappush(self._agenda, (0.0, tokens, True))
        for number, at_s in enumerate(periodic(load.every_s, load.duration_s)):
            tokens = load.prompt_tokens[number % len(load.prompt_tokens)]
            heappush(self._agenda, (load.warmup_s + at_s, tokens, False))

    def run(self) -> Interference:
        """Until the last long prompt is answered, at most twice the duration."""
        replica, cut_s = self._replica, self._load.warmup_s + 2 * self._load.duration_s
        while True:
            next_s = self._agenda[0][0] if self._agenda else math.inf
            now_s = min(next_s, replica.ready_s)
            if now_s > cut_s or (now_s > self._stop_s and not self._long):
                return self
            if replica.ready_s < next_s:
                replica.turn()
            else:
                self._send(*heappop(self._agenda))

    def _send(self, at_s: float, tokens: int, is_stream: bool) -> None:
        self._ids += 1
        arrival = Arrival(at_s, _SHORT_TOKENS, tokens) if is_stream else Arrival(at_s, tokens, 1)
        request = request_of(arrival, self._ids)
        if not is_stream:
            self._long[self._ids] = request
        self._replica.arrive(request, at_s)

    def steps(self, replica: Replica, begin_s: float, ends_s: Sequence[float], shape: StepShape) -> None:
        """See `Witness`."""

    def tokens(self, request_ids: Sequence[int], steps_s: Sequence[float]) -> None:
        """See `Witness`."""
        for request_id in request_ids:
            request = self._long.get(request_id)
            if request is not None:
                self.ttft.add(steps_s[-1] - request.arrival_s)
                if steps_s[-1] <= self._stop_s:
                    self.prompt_tokens += len(request.prompt)
                continue
            for at_s in steps_s:
                if self._load.warmup_s <= at_s < self._stop_s:
                    self.output_tokens += 1
                    if self._long and request_id in self._last_s:
                        self.itl.add(at_s - self._last_s[request_id])
                self._last_s[request_id] = at_s

    def finished(self, ended: Finished, at_s: float) -> None:
        """See `Witness`."""
        if self._long.pop(ended.request_id, None) is None:
            self._last_s.pop(ended.request_id, None)
            heappush(self._agenda, (at_s, self._load.stream_tokens, True))

    def refused(self, request: Request, reason: str) -> None:
        """See `Witness`."""
        self._long.pop(request.request_id, None)
