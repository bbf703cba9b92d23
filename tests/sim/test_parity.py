"""One scheduler, two clocks: an engine with a fake executor on a virtual clock, and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from legato.core.cost import Curve, StepCost
from legato.core.pacer import Pacer
from legato.core.plan import StepPlan, StepResult
from legato.core.request import Finished, Request
from legato.core.shape import Attention, StepShape
from legato.core.tracker import CostTracker
from legato.core.view import RowSource
from legato.engine.loop import Engine
from legato.errors import RequestError
from legato.sim.fleet import Setup, request_of
from legato.sim.noise import Recorded
from legato.sim.replica import Replica
from legato.workload.arrivals import Arrival, PrefixTree, Process, Traffic
from legato.workload.lengths import Lengths

TRACES = 1000


class Machine:
    """An executor whose steps take what `cost` says, and whose clock that is. A token is its request's id."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.now_s = 0.0
        self.plans: list[StepPlan] = []

    def __call__(self) -> float:
        return self.now_s

    def bind(self, source: RowSource) -> None:
        self.source = source

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        copies = len(self.source.moves(plan.step))
        self.now_s += self.cost.predict(StepShape.of(plan, self.cost.attention, copied_blocks=copies))
        ids = tuple(i for i, samples in zip(plan.request_ids, plan.samples, strict=True) if samples)
        return StepResult(plan.step, ids, ids)


class Seen:
    """When each request got its tokens, and how it ended."""

    def __init__(self) -> None:
        self.tokens_s: dict[int, list[float]] = {}
        self.ended: dict[int, tuple[Finished, float]] = {}
        self.refusals: list[int] = []
        self.steps_s: list[float] = []
        self.at_once = 0

    def steps(self, replica: Replica, begin_s: float, ends_s: Sequence[float], shape: StepShape) -> None:
        self.steps_s.extend(ends_s)
        self.at_once += len(ends_s) - 1

    def tokens(self, request_ids: Sequence[int], steps_s: Sequence[float]) -> None:
        for request_id in request_ids:
            self.tokens_s.setdefault(request_id, []).extend(steps_s)

    def finished(self, ended: Finished, at_s: float) -> None:
        self.ended[ended.request_id] = ended, at_s

    def refused(self, request: Request, reason: str) -> None:
        self.refusals.append(request.request_id)


@dataclass(frozen=True)
class Case:
    setup: Setup
    requests: tuple[Request, ...]


def case_of(seed: int) -> Case:
    """A small engine and some requests, in which everything happens now and then: pools too small, prompts too long,
    bursts, prefixes, tenants, due times, windows, gaps that cannot be kept.
    """
    random = Random(seed)
    windows = random.choice((((4, None),), ((2, None), (3, 24))))
    cost = StepCost(
        Attention(windows, random.choice((1, 16))),
        Curve((1, 16), (0.004, 0.005), random.choice((0.0, 0.0003))),
        pair_s=random.choice((0.0, 2e-7)),
        kv_token_s=random.choice((0.0, 1e-7)),
        sequence_s=random.choice((0.0, 1e-5)),
        tile=random.choice((1, 8)),
        tile_s=1e-5,
    )
    seqs = random.choice((2, 4, 8))
    setup = Setup(
        cost,
        kv_blocks=random.choice((12, 30, 200)),
        block_tokens=random.choice((4, 16)),
        max_model_len=random.choice((90, 1000)),
        max_num_batched_tokens=random.choice((seqs, 16, 64)) if seqs <= 16 else 64,
        max_num_seqs=seqs,
        policy=random.choice(("fcfs", "slo", "fair")),
        itl_s=random.choice((None, 0.006, 0.012)),
        ttft_s=None,
        margin=random.choice((1.0, 1.2)),
        prefer=random.choice(("itl", "ttft")),
        chunk_tokens=random.choice((None, None, 12)),
        partial_prefills=random.choice((None, None, 1)),
        prefix_caching=random.random() < 0.8,
    )
    tree = PrefixTree((1, 2), (20, 9)) if random.random() < 0.5 else None
    process = Process(random.choice((5.0, 60.0)), random.choice((1.0, 3.0)), *random.choice(((1e9, 0.0), (0.1, 0.3))))
    traffic = Traffic(process, Lengths(25, 0.8), Lengths(12, 0.7), tree, tenants=random.choice((1, 3)), seed=seed)
    wished = random.random() < 0.3
    requests = []
    for number, arrival in enumerate(traffic, 1):
        request = request_of(arrival, number)
        if wished and number % 3 == 0:
            request = replace(request, due_s=arrival.at_s + 0.05, itl_s=0.02, priority=number % 2)
        requests.append(request)
        if number == 6:
            break
    return Case(setup, tuple(requests))


