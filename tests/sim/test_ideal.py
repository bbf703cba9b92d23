"""Idealised steps: what data sheets say, and what the notes say that they should come to."""

from __future__ import annotations

import pytest

from legato.core.shape import StepShape
from legato.errors import ConfigError
from legato.sim import catalog
from legato.sim.catalog import Device, Model
from legato.sim.ideal import Ideal, parts_of
from legato.sim.prompt import PromptPlan, plan_prompt

H100 = Ideal(catalog.model("llama-3.1-8b"), catalog.device("h100"))


def planned(ideal: Ideal, chunk: int | None, decodes: int = 0, **options: float) -> PromptPlan:
    return plan_prompt(ideal.cost, ideal.parts, prompt=8000, decodes=decodes, chunk=chunk, **options)


def test_reading_14_gb_at_3_tb_a_second_is_a_floor_of_5_ms_whatever_the_batch() -> None:
    device = Device("d", "d", flops=989e12, bandwidth=3e12, memory=80e9, source="")
    model = Model("m", "m", 7e9, 32, 32, 8, 128, 8192, "", active=7e9)
    for streams in (1, 8, 40):
        step = Ideal(model, device).parts(StepShape.of_decodes([100] * streams, model.attention))
        assert step.seconds == pytest.approx(0.005, rel=0.08)
        assert step.weights_s > step.arithmetic_s


def test_a_spike_of_150_ms_becomes_bumps_of_12() -> None:
    whole, chunked = planned(H100, None, 32), planned(H100, 512, 32)
    assert whole.worst_gap_s == pytest.approx(0.150, rel=0.05)
    assert chunked.worst_gap_s == pytest.approx(0.012, rel=0.10)
    assert chunked.decode.seconds == pytest.approx(0.006, rel=0.10)


def test_8000_tokens_are_15_chunks_of_512_and_one_of_320() -> None:
    steps = planned(H100, 512, 32).steps
    assert [step.rows for step in steps] == [512] * 15 + [320]
    assert [step.start for step in steps] == [512 * n for n in range(16)]
    assert {step.decodes for step in steps} == {32}


@pytest.mark.parametrize(("chunk", "times", "tolerance"), [(64, 4.6, 0.07), (256, 1.2, 0.05), (512, 1.1, 0.08)])
def test_small_chunks_read_the_weights_more_often(chunk: int, times: float, tolerance: float) -> None:
    assert planned(H100, chunk).slowdown(planned(H100, None)) == pytest.approx(times, rel=tolerance)


def test_the_curve_that_the_scheduler_plans_with_is_the_slower_of_reading_and_computing() -> None:
    cost = H100.cost
    for rows in (1, 2, 7, 64, 200, 236, 237, 238, 239, 240, 241, 512, 8000, 200_000):
        shape = StepShape().with_chunk(cost.attention, 1000, rows)
        assert cost.predict(shape) == pytest.approx(H100.parts(shape).seconds, rel=1e-3), rows


def test_a_mixture_reads_few_experts_for_one_token_and_nearly_all_for_many() -> None:
    mixture = catalog.model("qwen3-30b-a3b")
    assert mixture.parameters_read(1) == pytest.approx(mixture.active)
    assert mixture.parameters_read(1000) == pytest.approx(mixture.parameters, rel=0.001)
    ideal = Ideal(mixture, catalog.device("h100"))
    for rows in (1, 5, 33, 100, 700):
        shape = StepShape().with_chunk(ideal.cost.attention, 0, rows)
        assert ideal.cost.predict(shape) == pytest.approx(ideal.parts(shape).seconds, rel=0.01)


def test_chunks_that_keep_a_gap_shrink_as_the_prompt_grows() -> None:
    plan = planned(H100, None, 32, itl_s=0.012)
    rows = [step.rows for step in plan.steps]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[-2]
    assert plan.worst_gap_s <= 0.012 * (1 + 1e-6)
    assert sum(rows) == 8000


def test_devices_that_share_a_model_halve_the_time() -> None:
    one, two = planned(H100, 512), planned(Ideal(H100.model, H100.device, devices=2), 512)
    assert two.ttft_s == pytest.approx(one.ttft_s / 2)


def test_what_was_measured_is_split_so_that_it_adds_up() -> None:
    cost = H100.cost.scaled(1.5)
    for rows in (1, 100, 512):
        shape = StepShape().with_chunk(cost.attention, 4000, rows)
        assert parts_of(cost, shape).seconds == pytest.approx(cost.predict(shape), rel=1e-6)


def test_every_entry_names_its_source_and_has_numbers_that_make_sense() -> None:
    for device in catalog.devices().values():
        assert device.source
        assert 0.5e12 < device.flops < 1e16
        assert 5e10 < device.bandwidth < 2e13
    for model in catalog.models().values():
        assert model.source
        assert 0 < model.active <= model.parameters
        assert model.heads % model.kv_heads == 0
        assert sum(layers for layers, _ in model.attention.layers) == model.layers


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"prompt": 0}, "prompt is 0"),
        ({"prompt": 10, "decodes": -1}, "decodes is -1"),
        ({"prompt": 10, "chunk": 0}, "chunk is 0"),
        ({"prompt": 10, "decodes": 32, "itl_s": 0.001}, "32 streams alone take 6.1 ms"),
    ],
)
def test_sizes_that_plan_nothing_are_refused(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_prompt(H100.cost, H100.parts, **sizes)


def test_unknown_names_are_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="h100, h200, a100"):
        catalog.device("tpu")
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        catalog.model("gpt-5")
