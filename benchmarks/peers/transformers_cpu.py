"""Hugging Face transformers on the CPU: the dequantised weights, SDPA attention, a static batch for decode.

`--dtype float32` is the arithmetic of the golden values; bfloat16, the default where the CPU has AMX, is its fastest.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import harness
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    """One model in eager mode."""

    name = "transformers"

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)
        file = Path(options.model).resolve()
        dtype = options.dtype
        if dtype == "auto":
            dtype = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
        self.model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.version = f"{transformers.__version__} (torch {torch.__version__})"
        self.settings = {
            "threads": options.threads,
            "dtype": dtype,
            "isa": torch.backends.cpu.get_cpu_capability() + (", AMX" if torch.cpu._is_amx_tile_supported() else ""),
        }

    def prefill_s(self, prompt: list[int]) -> float:
        """One forward pass, logits of the last position only."""
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        self._greedy(ids, DynamicCache(config=self.model.config))
        return time.perf_counter() - start

    def decode_s(self, prompts: list[list[int]], steps: int) -> list[float]:
        """One forward pass a step on the whole batch; the prompts have one length, so nothing is padded."""
        cache = DynamicCache(config=self.model.config)
        ids = self._greedy(torch.tensor(prompts), cache)
        steps_s = []
        for _ in range(steps):
            start = time.perf_counter()
            ids = self._greedy(ids, cache)
            steps_s.append(time.perf_counter() - start)
        return steps_s

    def _greedy(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    parser = harness.parser(__doc__)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    harness.main(parser.parse_args(), Transformers)
