"""Writes tests/golden/<name>.json for a GGUF file: what transformers computes in fp32 on its dequantised weights.

    python make_golden.py --model FILE.gguf --out ../golden/NAME.json [--weights FOLDER]

`--weights` takes the folder that benchmarks/peers/dequantise.py made from the same file, which loads much faster.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
GREEDY_TOKENS = 32
TOP_IDS = 32
SAMPLED_IDS = 256


class Oracle:
    """The fp32 model and the tokenizer of one GGUF file."""

    def __init__(self, model: Path, weights: Path | None) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)  # one order of summation, whatever the machine
        folder, extra = (str(model.parent), {"gguf_file": model.name}) if weights is None else (str(weights), {})
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **extra
        ).eval()
        self.bos = [self.tokenizer.bos_token_id] if self.model.config.model_type == "gemma3_text" else []

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with BOS where the model wants one."""
        return self.bos + self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def logits(self, ids: list[int]) -> np.ndarray:
        """fp32 logits of every position: [len(ids), vocabulary]."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    def greedy(self, ids: list[int]) -> tuple[list[int], list[float]]:
        """GREEDY_TOKENS ids and, for each, its logit's lead over the second best, which tells near-ties."""
        cache = DynamicCache(config=self.model.config)
        tokens: list[int] = []
        gaps: list[float] = []
        given = ids
        while len(tokens) < GREEDY_TOKENS:
            out = self.model(torch.tensor([given]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            best = torch.topk(out.logits[0, -1], 2)
            given = [int(best.indices[0])]
            tokens += given
            gaps.append(round(float(best.values[0] - best.values[1]), 4))
        return tokens, gaps


def prompt_record(oracle: Oracle, text: str, sampled: np.ndarray) -> dict[str, Any]:
    """The golden values of one prompt."""
    ids = oracle.encode(text)
    rows = oracle.logits(ids)
    last = rows[-1]
    top = np.argsort(-last, kind="stable")[:TOP_IDS]
    greedy, gaps = oracle.greedy(ids)
    return {
        "ids": ids,
        "argmax": rows.argmax(-1).tolist(),
        "greedy": greedy,
        "greedy_gaps": gaps,
        "top_ids": top.tolist(),
        "top_logits": rounded(last[top]),
        "sampled_logits": rounded(last[sampled]),
        "max_abs_logit": rounded(np.abs(last).max(keepdims=True))[0],
    }


def page_record(oracle: Oracle, text: str) -> dict[str, Any]:
    """Perplexity of the page under teacher forcing: exp of the mean negative log-likelihood of ids[1:]."""
    ids = oracle.encode(text)
    rows = oracle.logits(ids)
    losses = []
    for row, following in zip(rows, ids[1:], strict=False):
        wide = row.astype(np.float64)
        losses.append(float(np.log(np.exp(wide - wide.max()).sum()) + wide.max() - wide[following]))
    mean_nll = sum(losses) / len(losses)
    return {
        "ids": ids,
        "argmax": rows.argmax(-1).tolist(),
        "mean_nll": mean_nll,
        "perplexity": math.exp(mean_nll),
    }


def rounded(values: np.ndarray) -> list[float]:
    """The values to seven significant digits, all that fp32 holds."""
    return [float(f"{value:.7g}") for value in values]


def main() -> None:
    """Reads the command line, writes one file."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--weights", type=Path)
    given = options.parse_args()
    oracle = Oracle(given.model.resolve(), given.weights)
    sampled = np.sort(np.random.default_rng(7).choice(oracle.model.config.vocab_size, SAMPLED_IDS, replace=False))
    prompts = json.loads((GOLDEN / "prompts.json").read_text(encoding="utf-8"))
    record = {
        "model": given.model.name,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, eager attention",
        "sampled_ids": sampled.tolist(),
        "prompts": {prompt["name"]: prompt_record(oracle, prompt["text"], sampled) for prompt in prompts},
        "page": page_record(oracle, (GOLDEN / "page.txt").read_text(encoding="utf-8")),
    }
    given.out.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    answers = {name: oracle.tokenizer.decode(prompt["greedy"]) for name, prompt in record["prompts"].items()}
    print(json.dumps(answers, ensure_ascii=False, indent=1))
    print("perplexity", record["page"]["perplexity"], "over", len(record["page"]["ids"]), "tokens")


if __name__ == "__main__":
    main()
