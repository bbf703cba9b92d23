"""Without a fault nothing differs, and the trials do exercise what they say."""

from __future__ import annotations

import time

import numpy as np
import pytest

from certify.rigs import ReferenceRig, limits_of, native_rig
from exec.backends import needs_native
from exec.tiny_specs import TINY_SPECS
from legato.certify.alone import AloneCache
from legato.certify.campaign import Campaign
from legato.certify.rig import noise
from legato.certify.schedule import Arrival, Schedule
from legato.certify.totals import Totals
from legato.certify.trial import require_fit, run_trial
from legato.core.request import Sampling
from legato.errors import ConfigError


def assert_exercised(totals: Totals) -> None:
    for name in (
        "chunks",
        "steps_in_company",
        "forced_preemptions",
        "cached_tokens",
        "restored_blocks",
        "evicted_blocks",
        "aborts",
        "ahead_trials",
        "f16_trials",
        "f32_trials",
        "compared_logits",
        "compared_tokens",
    ):
        assert getattr(totals, name), f"{name} is 0"
    assert totals.preemptions > totals.forced_preemptions, "the pool was never too small"


def test_the_reference_is_exact() -> None:
    rig = ReferenceRig()
    campaign = Campaign(rig, time.monotonic)
    campaign.run(rig.limits, seed=3, trials=60)
    assert campaign.finding is None
    assert_exercised(campaign.totals)


@needs_native
@pytest.mark.parametrize(
    ("spec", "form"), [*((spec, "F32") for spec in TINY_SPECS), ("llama", "Q4_1"), ("llama", "F16")]
)
def test_the_native_kernels_are_exact(spec: str, form: str) -> None:
    rig = native_rig(spec, lambda name: form)
    campaign = Campaign(rig, time.monotonic)
    campaign.run(limits_of(rig.shape, 128, 200), seed=6, trials=60)
    assert campaign.finding is None
    assert_exercised(campaign.totals)
    assert campaign.totals.threaded_trials


def test_time_ends_a_campaign_too_and_a_seed_repeats_it() -> None:
    now_s = iter(range(1000))
    rig = ReferenceRig()
    timed, counted = Campaign(rig, lambda: float(next(now_s))), Campaign(rig, time.monotonic)
    timed.run(rig.limits, seed=5, seconds=10)
    counted.run(rig.limits, seed=5, trials=timed.totals.trials)
    assert (timed.totals.trials, timed.seconds) == (3, 3.0)
    assert timed.totals == counted.totals


def test_alone_means_one_step_for_the_prompt_and_what_is_known_is_not_computed_again() -> None:
    rig = ReferenceRig()
    cache = AloneCache(rig, max_bytes=1)
    prompt = tuple(range(9))
    long = cache.get(prompt, Sampling(), 5, "f32")
    assert cache.get(prompt, Sampling(), 2, "f32") is long
    cache.get(prompt[:3], Sampling(), 1, "f32")  # there is room for one
    again = cache.get(prompt, Sampling(), 5, "f32")
    assert again is not long
    assert again.token_ids == long.token_ids
    np.testing.assert_array_equal(again.logits, long.logits)


def test_whatever_is_raised_is_a_failure_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ReferenceRig()
    monkeypatch.setattr("legato.certify.trial.plan_step", lambda *_: 1 // 0)
    outcome = run_trial(Schedule((Arrival(0, 3),), 4, 1, 8), rig, AloneCache(rig))
    assert outcome.failure is not None
    assert outcome.failure.kind == "error"
    assert "ZeroDivisionError at test_exact.py" in outcome.failure.message


def test_a_request_that_ends_too_early_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the pool were taken for smaller than it is: all tokens there are equal, but there are too few."""
    from legato.core.slot import Slot

    monkeypatch.setattr(Slot, "end_reason", lambda self: "length" if len(self.tokens) > 4 else None)
    rig = ReferenceRig()
    outcome = run_trial(Schedule((Arrival(0, 3, max_tokens=5),), 4, 1, 8), rig, AloneCache(rig))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.message) == ("ending", "request 0 ended with 2 of 5 tokens")


def test_a_schedule_that_does_not_fit_names_both_numbers() -> None:
    shape = ReferenceRig().shape
    with pytest.raises(ConfigError, match="9 requests at once and there is room for 4"):
        require_fit(Schedule((Arrival(0, 3),), 10, 9, 8), shape)
    with pytest.raises(ConfigError, match="31 tokens of the longest request and there is room for 28"):
        require_fit(Schedule((Arrival(0, 30),), 10, 1, 7), shape)


def test_noise_is_finite_and_of_both_signs_in_every_number_format() -> None:
    data = noise(1 << 12)
    for values in (
        data.view(np.float16),
        data.view(np.float32),
        (data.view(np.uint16).astype(np.uint32) << 16).view("f4"),
    ):
        assert np.isfinite(values).all()
        assert (values < 0).any()
        assert (values > 0).any()
        assert np.abs(values).max() < 4
