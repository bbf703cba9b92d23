"""OpenVINO GenAI: the continuous-batching pipeline on the GGUF file itself, one `step()` at a time.

`--precision f32` sets the inference precision hint; the default leaves the choice to OpenVINO (bf16 where the CPU has
AMX or AVX512-BF16, else f32). A prompt is taken in one step (`--batched-tokens`): its best on this model.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import numpy as np

sys.path.remove(str(Path(__file__).resolve().parent))  # this file has the package's own name
import openvino as ov
import openvino_genai as genai


class OpenVino:
    """One pipeline; requests are given as token ids and are greedy."""

    name = "openvino-genai"

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = options.batched_tokens
        scheduler.max_num_seqs = 32
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        if options.precision != "default":
            properties["INFERENCE_PRECISION_HINT"] = options.precision
        if options.kv_cache != "default":
            properties["KV_CACHE_PRECISION"] = options.kv_cache
        self.pipeline = genai.ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", properties)
        self.requests = 0
        self.version = version("openvino-genai")
        cpu = ov.Core()
        self.settings = {
            "threads": options.threads,
            "batched_tokens": options.batched_tokens,
            "precision": options.precision,
            "default_precision": str(cpu.get_property("CPU", "INFERENCE_PRECISION_HINT")),
            "kv_cache": options.kv_cache,
            "isa": ", ".join(cpu.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    def prefill_s(self, prompt: list[int]) -> float:
        """A request of one new token, from submission to the end of the step that gives it."""
        start = time.perf_counter()
        handle = self._submit(prompt, 1)  # a dropped handle cancels its request
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        prefill_s = time.perf_counter() - start
        if not handle.read_all():
            raise RuntimeError("the request gave no token")
        return prefill_s

    def decode_s(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Steps after every sequence has given its first tokens and before any ends."""
        prefill_steps = sum(map(len, prompts)) // self.settings["batched_tokens"] + 2
        handles = [self._submit(prompt, prefill_steps + steps + 2) for prompt in prompts]
        for _ in range(prefill_steps):
            self.pipeline.step()
        steps_s = []
        for _ in range(steps):
            start = time.perf_counter()
            self.pipeline.step()
            steps_s.append(time.perf_counter() - start)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        if not all(handle.read_all() for handle in handles):
            raise RuntimeError("a request gave no token")
        return steps_s

    def _submit(self, prompt: list[int], new_tokens: int) -> Any:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = new_tokens
        wanted.ignore_eos = True
        wanted.do_sample = False
        self.requests += 1
        return self.pipeline.add_request(self.requests, ov.Tensor(np.array([prompt], dtype=np.int64)), wanted)


if __name__ == "__main__":
    parser = harness.parser(__doc__)
    parser.add_argument("--precision", choices=["default", "f32", "bf16"], default="default")
    parser.add_argument("--kv-cache", choices=["default", "f32", "f16", "bf16", "u8"], default="default")
    parser.add_argument("--batched-tokens", type=int, default=4096)
    harness.main(parser.parse_args(), OpenVino)
