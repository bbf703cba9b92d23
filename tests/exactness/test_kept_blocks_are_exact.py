"""KV that comes back from host memory or from disk gives the bits that computing it gives, on SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legato.core.plan import TokenLogprobs

pytest.importorskip("legato._native")

PROMPTS: dict[str, list[int]] = json.loads((Path(__file__).parent / "prompts.json").read_text())
Answer = tuple[list[int], list[TokenLogprobs], int]


def answers(path: Path, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """Tokens, logprobs and cached tokens of each prompt, one after the other, from an engine that is then closed."""
    from legato import LLM, SamplingParams

    params = SamplingParams(max_tokens=6, logprobs=2)
    with LLM(str(path), max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=4, **options) as llm:
        completions = [llm.generate([prompt], params, progress=False)[0] for prompt in prompts]
        llm.engine.state.check()
    return [(c.token_ids, c.logprobs, c.cached_tokens) for c in completions]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [PROMPTS["code"][:500], PROMPTS["prose"][:400]]


@pytest.fixture(scope="module")
def cold(smollm2_path: Path, prompts: list[list[int]]) -> list[Answer]:
    return answers(smollm2_path, prompts, enable_prefix_caching=False, kv_tokens=1024)


def test_blocks_from_host_memory_are_exact(smollm2_path: Path, prompts: list[list[int]], cold: list[Answer]) -> None:
    """The pool holds one of the two prompts: each, when it comes again, is copied back."""
    warm = answers(smollm2_path, prompts * 2, kv_tokens=544, swap_space_bytes=64 << 20)
    assert [one[:2] for one in warm] == [one[:2] for one in cold] * 2
    assert [one[2] for one in warm[:2]] == [0, 0]
    assert all(one[2] > 300 for one in warm[2:])


def test_blocks_from_disk_are_exact_and_damage_is_a_miss(
    smollm2_path: Path, prompts: list[list[int]], cold: list[Answer], tmp_path: Path
) -> None:
    options = {"kv_tokens": 1024, "kv_cache_dir": str(tmp_path / "kv")}
    first = answers(smollm2_path, prompts, **options)
    again = answers(smollm2_path, prompts, **options)
    assert [one[2] for one in first] == [0, 0]
    assert all(one[2] > 300 for one in again)
    for found in (first, again):
        assert [one[:2] for one in found] == [one[:2] for one in cold]
    files = sorted(tmp_path.glob("kv/*/??/*"))
    assert len(files) == sum((len(prompt) + 5) // 32 for prompt in prompts)
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[1000 * number % len(data)] ^= 1 << number % 8
        file.write_bytes(data)
    damaged = answers(smollm2_path, prompts, **options)
    assert [one[:2] for one in damaged] == [one[:2] for one in cold]
    assert [one[2] for one in damaged] == [0, 0]


def test_another_option_that_changes_bits_finds_nothing_on_disk(smollm2_path: Path, tmp_path: Path) -> None:
    options = {"kv_tokens": 1024, "kv_cache_dir": str(tmp_path / "kv")}
    prompt = PROMPTS["code"][:70]
    assert answers(smollm2_path, [prompt], **options)[0][2] == 0
    assert answers(smollm2_path, [prompt], **options)[0][2] == 64
    assert answers(smollm2_path, [prompt], activations="f32", **options)[0][2] == 0
    assert answers(smollm2_path, [prompt], kv_dtype="f32", **options)[0][2] == 0
