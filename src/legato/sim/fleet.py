"""`Fleet`: replicas behind a router, on one virtual clock. And `Setup`: what each of them is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, takewhile

from legato.core.budget import Prefer, StepBudget
from legato.core.cost import StepCost
from legato.core.pacer import Pacer
from legato.core.plan import StepPlan
from legato.core.policy import POLICIES
from legato.core.promise import price_of
from legato.core.request import Request, StopRule
from legato.core.shape import StepShape
from legato.core.state import SchedulerState
from legato.core.tenants import Tenants
from legato.core.tracker import CostTracker
from legato.sim.ledger import Ledger
from legato.sim.replica import Noise, Replica, Witness
from legato.sim.router import Router, round_robin
from legato.workload.arrivals import Arrival

_TEXTS = 1 << 30
_SUPPOSED_ROWS = 256


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine. `cost`: what its steps take. Others as `EngineConfig` has them, in seconds.

    `itl_s` None: steps are bounded by their tokens alone. `margin`: what is planned with takes so many times what steps
    take, as an engine has learned it. `ttft_s`: when a first token is wanted of every request. `noise`: times so much
    each step takes. `ahead`: whoever comes shortly before a step ends is too late for the next one.
    `learns`: predictions follow what steps took, as an engine's do; else it knows what they take, but for the noise.
    """

    cost: StepCost
    kv_blocks: int
    block_tokens: int = 32
    max_model_len: int = 1 << 24
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    policy: str = "slo"
    itl_s: float | None = None
    margin: float = 1.0
    prefill_share: float = 0.2
    prefer: Prefer = "itl"
    ttft_s: float | None = None
    chunk_tokens: int | None = None
    partial_prefills: int | None = None
    prefix_caching: bool = True
    noise: Noise | None = None
    ahead: bool = False
    learns: bool = False

    def replica(
        self,
        witness: Witness,
        *,
        leaps: bool = True,
        planned: Callable[[StepPlan], None] | None = None,
    ) -> Replica:
        """One of it, with nothing to do yet. `leaps`, `planned`: see `Replica`."""
        pacer = None
        if self.itl_s is not None:
            pacer = Pacer(
                CostTracker(self.cost, margin=self.margin),
                itl_s=self.itl_s,
                prefill_share=self.prefill_share,
                prefer=self.prefer,
            )
            if not self.learns:
                pacer.pace.suppose(
                    _SUPPOSED_ROWS,
                    self.cost.predict(StepShape().with_chunk(self.cost.attention, 0, _SUPPOSED_ROWS, 1)),
                    1 << 10,
                )
        return Replica(
            self.state(),
            self.budget,
            self.cost,
            witness,
            pacer=pacer,
            learns=self.learns,
            noise=self.noise,
            planned=planned,
            leaps=leaps,
            ahead=self.ahead,
        )

    @property
    def budget(self) -> StepBudget:
        """Of its steps, but for time. Raises ConfigError for one that serves nothing."""
        return StepBudget(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            chunk_tokens=self.chunk_tokens,
            partial_prefills=self.partial_prefills,
        )

    def state(self) -> SchedulerState:
        """Of a scheduler, as it begins."""
        return SchedulerState(
            self.kv_blocks,
            self.block_tokens,
            self.max_model_len,
            cache_root=b"" if self.prefix_caching else None,
            policy=POLICIES[self.policy],
            tenants=Tenants({}, None if self.itl_s is None else price_of(self.cost)),
        )


class Fleet:
    """Takes arrivals in order of time, and steps every replica up to each."""

    def __init__(self, setup: Setup, ledger: Ledger, replicas: int = 1, router: Router | None = None) -> None:
        self.ledger = ledger
        self.replicas: Sequence[Replica] = [setup.replica(ledger) for _ in range(replicas)]
        self._setup = setup
        self._router = router or round_robin()
        self._agenda: list[tuple[float, int]] = []  # (when it is ready, replica); what is out of date is skipped
        self._stops: dict[int, StopRule] = {}

    def run(self, arrivals: Iterable[Arrival]) -> Iterator[int]:
        """Yields the number of requests that have come, after each; then goes on until all have ended.

        Whoever stops listening has in `ledger` what was seen until then. Memory: unfinished requests.
        """
        for number, arrival in enumerate(arrivals, 1):
            self._advance(arrival.at_s)
            request = request_of(arrival, number, self._stops, self._setup.ttft_s)
            chosen = self._router(arrival, self.replicas)
            self.ledger.arrive(request)
            replica = self.replicas[chosen]
            ready_s = replica.ready_s
            replica.arrive(request, arrival.at_s)
            if replica.ready_s != ready_s:
                heappush(self._agenda, (replica.ready_s, chosen))
            yield number
        self._advance(math.inf)

    def _advance(self, until_s: float) -> None:
        """Takes all turns that come before that."""
        agenda, replicas = self._agenda, self.replicas
        while agenda and agenda[0][0] < until_s:
            ready_s, number = heappop(agenda)
            replica = replicas[number]
            if replica.ready_s == ready_s:
                replica.turn()
                if replica.ready_s < math.inf:
                    heappush(agenda, (replica.ready_s, number))


def request_of(
    arrival: Arrival, request_id: int, stops: dict[int, StopRule] | None = None, ttft_s: float | None = None
) -> Request:
    """The request, its prompt made of the texts that it shares and of a token of its own, over and over."""
    stops = {} if stops is None else stops
    stop = stops.setdefault(arrival.output_tokens, StopRule(arrival.output_tokens))
    prompt: tuple[int, ...] = ()
    for text, tokens in arrival.shared:
        prompt += (2 * (text % _TEXTS),) * tokens
    own = arrival.prompt_tokens - len(prompt)
    prompt = prompt + (2 * request_id + 1,) * own if own >= 0 else prompt[: arrival.prompt_tokens]
    due_s = math.inf if ttft_s is None else arrival.at_s + ttft_s
    return Request(request_id, prompt, stop=stop, arrival_s=arrival.at_s, due_s=due_s, tenant=arrival.tenant)


def bounded(arrivals: Iterable[Arrival], requests: int | None, duration_s: float | None) -> Iterator[Arrival]:
    """The first `requests`, or those that come within `duration_s`, whichever ends first."""
    within = iter(arrivals)
    if duration_s is not None:
        within = takewhile(lambda arrival: arrival.at_s < duration_s, within)
    return within if requests is None else islice(within, requests)
