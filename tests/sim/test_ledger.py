"""What a simulation adds up, in bounded memory."""

from __future__ import annotations

from random import Random

import pytest

from legato.core.cost import Curve, StepCost
from legato.core.shape import Attention
from legato.sim.fleet import Fleet, Setup, bounded
from legato.sim.ledger import Ledger, Objectives
from legato.sim.report import fairness, jain, report, spread
from legato.sim.router import router
from legato.sim.series import Series
from legato.sim.sketch import Sketch
from legato.workload.arrivals import Arrival, PrefixTree, Process, Traffic
from legato.workload.lengths import Lengths

# A second a step, whatever is in it.
SLOW = Setup(StepCost(Attention(), Curve((1,), (1.0,))), 1000, 16, policy="fcfs", max_num_batched_tokens=64)


def test_quantiles_of_a_sketch_are_right_to_a_quarter_percent() -> None:
    random, sketch = Random(1), Sketch()
    values = [random.lognormvariate(0, 2) for _ in range(20_000)]
    for value in values:
        sketch.add(value)
    values.sort()
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert sketch.quantile(share) == pytest.approx(values[round(share * (len(values) - 1))], rel=0.0026)
    assert (sketch.mean, sketch.most) == (pytest.approx(sum(values) / len(values)), values[-1])
    assert len(sketch._bins) < 5000


def test_numbers_added_together_are_as_if_added_one_by_one() -> None:
    one_by_one, together = Sketch(), Sketch()
    for values in ([1.0, 1.001, 1.002], [2.0], [0.5, 0.7, 0.9], [0.0, 1.0], []):
        together.add_all(values, 3)
        for value in values:
            one_by_one.add(value, 3)
    assert together._bins == one_by_one._bins
    for name in ("count", "least", "most"):
        assert getattr(together, name) == getattr(one_by_one, name)
    assert together.total == pytest.approx(one_by_one.total)


def test_a_sketch_of_nothing_and_of_nought() -> None:
    sketch = Sketch()
    assert (sketch.quantile(0.5), sketch.mean, spread(sketch)) == (0.0, 0.0, None)
    sketch.add(0.0, 3)
    sketch.add(2.0)
    assert sketch.quantiles((0.5, 1.0)) == [0.0, 2.0]


def test_a_series_keeps_means_in_bounded_memory() -> None:
    series = Series()
    for second in range(100_000):
        series.add(float(second), 1.0, 5.0, second % 2)
    rows = list(series)
    assert 200 <= len(rows) <= 400
    assert all(row[1:] == pytest.approx((5.0, 0.5), abs=0.01) for row in rows)
    assert rows[-1][0] < 100_000 + series.width_s


def simulated(setup: Setup, arrivals: list[Arrival], objectives: Objectives, replicas: int = 1) -> Ledger:
    ledger = Ledger(objectives)
    for _ in Fleet(setup, ledger, replicas).run(arrivals):
        pass
    return ledger


def test_figures_are_those_of_the_steps() -> None:
    """Steps of a second: one comes while another decodes, and its prompt of two chunks is answered two steps later."""
    ledger = simulated(SLOW, [Arrival(0.0, 10, 6), Arrival(1.5, 100, 2)], Objectives(2.0, 1.0, 1.0, 1.5))
    found = report(ledger, price_per_hour=3600.0)
    assert found["requests"] == {"arrived": 2, "completed": 2, "unfinished": 0, "refused": 0, "refusals": {}}
    assert found["seconds"] == 6.0 and found["steps"] == 6
    assert (found["ttft_ms"]["max"], found["ttft_ms"]["mean"]) == (2500.0, 1750.0)
    assert (found["itl_ms"]["p50"], found["itl_ms"]["max"]) == (1000.0, 1000.0)
    assert found["e2e_ms"]["max"] == 6000.0 and found["tpot_ms"]["max"] == 1000.0
    assert found["goodput"]["requests_per_s"] == pytest.approx(1 / 6, abs=1e-4), "the second had to wait too long"
    assert found["goodput"]["tokens_per_s"] == 1.0
    assert found["stalls"]["gaps"] == 0 and found["busy_share"] == 1.0
    assert found["output_tokens_per_s"] == pytest.approx(8 / 6, abs=0.01)
    assert found["cost"]["total"] == 6.0
    assert found["cost"]["per_million_output_tokens"] == pytest.approx(6.0 / 8e-6)


