"""Whether blocks are swapped is decided by what was measured; and what names a model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("legato._native")

from legato.assemble import build_engine
from legato.config import EngineConfig
from legato.errors import ConfigError
from legato.exec import swap
from legato.exec.fingerprint import model_fingerprint
from legato.exec.swap import SwapCost


@pytest.mark.parametrize(("copy_s", "used"), [(0.001, True), (0.003, False)])
def test_blocks_are_swapped_only_if_a_copy_is_quicker_than_computing(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, copy_s: float, used: bool
) -> None:
    monkeypatch.setattr(swap, "measure_swap", lambda *_, **__: SwapCost(copy_s, 0.002))
    config = EngineConfig(str(smollm2_path), kv_tokens=64, max_model_len=64, swap_space_bytes=2 << 20)
    engine, info = build_engine(config, smollm2_path, lambda stage, done, total: None)
    assert (engine.state.memory.host.slots > 0) == used
    assert info.notice.startswith("swap: copying" if used else "no swap: copying")


def test_the_measure_is_of_this_machine(smollm2_path: Path) -> None:
    config = EngineConfig(str(smollm2_path), kv_tokens=256, max_model_len=64, swap_space_bytes=2 << 20)
    engine, info = build_engine(config, smollm2_path, lambda stage, done, total: None)
    assert engine.state.memory.host.slots == 2, "a copy of 0.7 MB is quicker than 32 rows of a model, anywhere"
    assert "swap: copying a block takes" in info.notice


def test_swap_space_for_less_than_a_block_is_refused_with_both_numbers(smollm2_path: Path) -> None:
    config = EngineConfig(str(smollm2_path), kv_tokens=64, swap_space_bytes=1000)
    with pytest.raises(ConfigError, match="swap_space is 1000 bytes; one block of KV takes 737280"):
        build_engine(config, smollm2_path, lambda stage, done, total: None)


def test_a_model_is_named_by_its_content_and_options_and_not_by_its_file(tmp_path: Path) -> None:
    one, copy, other = tmp_path / "one.gguf", tmp_path / "copy.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"weights" * 1000)
    copy.write_bytes(one.read_bytes())
    other.write_bytes(b"weights" * 999 + b"weightz")
    options = {"kv_dtype": "f16"}
    name = model_fingerprint(one, options)
    assert model_fingerprint(copy, options) == name
    assert model_fingerprint(other, options) != name
    assert model_fingerprint(one, {"kv_dtype": "f32"}) != name
