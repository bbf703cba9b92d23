"""Speed of the linear layers against this machine's own limits, per instruction set.

    python benchmarks/kernels/linear.py [--isa avx2 --isa amx] [--threads 2] [--rows 1 --rows 512] [--json]

Each figure is the shortest of many runs. Compute is compared with the fp32 multiply-add peak of the same threads,
instruction set and run (2 operations a multiply-add, integer ones too); one row with the bandwidth of reading memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from legato import _native
from legato._native import Matrix

# The layers of SmolLM2-135M in its Q4_1 file, then the same multiplication in other formats.
SHAPES = [
    ("qkv", "w4g32f16m", 960, 576, "int8"),
    ("attn_output", "w4g32f16m", 576, 576, "int8"),
    ("gate+up", "w4g32f16m", 3072, 576, "int8"),
    ("down", "w4g32f16m", 576, 1536, "int8"),
    ("lm_head", "w8g32f16", 49152, 576, "int8"),
    ("6-bit", "w8g16f32", 3072, 576, "int8"),
    ("4-bit, fp32 x", "w4g32f16m", 3072, 576, "f32"),
    ("f16", "f16", 3072, 576, "f32"),
    ("f32", "f32", 3072, 576, "f32"),
]
ROWS = [1, 8, 32, 96, 512, 2048]
HEAD_ROWS = 32  # logits are computed for at most this many rows here


@dataclass(frozen=True)
class Figure:
    isa: str
    threads: int
    layer: str
    format: str
    outputs: int
    inputs: int
    activations: str
    rows: int
    linear_us: float
    quantise_us: float
    gops: float
    of_fma_peak: float
    weight_gb_s: float
    of_read_bandwidth: float


def pack(form: str, outputs: int, inputs: int) -> Matrix:
    rng = np.random.default_rng(0)
    if form in ("f16", "f32"):
        values = rng.standard_normal((outputs, inputs), dtype=np.float32)
        return Matrix.pack_dense(values.astype(np.float16) if form == "f16" else values, dtype=form)
    bits, group = int(form[1]), int(form[3:5])
    q = rng.integers(0, 16 if bits == 4 else 64, (outputs, inputs), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.02, (outputs, inputs // group)).astype(np.float32)
    if form[5:8] == "f16":
        scale = scale.astype(np.float16).astype(np.float32)
    minimum = -8 * scale if form.endswith("m") else None
    zero = 0 if form.endswith("m") else 32
    return Matrix.pack_grouped(q, scale, minimum, zero=zero, bits=bits, group=group)


def read_bandwidth(threads: int, nbytes: int = 256 << 20) -> float:
    """Bytes/s of reading memory with `threads` threads."""
    from concurrent.futures import ThreadPoolExecutor

    blocks = [np.ones(nbytes // threads, np.uint8) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(_native.read_bandwidth, blocks)) for _ in range(5))


def measure(isas: list[str], threads: int, rows: list[int], seconds: float) -> Iterator[Figure]:
    bandwidth = read_bandwidth(threads)
    for layer, form, outputs, inputs, activations in SHAPES:
        weight = pack(form, outputs, inputs)
        for isa in isas:
            _native.set_isa(isa)
            for count in rows:
                if layer == "lm_head" and count > HEAD_ROWS:
                    continue
                peak = _native.team_fma_peak(threads, 0.02)
                quantise, linear = _native.time_linear(
                    weight, count, activations=activations, threads=threads, seconds=seconds
                )
                ops = 2.0 * count * outputs * inputs / linear
                speed = weight.nbytes / linear
                yield Figure(
                    isa, threads, layer, weight.format, outputs, inputs, activations, count,
                    linear * 1e6, quantise * 1e6, ops * 1e-9, ops / peak, speed * 1e-9, speed / bandwidth,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", action="append", choices=_native.isas(), help="default: all but portable")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--seconds", type=float, default=0.1, help="of repeating each measurement")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    isas = args.isa or [name for name in _native.isas() if name != "portable"]
    if not args.json:
        print(
            f"{'layer':14} {'format':10} {'isa':8} {'rows':>5} {'linear us':>10} {'quant us':>9} {'Gop/s':>8} "
            f"{'of peak':>8} {'GB/s':>7} {'of read':>8}"
        )
    for f in measure(isas, args.threads, args.rows or ROWS, args.seconds):
        if args.json:
            print(json.dumps(asdict(f)), flush=True)
        else:
            print(
                f"{f.layer:14} {f.format:10} {f.isa:8} {f.rows:5} {f.linear_us:10.1f} {f.quantise_us:9.1f} "
                f"{f.gops:8.1f} {f.of_fma_peak:8.2f} {f.weight_gb_s:7.1f} {f.of_read_bandwidth:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
