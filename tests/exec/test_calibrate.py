"""Calibration: on machines whose costs are known, on a real one, and from disk."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any, cast

import pytest

from core.machines import MACHINE, random_shape
from exec.backends import ISAS
from exec.tiny_specs import TINY_SPECS
from exec.virtual_machine import VirtualMachine, loaded_on, noisy
from legato.core.budget import StepBudget
from legato.core.cost import Sample, StepCost
from legato.core.fit import fit
from legato.core.shape import StepShape

if not ISAS:
    pytest.skip("the native kernels are not built", allow_module_level=True)

from legato.exec import cost_file
from legato.exec.calibrate import Probe, StepTimer, Timing, attention_of, calibrate, design, fits
from legato.exec.cost_file import Calibration, load_or_calibrate, machine_key, read_calibration, write_calibration
from legato.exec.model import LoadedModel, load_model

BUDGET = StepBudget(max_tokens=512, max_seqs=64)
OPTIONS = {"activations": "int8", "kv_dtype": "f16"}


def machine_for(name: str, slow: float = 1.0) -> StepCost:
    """`MACHINE`, its attention spread over as many layers as that model has."""
    attention = attention_of(TINY_SPECS[name])
    share = 30 / sum(layers for layers, _ in attention.layers)
    return dataclasses.replace(
        MACHINE,
        attention=attention,
        pair_s=share * MACHINE.pair_s,
        kv_token_s=share * MACHINE.kv_token_s,
        scale=slow,
    )


def errors(cost: StepCost, machine: StepCost) -> list[float]:
    """Sorted, of 300 steps within `BUDGET`."""
    draw, found = random.Random(3), list[float]()
    while len(found) < 300:
        shape = random_shape(draw, machine.attention)
        if shape.rows <= BUDGET.max_tokens:
            found.append(abs(cost.predict(shape) / machine.predict(shape) - 1))
    return sorted(found)


def test_layers_are_counted_by_their_windows() -> None:
    assert attention_of(TINY_SPECS["llama"]).layers == ((3, None),)
    assert attention_of(TINY_SPECS["gemma3"]).layers == ((2, 20), (1, None))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_machine_is_known_after_a_few_seconds_whatever_others_do_on_it(name: str) -> None:
    machine = machine_for(name)
    clock = VirtualMachine(machine, noise=noisy(1))
    samples = calibrate(loaded_on(clock, TINY_SPECS[name]), BUDGET, limit_s=8.0, now=clock.now).samples
    assert clock.now_s < 9.0
    found = errors(fit(samples, machine.attention), machine)
    assert found[150] < 0.02
    assert found[285] < 0.05


def test_a_slow_machine_is_known_from_its_short_steps_in_hardly_more_time() -> None:
    machine = machine_for("llama", slow=40.0)
    clock = VirtualMachine(machine, noise=noisy(2))
    samples = calibrate(loaded_on(clock, TINY_SPECS["llama"]), BUDGET, limit_s=8.0, now=clock.now).samples
    assert clock.now_s < 20.0
    found = errors(fit(samples, machine.attention), machine)
    assert found[150] < 0.08
    assert found[285] < 0.25


def test_a_machine_that_is_busy_half_of_the_time_is_known_as_it_is_when_idle_and_its_noise_is_told() -> None:
    """The first start was on a machine where something was built: the gap that followed from it was twice too long."""
    machine, draw = machine_for("llama"), random.Random(5)

    def disturbed() -> float:
        return draw.lognormvariate(0.0, 0.02) * (draw.uniform(1.3, 3.0) if draw.random() < 0.5 else 1.0)

    clock = VirtualMachine(machine, noise=disturbed)
    busy = calibrate(loaded_on(clock, TINY_SPECS["llama"]), BUDGET, limit_s=8.0, now=clock.now)
    found = errors(fit(busy.samples, machine.attention), machine)
    assert found[150] < 0.08
    clock = VirtualMachine(machine, noise=noisy(6, interrupted=0.0))
    quiet = calibrate(loaded_on(clock, TINY_SPECS["llama"]), BUDGET, limit_s=8.0, now=clock.now)
    assert quiet.noise < 0.04 < 0.1 < busy.noise


def test_a_quiet_machine_is_known_in_fewer_runs_than_a_busy_one() -> None:
    def runs(interrupted: float) -> int:
        clock = VirtualMachine(machine_for("llama"), noise=noisy(7, 0.005, interrupted))
        calibrate(loaded_on(clock, TINY_SPECS["llama"]), BUDGET, limit_s=60.0, now=clock.now)
        return clock.steps

    assert runs(0.0) < 0.8 * runs(0.5)


def test_progress_begins_at_once_grows_and_reaches_its_end() -> None:
    clock, seen = VirtualMachine(MACHINE), list[tuple[int, int]]()
    calibrate(
        loaded_on(clock, TINY_SPECS["llama"]),
        BUDGET,
        now=clock.now,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[0][0] < 50 and seen[-1] == (1000, 1000)


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs", "kv_blocks", "max_model_len"),
    [(512, 64, 1500, 8192), (64, 64, 100, 2048), (16, 2, 8, 200), (1, 1, 1, 32)],
)
def test_every_probe_keeps_within_the_budget_the_context_and_the_pool(
    max_tokens: int, max_seqs: int, kv_blocks: int, max_model_len: int
) -> None:
    """`VirtualMachine` checks tokens and blocks."""
    budget = StepBudget(max_tokens, max_seqs)
    clock = VirtualMachine(MACHINE)
    loaded = loaded_on(clock, TINY_SPECS["llama"], kv_blocks=kv_blocks, max_model_len=max_model_len)
    probes = design(loaded, budget)
    assert probes
    timer = StepTimer(loaded, clock.now)
    for probe in probes:
        timer.seconds(probe)
        shape = timer.shape(probe, MACHINE.attention)
        assert 1 <= shape.rows <= max_tokens and 1 <= shape.sequences <= max_seqs
        for blocks in timer._tables:
            assert max(blocks) < kv_blocks
    assert calibrate(loaded, budget, now=clock.now).samples


def test_what_does_not_fit_is_said_not_to() -> None:
    loaded = loaded_on(VirtualMachine(MACHINE), TINY_SPECS["llama"], kv_blocks=10, max_model_len=300)
    budget = StepBudget(max_tokens=64, max_seqs=4)
    assert fits(Probe(decodes=(31, 63, 31), chunk=(32, 32)), loaded, budget)
    assert fits(Probe(decodes=(299,)), loaded, budget)
    assert not fits(Probe(decodes=(300,)), loaded, budget)
    assert not fits(Probe(decodes=(1,) * 4, chunk=(0, 5)), loaded, budget)
    assert not fits(Probe(decodes=(1,), chunk=(0, 64)), loaded, budget)
    assert not fits(Probe(decodes=(200,), chunk=(100, 60)), loaded, budget)


def test_a_real_model_is_calibrated_and_then_predicted(smollm2_path: Path) -> None:
    """Loosely, and by the time that one thread itself has run: machines that run tests are busy."""
    loaded = load_model(smollm2_path, kv_tokens=4096, max_num_batched_tokens=256, threads=1)
    budget = StepBudget(256, 64)
    samples = calibrate(loaded, budget, limit_s=4.0, now=time.thread_time).samples
    cost = fit(samples, attention_of(loaded.spec))
    assert len(samples) > 40
    timer, found = StepTimer(loaded, time.thread_time), list[float]()
    for probe in (Probe((100,)), Probe((300,) * 6), Probe(chunk=(0, 90)), Probe((50,) * 3, (1000, 70), ends=True)):
        best = min(timer.seconds(probe) for _ in range(5))
        found.append(best / cost.predict(timer.shape(probe, cost.attention)))
    assert min(found) > 0.4 and max(found) < 2.5
    assert 0 < cost.rows_within(StepShape(), 0, 256, 4 * cost.predict(samples[0].shape)) <= 256
    late, early = (cost.predict(StepShape().with_chunk(cost.attention, at, 64)) for at in (4000, 0))
    assert late > early


def calibration() -> Calibration:
    shape = StepShape(rows=3, sequences=2, pairs=90, kv_tokens=60, logit_rows=2)
    samples = (Sample(shape, 0.0123), Sample(dataclasses.replace(shape, rows=4), 0.02))
    return Calibration(MACHINE, samples, noise=0.03, times=2)


def test_a_calibration_is_kept_on_disk_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.json"
    assert read_calibration(path) is None
    write_calibration(path, calibration())
    assert read_calibration(path) == dataclasses.replace(calibration(), is_new=False)
    assert [entry.name for entry in path.parent.iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"version": 1}', '{"version": 2, "cost": {}, "samples": []}']
)
def test_a_damaged_file_is_no_calibration(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(damage)
    assert read_calibration(path) is None


def test_every_field_of_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_calibration(path, calibration())
    whole = json.loads(path.read_text())
    for name in whole:
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        assert read_calibration(path) is None
    for damaged in ([[{"rows": 1, "pages": 2}, 0.1]], [[{"rows": 1}, None]], [3]):
        path.write_text(json.dumps({**whole, "samples": damaged}))
        assert read_calibration(path) is None


def test_the_share_that_others_had_of_the_processors_is_told() -> None:
    assert cost_file._share_of_others((0.0, 0.0, 0.0), (10.0, 7.0, 5.0)) == pytest.approx(0.2)
    assert cost_file._share_of_others((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)) == 0.0
    before = cost_file._ticks()
    assert 0.0 <= cost_file._share_of_others(before, cost_file._ticks()) <= 1.0


class Footprint:
    """As far as a key looks at it."""

    weights = 1000


def test_a_machine_is_measured_once_for_a_model_and_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def measured(loaded: LoadedModel, budget: StepBudget, *, limit_s: float, progress: Any) -> Timing:
        calls.append(limit_s)
        return Timing(calibration().samples, noise=0.02)

    monkeypatch.setattr(cost_file, "calibrate", measured)
    monkeypatch.setattr(cost_file, "_STAT", tmp_path / "none")
    loaded = dataclasses.replace(
        loaded_on(VirtualMachine(MACHINE), TINY_SPECS["llama"]), footprint=cast("Any", Footprint())
    )
    first = load_or_calibrate(loaded, BUDGET, OPTIONS, tmp_path, limit_s=3.0)
    second = load_or_calibrate(loaded, BUDGET, OPTIONS, tmp_path, limit_s=3.0)
    assert calls == [3.0]
    assert (first.is_new, second.is_new) == (True, False)
    assert (first.cost, first.samples) == (second.cost, second.samples)

    others = (
        (dataclasses.replace(loaded, threads=1), BUDGET, OPTIONS),
        (dataclasses.replace(loaded, block_tokens=64), BUDGET, OPTIONS),
        (dataclasses.replace(loaded, spec=TINY_SPECS["gemma3"]), BUDGET, OPTIONS),
        (loaded, StepBudget(256, 64), OPTIONS),
        (loaded, BUDGET, {**OPTIONS, "kv_dtype": "f32"}),
    )
    keys = {machine_key(*other) for other in others} | {machine_key(loaded, BUDGET, OPTIONS)}
    assert len(keys) == 6
    monkeypatch.setattr(cost_file, "cpu_name", lambda: "another CPU")
    assert machine_key(loaded, BUDGET, OPTIONS) not in keys


def test_what_a_busy_machine_took_is_timed_again_and_the_shorter_times_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At three starts at most; the first quiet one ends it."""
    shapes = [StepShape(rows=n, sequences=n, logit_rows=n) for n in (1, 2, 3)]
    runs = iter([([1.0, 5.0, 3.0], 0.5), ([4.0, 2.0], 0.3), ([9.0, 9.0, 2.9], 0.4), ([0.1], 0.0)])

    def measured(*_: Any, **__: Any) -> Timing:
        seconds, noise = next(runs)
        return Timing(tuple(map(Sample, shapes, seconds)), noise)

    monkeypatch.setattr(cost_file, "calibrate", measured)
    monkeypatch.setattr(cost_file, "_STAT", tmp_path / "none")
    loaded = dataclasses.replace(
        loaded_on(VirtualMachine(MACHINE), TINY_SPECS["llama"]), footprint=cast("Any", Footprint())
    )
    starts = [load_or_calibrate(loaded, BUDGET, OPTIONS, tmp_path, limit_s=1.0) for _ in range(4)]
    assert [start.is_new for start in starts] == [True, True, True, False]
    assert [sample.seconds for sample in starts[3].samples] == [1.0, 2.0, 2.9]
    assert (starts[3].noise, starts[3].times) == (0.3, 3)


def test_a_folder_that_cannot_be_written_to_costs_another_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_file, "calibrate", lambda *_, **__: Timing(calibration().samples, noise=0.02))
    loaded = dataclasses.replace(
        loaded_on(VirtualMachine(MACHINE), TINY_SPECS["llama"]), footprint=cast("Any", Footprint())
    )
    file = tmp_path / "file"
    file.write_text("no folder")
    assert load_or_calibrate(loaded, BUDGET, OPTIONS, file, limit_s=1.0).is_new