def by_engine(case: Case) -> tuple[list[StepPlan], Seen]:
    setup, machine, seen = case.setup, Machine(case.setup.cost), Seen()
    pacer = None
    if setup.itl_s is not None:
        pacer = Pacer(
            CostTracker(setup.cost, margin=setup.margin),
            itl_s=setup.itl_s,
            prefill_share=setup.prefill_share,
            prefer=setup.prefer,
        )
    engine = Engine(setup.state(), machine, setup.budget, machine, pacer=pacer)
    waiting = list(case.requests)
    while waiting or engine.has_work:
        if not engine.has_work:
            machine.now_s = max(machine.now_s, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= machine.now_s:
            request = waiting.pop(0)
            try:
                engine.submit(request)
            except RequestError:
                seen.refusals.append(request.request_id)
        if engine.has_work:
            events = engine.step()
            seen.tokens(events.request_ids, (machine.now_s,))
            for ended in events.finished:
                seen.finished(ended, machine.now_s)
    return machine.plans, seen


def by_simulator(case: Case, *, learns: bool, leaps: bool = False) -> tuple[list[StepPlan], Seen]:
    plans, seen = list[StepPlan](), Seen()
    setup = replace(case.setup, learns=learns)
    replica = setup.replica(seen, planned=None if leaps else plans.append, leaps=leaps)
    for request in case.requests:
        while replica.ready_s < request.arrival_s:
            replica.turn()
        replica.arrive(request, request.arrival_s)
    while replica.unfinished:
        replica.turn()
    return plans, seen


@pytest.mark.parametrize("first", range(0, TRACES, 250))
def test_engine_and_simulator_make_the_same_plans_step_by_step(first: int) -> None:
    """Where the engine learns what steps take, the simulator does too."""
    preempted = cached = refused = paced = 0
    for seed in range(first, first + 250):
        case = case_of(seed)
        plans, seen = by_engine(case)
        simulated, simulated_seen = by_simulator(case, learns=True)
        assert simulated == plans, f"trace {seed}"
        assert simulated_seen.tokens_s == seen.tokens_s, f"trace {seed}"
        assert simulated_seen.ended == seen.ended, f"trace {seed}"
        assert simulated_seen.refusals == seen.refusals, f"trace {seed}"
        preempted += any(plan.preempt for plan in plans)
        cached += any(ended.cached_tokens for ended, _ in seen.ended.values())
        refused += bool(seen.refusals)
        paced += case.setup.itl_s is not None and any(plan.decodes < len(plan.request_ids) for plan in plans)
    assert min(preempted, cached, refused, paced) > 10, "the traces show too little"


def test_steps_taken_many_at_once_change_nothing() -> None:
    """Nor does when requests come meanwhile. Compared where nothing is learned: else none are."""
    leapt = 0
    for seed in range(400):
        case = case_of(seed)
        _, one_by_one = by_simulator(case, learns=False)
        _, at_once = by_simulator(case, learns=False, leaps=True)
        assert at_once.tokens_s.keys() == one_by_one.tokens_s.keys(), f"trace {seed}"
        for request_id, tokens_s in one_by_one.tokens_s.items():
            assert at_once.tokens_s[request_id] == pytest.approx(tokens_s, rel=1e-12), f"trace {seed}"
            assert at_once.ended[request_id][0] == one_by_one.ended[request_id][0], f"trace {seed}"
        assert at_once.steps_s == pytest.approx(one_by_one.steps_s, rel=1e-12), f"trace {seed}"
        leapt += at_once.at_once
    assert leapt > 5000, "few steps were taken at once"


def test_a_request_that_comes_at_the_end_of_a_step_is_in_the_next_one() -> None:
    setup = Setup(StepCost(Attention(), Curve((1,), (1.0,))), 100, 16, policy="fcfs")
    for at_s, first_s in ((1.0, 2.0), (1.5, 3.0), (2.0, 3.0)):
        requests = (request_of(Arrival(0.0, 3, 10), 1), request_of(Arrival(at_s, 3, 2), 2))
        for leaps in (False, True):
            _, seen = by_simulator(Case(setup, requests), learns=False, leaps=leaps)
            assert seen.tokens_s[2][0] == first_s


@pytest.mark.parametrize("leaps", [False, True])
def test_a_request_that_comes_after_the_next_step_was_planned_waits_for_the_one_after(leaps: bool) -> None:
    """Steps of a second are planned 52 milliseconds before they begin; an idle engine plans at once."""
    setup = Setup(StepCost(Attention(), Curve((1,), (1.0,))), 100, 16, policy="fcfs", ahead=True)
    for at_s, first_s in ((2.9, 4.0), (2.96, 5.0), (7.0, 8.0), (9.5, 10.5)):
        requests = (request_of(Arrival(0.0, 3, 7), 1), request_of(Arrival(at_s, 3, 2), 2))
        _, seen = by_simulator(Case(setup, requests), learns=False, leaps=leaps)
        assert seen.tokens_s[2][0] == first_s, at_s


def test_steps_take_longer_where_those_of_their_kind_did() -> None:
    noise = Recorded([(0.0, 1.0), (10.0, 3.0)], [(5.0, 2.0)])
    decode, prompt = StepShape(rows=4, sequences=4), StepShape(rows=9, sequences=4)
    assert [noise(decode, at_s) for at_s in (-1.0, 4.9, 5.1, 99.0)] == [1.0, 1.0, 3.0, 3.0]
    assert [noise(prompt, at_s) for at_s in (0.0, 99.0)] == [2.0, 2.0]
    assert Recorded([], [])(decode, 1.0) == 1.0
    setup = Setup(StepCost(Attention(), Curve((1,), (1.0,))), 100, 16, policy="fcfs", noise=noise)
    _, seen = by_simulator(Case(setup, (request_of(Arrival(0.0, 3, 9), 1),)), learns=False, leaps=True)
    assert seen.tokens_s[1] == [2.0, 3.0, 4.0, 5.0, 6.0, 9.0, 12.0, 15.0, 18.0]
