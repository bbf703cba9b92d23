"""Options are checked once, with the value and the bound in the message."""

from __future__ import annotations

from typing import Any

import pytest

from legato.config import EngineConfig, format_size, parse_size
from legato.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be a whole number from 1"),
        ({"max_num_seqs": 600}, "max_num_seqs is 600 and a step holds 512"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"block_tokens": 40}, "multiple of 16"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": True}, "threads is True"),
        ({"kv_tokens": 1.5}, "kv_tokens is 1.5"),
        ({"kv_dtype": "f8"}, "kv_dtype is 'f8'; it must be one of f16, f32"),
        ({"quantize": "int2"}, "quantize is 'int2'"),
        ({"kv_tokens": 10, "kv_memory_bytes": 10}, "give one of them"),
        ({"itl_ms": 0.5}, "itl_ms is 0.5; it must be from 1 to"),
        ({"itl_ms": 60, "prefill_share": 1.0}, "prefill_share is 1; it must be from 0 to 0.9"),
        ({"prefill_share": 0.3}, "prefill_share is a part of the gap .* give itl_ms"),
        ({"prefer": "ttft"}, "prefer is a part of the gap .* give itl_ms"),
        ({"policy": "lifo"}, "policy is 'lifo'"),
        ({"ttft_ms": 0.5}, "ttft_ms is 0.5; it must be from 1"),
        ({"ttft_ms": 500, "policy": "fcfs"}, "fcfs keeps their order"),
        ({"tenant_weights": (("gold", 3.0),)}, "mean nothing to policy slo; choose fair"),
        ({"tenant_weights": (("gold", 0.0),), "policy": "fair"}, "the weight of tenant 'gold' is 0"),
        ({"tenant_weights": (("gold", float("nan")),), "policy": "fair"}, "the weight of tenant 'gold' is nan"),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold is 0"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills is 0"),
        ({"kv_cache_bytes": 10}, "name a folder"),
        ({"enable_prefix_caching": False, "swap_space_bytes": 10}, "enable prefix caching, or leave them out"),
        ({"swap_space_bytes": -1}, "swap_space_bytes is -1"),
    ],
)
def test_an_option_out_of_bounds_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + words):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("512M", 512_000_000), ("2.5 kib", 2560), ("100", 100), ("1gb", 10**9), ("64mi", 64 << 20)],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1TiB", "1 2", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no size"):
        parse_size(text)


def test_sizes_are_written_in_the_unit_that_fits() -> None:
    assert [format_size(n) for n in (2048, 83 << 20, 5 << 28)] == ["2 KiB", "83 MiB", "1.2 GiB"]
