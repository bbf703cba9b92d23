"""How far a simulation is off."""

from __future__ import annotations

import pytest

from legato.sim.fidelity import delayed, errors, worst

SERVED = {"ttft_ms": {"p50": 100.0, "p99": 200.0}, "itl_ms": {"p50": 10.0, "p99": 20.0, "max": 0.0}, "tpot_ms": None}


def test_errors_are_relative_to_the_server() -> None:
    simulated = {"ttft_ms": {"p50": 90.0, "p99": 210.0}, "itl_ms": {"p50": 10.0, "p99": 17.0, "max": 5.0}}
    found = errors(SERVED, simulated)
    assert found["ttft_ms"] == {"p50": -0.1, "p99": 0.05}
    assert found["itl_ms"] == {"p50": 0.0, "p99": -0.15}, "of nothing there is no share"
    assert worst(found) == 0.15


def test_a_client_is_some_way_from_the_engine() -> None:
    moved = delayed(SERVED, 5.0)
    assert moved["ttft_ms"] == {"p50": 105.0, "p99": 205.0}
    assert moved["itl_ms"] == SERVED["itl_ms"]
    assert worst(errors(SERVED, moved)) == pytest.approx(0.05)
