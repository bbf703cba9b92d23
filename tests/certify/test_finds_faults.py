"""A certificate is worth what it would have found: planted faults are found, shrunk, and fail again when replayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from certify import faults
from certify.rigs import ReferenceRig, limits_of, native_rig
from exec.backends import needs_native
from legato.certify.alone import AloneCache
from legato.certify.campaign import Campaign
from legato.certify.draw import Limits
from legato.certify.report import Finding
from legato.certify.rig import Rig
from legato.certify.schedule import Schedule
from legato.certify.trial import run_trial
from legato.exec.reference.ops import ReferenceOps

TRIALS = 200


def find(rig: Rig, limits: Limits) -> Finding:
    """The fault, within 200 trials, as small as it gets; and again from its JSON."""
    campaign = Campaign(rig, time.monotonic)
    campaign.run(limits, seed=0, trials=TRIALS)
    assert campaign.finding is not None, f"nothing was found in {TRIALS} trials: {campaign.totals}"
    campaign.shrink(runs=100, seconds=10)
    finding = campaign.finding
    assert finding.is_repeatable
    again = run_trial(Schedule.from_dict(finding.schedule.to_dict()), rig, AloneCache(rig))
    assert again.failure == finding.failure
    assert again.totals.mismatched_logit_bits or again.totals.mismatched_tokens or finding.failure.kind != "difference"
    return finding


@pytest.mark.parametrize("ops", [faults.MaskOffByOne, faults.SumsInAnotherOrder])
def test_a_fault_of_the_arithmetic_is_found(ops: type[ReferenceOps]) -> None:
    rig = ReferenceRig(ops)
    finding = find(rig, rig.limits)
    assert finding.failure.kind == "difference"
    assert len(finding.schedule.arrivals) <= 2


PLANTED: list[Callable[[Any], None]] = [
    faults.last_token_is_dropped,
    faults.blocks_are_published_early,
    faults.keys_ignore_what_comes_before,
    faults.keys_ignore_the_last_token,
    faults.a_preempted_request_keeps_a_block,
    faults.restored_blocks_are_not_copied,
    faults.saved_after_it_is_overwritten,
    faults.the_draw_depends_on_the_company,
]


@needs_native
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_bookkeeping_is_found(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    rig = native_rig()
    find(rig, limits_of(rig.shape, 128, 200))
