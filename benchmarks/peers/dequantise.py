"""Writes the Hugging Face folder (safetensors, config, tokenizer) of a GGUF file, for engines that do not read GGUF.

.venv-transformers_cpu/bin/python dequantise.py --model FILE.gguf --out FOLDER [--dtype float32|bfloat16]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def dequantise(model: Path, folder: Path, dtype: str) -> None:
    """Fills `folder` with the dequantised weights in `dtype`, config.json and tokenizer.json."""
    tokenizer = AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
    weights = AutoModelForCausalLM.from_pretrained(str(model.parent), gguf_file=model.name, dtype=getattr(torch, dtype))
    weights.hf_quantizer = None  # the weights are plain tensors now; the class refuses to save while it is set
    weights.is_quantized = False
    if hasattr(weights.config, "quantization_config"):
        del weights.config.quantization_config
    weights.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Reads the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    given = options.parse_args()
    dequantise(given.model.resolve(), given.out, given.dtype)


if __name__ == "__main__":
    main()
