"""Prediction before allocation, and what the process then has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from exec.backends import ISAS, RandomCheckpoint, needs_native
from exec.tiny_specs import TINY_SPECS
from legato.errors import ConfigError, ModelUnsupported, OutOfMemory
from legato.exec.kv import KvLayout, default_pool_blocks
from legato.exec.memory import MIB, Footprint, available_bytes, process_memory, require_room

if ISAS:
    from legato import _native
    from legato.exec.cpu.pack import load_nbytes, pack, packed_nbytes


def test_the_peak_is_the_larger_of_loading_and_serving() -> None:
    assert Footprint(base=10, weights=100, load=50, tables=1, kv=20, scratch=5).peak == 160
    assert Footprint(base=10, weights=100, load=50, tables=1, kv=200, scratch=5).peak == 316


def test_the_footprint_is_said_in_mebibytes() -> None:
    text = str(Footprint(base=10 * MIB, weights=100 * MIB, load=0, tables=MIB, kv=2048 * MIB, scratch=5 * MIB))
    assert text == "2,164 MiB (weights 100, kv 2,048, scratch 5, tables 1, base 10)"


def test_a_refusal_has_both_numbers_and_the_next_move() -> None:
    require_room("it", 5, 5, "")
    with pytest.raises(OutOfMemory, match=r"the model needs 2 MiB and 1 MiB of memory are available; use less"):
        require_room("the model", 2 * MIB, MIB, "use less")


def test_the_process_and_the_machine_can_be_measured() -> None:
    memory = process_memory()
    assert 10 * MIB < memory.resident <= memory.peak
    assert 10 * MIB < available_bytes() < 1 << 50


def test_the_automatic_pool_is_what_the_sequences_need_within_a_gibibyte_and_a_quarter_of_memory() -> None:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=16, block_tokens=16, dtype="f16")
    assert (layout.token_bytes, layout.block_bytes, layout.blocks_for(33)) == (128, 2048, 3)
    assert default_pool_blocks(layout, max_model_len=40, max_num_seqs=5, available_bytes=1 << 30) == 15
    assert default_pool_blocks(layout, max_model_len=40, max_num_seqs=5, available_bytes=4 * 2048 * 7 + 1) == 7
    gibibyte = (1 << 30) // 2048
    assert default_pool_blocks(layout, max_model_len=1 << 20, max_num_seqs=99, available_bytes=1 << 40) == gibibyte
    assert default_pool_blocks(layout, max_model_len=1 << 24, max_num_seqs=99, available_bytes=1 << 40) == 1 << 20


@pytest.mark.parametrize("block_tokens", [0, -16, 8, 33])
def test_a_block_is_a_multiple_of_16_tokens(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match=str(block_tokens)):
        KvLayout.of(TINY_SPECS["llama"], block_tokens=block_tokens, dtype="f16")


def test_a_head_the_kernels_cannot_hold_is_refused() -> None:
    from dataclasses import replace

    with pytest.raises(ModelUnsupported, match="head_dim 20"):
        KvLayout.of(replace(TINY_SPECS["llama"], head_dim=20), block_tokens=16, dtype="f16")


@needs_native
@pytest.mark.parametrize("name", TINY_SPECS)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_the_pool_is_as_large_as_predicted(name: str, dtype: str) -> None:
    layout = KvLayout.of(TINY_SPECS[name], block_tokens=48, dtype=dtype)  # type: ignore[arg-type]
    sizes = (layout.layers, 7, 48, layout.kv_heads, layout.head_dim, dtype)
    assert _native.KvCache.predict_nbytes(*sizes) == _native.KvCache(*sizes).nbytes == 7 * layout.block_bytes


@needs_native
@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
def test_weights_are_as_large_as_predicted(form: str) -> None:
    checkpoint = RandomCheckpoint(TINY_SPECS["gemma3"], form=lambda name: form)
    vectors = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 1]
    matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    found = sum(checkpoint.vector(name).nbytes for name in vectors)
    found += sum(pack(checkpoint.tensor(name)).nbytes for name in matrices)
    assert packed_nbytes(checkpoint, None) == found


@needs_native
def test_the_load_needs_more_than_the_weights_only_for_a_large_tensor_that_comes_late() -> None:
    tied, untied = RandomCheckpoint(TINY_SPECS["llama"]), RandomCheckpoint(TINY_SPECS["llama3"])
    assert load_nbytes(tied, None) == 4 * (64 * 96 - 64)  # ffn_down, before the last norm
    assert load_nbytes(untied, None) == 4 * 101 * 64  # the output matrix comes last


SERVE = """
import json, sys
from array import array
from pathlib import Path
from legato.core.plan import StepPlan
from legato.core.request import Request, Sampling
from legato.exec.memory import process_memory
from legato.exec.model import load_model

model = load_model(Path(sys.argv[1]), max_num_batched_tokens=512, max_num_seqs=8, kv_tokens=4096)

class Source:
    def request(self, i): return Request(i, tuple(range(512)), Sampling(temperature=1.0, top_p=0.9))
    def tokens(self, i): return array("i", range(513))
    def blocks(self, i): return array("i", range(16 * i, 16 * i + 16))  # of 32 tokens: the pool is full at the end
    def moves(self, step): return ()

model.executor.bind(Source())
for i in range(8):
    model.executor.execute(StepPlan(i, (i,), (0,), (512,), (True,)))
model.executor.execute(StepPlan(8, tuple(range(8)), (511,) * 8, (1,) * 8, (True,) * 8))
print(json.dumps({"predicted": model.footprint.peak, "measured": process_memory().peak, "text": str(model.footprint)}))
"""


@needs_native
def test_serving_smollm2_with_a_full_pool_takes_what_was_predicted(smollm2_path: Path) -> None:
    """In a process of its own: predicted before KV and scratch exist, measured at the peak with every block used."""
    out = subprocess.run(
        [sys.executable, "-c", SERVE, str(smollm2_path)], capture_output=True, text=True, check=True, timeout=230
    )
    found = json.loads(out.stdout.splitlines()[-1])
    print(found["text"], f"measured {found['measured'] / MIB:,.0f} MiB")
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.05)
