"""llama.cpp, through llama-cpp-python's low-level interface: llama_decode on whole batches, one sequence id a row.

Built from source with GGML_NATIVE: AVX-512, VNNI and AMX are used where the CPU has them. Flash attention is on and
n_ubatch is 512 unless the options say otherwise; `--no-repack` keeps the file's layout (no AMX, no repacked kernels).
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path

import harness
import numpy as np

sys.path.remove(str(Path(__file__).resolve().parent))  # this file has the package's own name
import llama_cpp as ll

CONTEXT_TOKENS = 256  # cells for each sequence of a decode batch
PREFILL_TOKENS = 4096


class LlamaCpp:
    """One loaded model with a context for single sequences and one for batches."""

    name = "llama.cpp"

    def __init__(self, options: argparse.Namespace) -> None:
        ll.llama_backend_init()
        model_params = ll.llama_model_default_params()
        model_params.use_extra_bufts = options.repack
        self.model = ll.llama_model_load_from_file(str(options.model).encode(), model_params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {options.model}")
        self.options = options
        self.vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.single = self._context(PREFILL_TOKENS, 1)
        self.batched = self._context(32 * CONTEXT_TOKENS, 32)
        self.version = version("llama-cpp-python")
        features = [word for word in ll.llama_print_system_info().decode().split(" | ") if word.strip()]
        self.settings = {
            "threads": options.threads,
            "ubatch": options.ubatch,
            "flash_attn": options.flash_attn,
            "repack": options.repack,
            "isa": ", ".join(word.removeprefix("CPU : ").removesuffix(" = 1") for word in features),
        }

    def _context(self, cells: int, sequences: int) -> ll.llama_context_p:
        params = ll.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = max(self.options.ubatch, PREFILL_TOKENS)
        params.n_ubatch = self.options.ubatch
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.options.threads
        params.flash_attn_type = (
            ll.LLAMA_FLASH_ATTN_TYPE_ENABLED if self.options.flash_attn else ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = self.options.kv_unified
        context = ll.llama_init_from_model(self.model, params)
        if not context:
            raise SystemExit("llama.cpp cannot make a context")
        return context

    def prefill_s(self, prompt: list[int]) -> float:
        """One sequence, logits of the last token only."""
        ll.llama_memory_clear(ll.llama_get_memory(self.single), True)
        rows = [(token, position, 0, position == len(prompt) - 1) for position, token in enumerate(prompt)]
        start = time.perf_counter()
        self._decode(self.single, rows)
        return time.perf_counter() - start

    def decode_s(self, prompts: list[list[int]], steps: int) -> list[float]:
        """One llama_decode a step with one row for each sequence, argmax included."""
        context = self.single if len(prompts) == 1 else self.batched
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        tokens = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            rows = [(token, position, sequence, position == last) for position, token in enumerate(prompt)]
            tokens += self._decode(context, rows)
        steps_s = []
        for step in range(steps):
            start = time.perf_counter()
            rows = [
                (token, len(prompt) + step, sequence, True)
                for sequence, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            tokens = self._decode(context, rows)
            steps_s.append(time.perf_counter() - start)
        return steps_s

    def _decode(self, context: ll.llama_context_p, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The greedy token of each row that wants one. A row: token, position, sequence, wants logits."""
        batch = ll.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wants_logits
        code = ll.llama_decode(context, batch)
        ll.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(rows)} rows")
        wanted = [index for index, row in enumerate(rows) if row[3]]
        logits = [
            np.ctypeslib.as_array(ll.llama_get_logits_ith(context, index), shape=(self.vocab_size,)) for index in wanted
        ]
        return [int(row.argmax()) for row in logits]


if __name__ == "__main__":
    parser = harness.parser(__doc__)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--flash-attn", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--repack", action=argparse.BooleanOptionalAction, default=True)
    harness.main(parser.parse_args(), LlamaCpp)