def test_a_gap_above_the_objective_makes_a_request_bad_and_is_a_stall() -> None:
    cost = StepCost(Attention(), Curve((1,), (1.0,), 0.01))
    setup = Setup(cost, 1000, 16, policy="fcfs", max_num_batched_tokens=64)
    ledger = simulated(setup, [Arrival(0.0, 1, 9), Arrival(1.5, 63, 1)], Objectives(itl_s=1.2, stall_s=1.2))
    assert (ledger.stalls, ledger.good, ledger.completed) == (1, 1, 2)


def test_what_can_never_be_served_is_counted_with_its_reason() -> None:
    ledger = simulated(SLOW, [Arrival(0.0, 10, 2), Arrival(0.1, 50_000, 2), Arrival(0.2, 60_000, 2)], Objectives())
    assert ledger.completed == 1 and ledger.unfinished == 0
    assert ledger.refusals == {"the prompt has n tokens and the whole KV cache holds n, n of them for the answer": 2}


def test_tenants_are_told_apart_and_jain_says_how_even() -> None:
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    arrivals = [Arrival(0.0, 10, 5, tenant="a"), Arrival(0.0, 10, 5, tenant="b")]
    told = fairness(simulated(SLOW, arrivals, Objectives()))
    assert told is not None and told["jain"] == 1.0 and set(told["tenants"]) == {"a", "b"}
    assert told["tenants"]["a"]["tokens_per_s"] == 3.0, "15 tokens in 5 steps"
    assert fairness(simulated(SLOW, arrivals[:1], Objectives())) is None


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    ledger = Ledger(Objectives(1.0, 1.0))
    traffic = Traffic(Process(3.0), Lengths(8, 0.5), Lengths(3), tenants=200)
    fleet = Fleet(SLOW, ledger, 4)
    most = max(ledger.unfinished for _ in fleet.run(bounded(traffic, 3000, None)))
    assert ledger.completed == 3000 and ledger.unfinished == 0
    assert most < 100 and len(ledger.tenants) == 65
    assert all(not replica.state.has_work for replica in fleet.replicas)


def counts(name: str, arrivals: list[Arrival], replicas: int = 4) -> list[int]:
    """How many requests each replica got."""
    chosen, route = [0] * replicas, router(name)
    fleet = Fleet(SLOW, Ledger(), replicas, lambda arrival, of: note(route(arrival, of)))

    def note(n: int) -> int:
        chosen[n] += 1
        return n

    for _ in fleet.run(arrivals):
        pass
    return chosen


def test_round_robin_takes_turns() -> None:
    assert counts("round-robin", [Arrival(0.1 * n, 8, 3) for n in range(40)]) == [10] * 4


def test_the_least_loaded_gets_the_next_one() -> None:
    """One that is busy for long gets nothing more while others are idle."""
    arrivals = [Arrival(0.0, 8, 900), *(Arrival(5.0 * n, 8, 2) for n in range(1, 40))]
    assert sorted(counts("least-loaded", arrivals)) == [1, 13, 13, 13]


def test_prefixes_stay_together_unless_that_is_uneven() -> None:
    tree = PrefixTree.of("4x64")
    apart = Traffic(Process(0.2), Lengths(8), Lengths(2), tree, seed=1)
    fleet = Fleet(SLOW, aware := Ledger(), 4, router("prefix-aware"))
    for _ in fleet.run(bounded(apart, 200, None)):
        pass
    for _ in Fleet(SLOW, spread_out := Ledger(), 4, router("round-robin")).run(bounded(apart, 200, None)):
        pass
    assert aware.cached_tokens > spread_out.cached_tokens
    assert aware.cached_tokens >= 0.8 * 200 * 64
    together = [Arrival(0.01 * n, 72, 30, ((5, 64),)) for n in range(80)]
    assert max(counts("prefix-aware", together)) <= 40
