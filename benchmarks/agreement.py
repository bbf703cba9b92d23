"""How far the kernels' default arithmetic is from their fp32, on the texts of tests/golden.

    LEGATO_ISA=avx2 python benchmarks/agreement.py smollm2-135m          # or gemma3-270m; another instruction set

Prints positions, the share whose most likely token is the same, and the root mean square change of a logit, each
position's mean taken off: adding one number to all of a position's logits changes no probability.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato import _native
from legato.exec.batch import Batch
from legato.exec.model import load_model
from legato.models.pull import resolve

GOLDEN = Path(__file__).resolve().parent.parent / "tests/golden"
ROWS = 256  # of a vocabulary of 262,144 are 256 MiB


def logits(backend: Any, ids: list[int], block_tokens: int) -> Iterator[NDArray[np.float32]]:
    """Of every position, `[256, vocab]` at a time."""
    for start in range(0, len(ids), ROWS):
        part = ids[start : start + ROWS]
        stop = start + len(part)
        batch = Batch(
            tokens=np.array(part, np.int32),
            positions=np.arange(start, stop, dtype=np.int32),
            seq_row_starts=np.array([0, len(part)], np.int32),
            block_tables=np.arange(-(-stop // block_tokens), dtype=np.int32)[None],
            logit_rows=np.arange(len(part), dtype=np.int32),
        )
        yield np.array(backend.run(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2-135m", "gemma3-270m"))
    name = parser.parse_args().model
    record = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    texts = [entry["ids"] for entry in [*record["prompts"].values(), record["page"]]]
    limits: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 4, "max_logit_rows": ROWS}
    usual = load_model(resolve(name), kv_tokens=2048, **limits)
    exact = load_model(resolve(name), kv_tokens=2048, activations="f32", kv_dtype="f32", **limits)
    positions = same = 0
    squares = 0.0
    for ids in texts:
        pairs = zip(*(logits(m.backend, ids, m.block_tokens) for m in (usual, exact)), strict=True)
        for found, wanted in pairs:
            positions += len(found)
            same += int((found.argmax(axis=1) == wanted.argmax(axis=1)).sum())
            change = found - wanted
            squares += float(((change - change.mean(axis=1, keepdims=True)) ** 2).mean(axis=1).sum())
    rms = (squares / positions) ** 0.5
    print(f"{name} {_native.isa()}: {positions:,} positions, {same / positions:.2%} the same, rms {rms:.4f}")


if __name__ == "__main__":
    main()
