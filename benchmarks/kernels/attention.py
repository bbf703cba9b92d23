"""Speed of the attention kernel: chunks of 512 rows against the FMA peak, decodes against the read bandwidth.

    python benchmarks/kernels/attention.py [--json] [--isa avx2] [--threads 2] [--head-dim 64 --heads 9 --kv-heads 3]

Only the multiply-adds of visible (row, key) pairs count: 4 * head_dim flop a pair and head. Decode counts the bytes of
K and V that must be read. The minimum over several repetitions is taken: other work on the machine only adds time.
"""

import argparse
import json
import time

import numpy as np

from legato import _native

BLOCK_TOKENS = 32


def measure(
    args: argparse.Namespace, sequences: int, prefix: int, rows: int, *, repetitions: int, softcap: float = 0.0
) -> float:
    """Seconds of one attention call: `rows` new rows in each of `sequences` sequences of `prefix` positions."""
    heads, kv_heads, dim = args.heads, args.kv_heads, args.head_dim
    total = prefix + rows
    width = -(-total // BLOCK_TOKENS)
    kv = _native.KvCache(1, sequences * width, BLOCK_TOKENS, kv_heads, dim, args.kv_dtype)
    chunk = max(512, sequences * rows)
    program = _native.Program(
        kv,
        max_rows=chunk,
        max_logit_rows=1,
        max_seqs=max(sequences, 1),
        activations=args.activations,
        max_threads=args.threads,
    )
    table = np.random.default_rng(0).standard_normal((64, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    cos, sin = np.ones((total, dim // 2), np.float32), np.zeros((total, dim // 2), np.float32)
    x = program.embed(_native.Matrix.pack_dense(table, dtype="f32"))
    q = program.rope_kv(x, 0, cos, sin, interleaved=False, heads=heads)
    program.seal(program.attention(q, 0, heads=heads, scale=dim**-0.5, softcap=softcap))
    tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)

    def run(first: int, count: int, which: slice) -> None:
        used = tables[which]
        ids = np.arange(count * len(used), dtype=np.int32) % 64
        positions = np.tile(np.arange(first, first + count, dtype=np.int32), len(used))
        starts = np.arange(len(used) + 1, dtype=np.int32) * count
        program.run(ids, positions, starts, used, np.zeros(1, np.int32), args.threads)

    for sequence in range(sequences):
        for first in range(0, prefix, 512):
            run(first, min(512, prefix - first), slice(sequence, sequence + 1))
    best = float("inf")
    program.set_profile(True)
    for _ in range(repetitions):
        before = program.profile().get("attention", 0.0)
        run(prefix, rows, slice(None))
        best = min(best, program.profile()["attention"] - before)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON line a measurement")
    parser.add_argument("--isa", default=_native.isa(), choices=_native.isas())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--activations", default="int8", choices=["int8", "f32"], help="int8: fp16 attention may be rounded to bf16"
    )
    parser.add_argument("--kv-dtype", default="f16", choices=["f16", "f32"])
    parser.add_argument("--prefixes", type=int, nargs="*", default=[0, 2048, 8192])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 2048, 8192])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--repetitions", type=int, default=9)
    args = parser.parse_args()
    _native.set_isa(args.isa)
    peak = _native.fma_peak(0.05) * args.threads
    stream = np.ones(256 << 20, np.uint8)
    bandwidth = max(_native.read_bandwidth(stream) for _ in range(3))
    del stream

    def report(kind: str, seconds: float, **fields: float) -> None:
        line = {"kind": kind, "isa": args.isa, "threads": args.threads, "head_dim": args.head_dim, "ms": seconds * 1e3}
        line |= fields
        if args.json:
            print(json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%S"), **line}))
        else:
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))

    for prefix in args.prefixes:
        seconds = measure(args, 1, prefix, 512, repetitions=args.repetitions)
        pairs = sum(range(prefix + 1, prefix + 513))
        rate = 4 * args.head_dim * args.heads * pairs / seconds
        report("chunk 512", seconds, prefix=prefix, gflops=rate / 1e9, of_peak=rate / peak)
    for context in args.contexts:
        for batch in args.batches:
            seconds = measure(args, batch, context - 1, 1, repetitions=2 * args.repetitions)
            element = 2 if args.kv_dtype == "f16" else 4
            rate = 2 * batch * context * args.kv_heads * args.head_dim * element / seconds
            report("decode", seconds, context=context, batch=batch, gbytes_s=rate / 1e9, of_one_thread=rate / bandwidth)


if __name__ == "__main__":
    main()
