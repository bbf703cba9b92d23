"""Writes tests/golden/tiny.json: transformers' fp32 logits on the tiny random models of tests/golden/tiny.py.

Usage: python make_tiny.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
sys.path.insert(0, str(GOLDEN))
from tiny import CONFIGS, make_tiny, tiny_prompts  # noqa: E402


def tiny_record(name: str) -> list[dict[str, Any]]:
    """For each prompt: its ids, the logits of the last row and the argmax of every row."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(name, Path(folder))
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise SystemExit(f"{name}: {loading}")
    print(name, model.config.rope_parameters, getattr(model.config, "layer_types", None), file=sys.stderr)
    records = []
    for ids in tiny_prompts(name):
        rows = model.eval()(torch.tensor([ids]), use_cache=False).logits[0]
        last = [float(f"{value:.8g}") for value in rows[-1].tolist()]
        records.append({"ids": ids, "logits": last, "argmax": rows.argmax(-1).tolist()})
    return records


def main() -> None:
    """Reads the command line, writes one file."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=GOLDEN / "tiny.json")
    out: Path = options.parse_args().out
    torch.set_grad_enabled(False)
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, eager attention"
    record = {"made_with": made_with, "models": {name: tiny_record(name) for name in CONFIGS}}
    out.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
