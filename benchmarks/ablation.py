"""What chunks and company do to logits and text once the linear layers come from a vendor's matrix library.

    python benchmarks/ablation.py [--model smollm2-135m] [--prompts 16] [--tokens 100] [--json]

Prompts of real text are continued greedily, each by itself and prefilled in one step. Then the same tokens are computed
on other schedules, and all logits are compared, as bits, with those of the first time. Tokens are given there, not
chosen again: up to the first position with another most likely token the two are the same computation, so a text left
to itself diverges at just that position.

The decoder is the same everywhere. Its linear layers are
  row by row   NumPy, each row multiplied by itself: the control. No bit may differ, so the rest is row-invariant
  vendor fp32  NumPy, one matrix product for all rows of a step, on dequantised weights
  vendor bf16  the same, with weights and all that goes into and comes out of a linear layer rounded to bf16; sums in
               fp32. How engines with 16-bit weights compute
  legato       the native kernels, in fp32 and with the default int8 activations
A first table shows the cause: one product of this model's shapes, by number of rows. OPENBLAS_NUM_THREADS=1 before the
command shows what threads have to do with it.

Takes some six minutes on two idle cores, 1 GB for the weights and `prompts * tokens * vocabulary * 4` bytes for logits
(0.3 GB by default).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.exec.batch import Batch
from legato.exec.decoder import DecoderWeights, forward
from legato.exec.kv import KvLayout
from legato.exec.model import default_threads, load_model
from legato.exec.ops import FloatArray
from legato.exec.reference.backend import reference_weights
from legato.exec.reference.kv import ReferenceKv
from legato.exec.reference.ops import ReferenceOps, Rows
from legato.exec.rope import rope_table
from legato.exec.spec import ModelSpec
from legato.exec.weights.checkpoint import open_checkpoint
from legato.models.pull import resolve

PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "exactness" / "prompts.json"
PROMPT_TOKENS = (97, 161, 64, 110, 201, 33, 72, 50)
BLOCK_TOKENS, COMPANY = 32, 8
WHOLE = 1 << 30
IRREGULAR = (37, 1, 90, 14, 63, 5)
# The control multiplies row by row and takes ten times as long: it stops after the first few.
CONTROL_PROMPTS, CONTROL_TOKENS = 4, 16

Run = Callable[[Batch], FloatArray]


@dataclass(frozen=True, slots=True)
class Schedule:
    """`chunk_tokens`: sizes of a prompt's pieces, over and over. `together`: eight prompts share the steps."""

    name: str
    chunk_tokens: tuple[int, ...]
    together: bool = False


ALONE = Schedule("alone, prompt in one step", (WHOLE,))
SCHEDULES = (
    Schedule("chunks of 64", (64,)),
    Schedule("irregular chunks", IRREGULAR),
    Schedule("one step, beside 7 others", (WHOLE,), together=True),
    Schedule("irregular chunks, beside 7 others", IRREGULAR, together=True),
)


class VendorOps(ReferenceOps):
    """Linear layers as one matrix product for all rows of the step; everything else row by row, as in the oracle."""

    def linear(
        self, x: Rows, weights: Sequence[Rows], bias: FloatArray | None = None, residual: Rows | None = None
    ) -> Rows:
        """See `Ops.linear`; not row-invariant."""
        y = np.concatenate([x @ weight.T for weight in weights], axis=1)
        if bias is not None:
            y = y + bias
        return y if residual is None else y + residual


class Bf16VendorOps(VendorOps):
    """bf16 in, bf16 out, sums in fp32: the products of two bf16 are exact in fp32. Weights are rounded at load."""

    def linear(
        self, x: Rows, weights: Sequence[Rows], bias: FloatArray | None = None, residual: Rows | None = None
    ) -> Rows:
        """See `Ops.linear`; not row-invariant."""
        y = round_to_bf16(super().linear(round_to_bf16(x), weights, bias))
        return y if residual is None else round_to_bf16(y + residual)


def round_to_bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest values with eight significant bits, ties to even, still as float32."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass
class Text:
    """One prompt and its continuation: `known` tokens, the first `computed` of which have keys and values."""

    index: int
    known: list[int]
    prompt_tokens: int
    blocks: list[int]
    chunk_tokens: itertools.cycle[int]
    computed: int = 0


def run_schedule(
    run: Run,
    prompts: list[list[int]],
    tokens: int,
    schedule: Schedule,
    next_token: Callable[[int, int, FloatArray], int],
) -> None:
    """Computes `tokens` tokens after each prompt. `next_token(prompt, position, logits)` is told, and says, each."""
    width = blocks_for(prompts, tokens)
    size = COMPANY if schedule.together else 1
    for first in range(0, len(prompts), size):
        group = []
        for place, prompt in enumerate(prompts[first : first + size]):
            turn = place % len(schedule.chunk_tokens)
            sizes = itertools.cycle(schedule.chunk_tokens[turn:] + schedule.chunk_tokens[:turn])
            blocks = list(range(place * width, (place + 1) * width))
            group.append(Text(first + place, list(prompt), len(prompt), blocks, sizes))
        while running := [text for text in group if len(text.known) < text.prompt_tokens + tokens]:
            work = [(text, min(next(text.chunk_tokens), len(text.known) - text.computed)) for text in running]
            batch, sampled = batch_of(work)
            logits = run(batch)
            for text, count in work:
                text.computed += count
            for text, row in zip(sampled, logits, strict=True):
                text.known.append(next_token(text.index, len(text.known) - text.prompt_tokens, row))


def batch_of(work: list[tuple[Text, int]]) -> tuple[Batch, list[Text]]:
    """The rows of a step, and the texts whose last known token is among them: these need logits."""
    counts = [count for _, count in work]
    stops = np.cumsum(counts)
    batch = Batch(
        tokens=np.array([t for text, n in work for t in text.known[text.computed : text.computed + n]], np.int32),
        positions=np.concatenate([np.arange(text.computed, text.computed + n) for text, n in work]).astype(np.int32),
        seq_row_starts=np.concatenate([[0], stops]).astype(np.int32),
        block_tables=np.array([text.blocks for text, _ in work], np.int32),
        logit_rows=np.array(
            [stop - 1 for (text, n), stop in zip(work, stops, strict=True) if text.computed + n == len(text.known)],
            np.int32,
        ),
    )
    return batch, [text for text, n in work if text.computed + n == len(text.known)]


def blocks_for(prompts: list[list[int]], tokens: int) -> int:
    """Blocks of KV that the longest text takes."""
    return -(-(max(map(len, prompts)) + tokens) // BLOCK_TOKENS)


@dataclass
class Difference:
    """One schedule against `ALONE`, over all positions of all texts. `same_tokens`: of each text, None: all."""

    linear: str
    schedule: str
    logits: int = 0
    other_logits: int = 0
    max_abs: float = 0.0
    positions: int = 0
    other_tokens: int = 0
    same_tokens: list[int | None] = field(default_factory=list)

    def add(self, text: int, position: int, found: FloatArray, alone: FloatArray) -> None:
        """Counts the logits of one position."""
        self.positions += 1
        self.logits += found.size
        self.other_logits += int((found.view(np.uint32) != alone.view(np.uint32)).sum())
        self.max_abs = max(self.max_abs, float(np.abs(found - alone).max()))
        if found.argmax() != alone.argmax():
            self.other_tokens += 1
            if self.same_tokens[text] is None:
                self.same_tokens[text] = position

    def diverged(self, within: int) -> int:
        """Texts of which one of the first `within` tokens is another one."""
        return sum(same is not None and same < within for same in self.same_tokens)

    def median_same_tokens(self) -> float | None:
        """Tokens that are the same before a text diverges: median over those that do, None if none does."""
        diverging = [same for same in self.same_tokens if same is not None]
        return statistics.median(diverging) if diverging else None


def differences(
    linear: str, run: Run, prompts: list[list[int]], tokens: int, vocab: int, schedules: Sequence[Schedule] = SCHEDULES
) -> list[Difference]:
    """Each schedule against every prompt alone and in one step, computed by the same `run`."""
    alone = np.empty((len(prompts), tokens, vocab), np.float32)

    def choose(text: int, position: int, logits: FloatArray) -> int:
        alone[text, position] = logits
        return int(logits.argmax())

    run_schedule(run, prompts, tokens, ALONE, choose)
    found = []
    for schedule in schedules:
        difference = Difference(linear, schedule.name, same_tokens=[None] * len(prompts))

        def compare(text: int, position: int, logits: FloatArray, difference: Difference = difference) -> int:
            difference.add(text, position, logits, alone[text, position])
            return int(alone[text, position].argmax())

        run_schedule(run, prompts, tokens, schedule, compare)
        found.append(difference)
    return found


def products(shapes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Share of a product's outputs whose bits are others than in a product of one row, and of 512, by its rows.

    `shapes`: (out, in) of the matrices, random and fp32; shares are over all of them.
    """
    counts, most = (2, 3, 8, 37, 128, 512), 512
    other = {rows: np.zeros(3, np.int64) for rows in counts}
    draw = np.random.default_rng(0)
    for out, inputs in shapes:
        weight = draw.standard_normal((out, inputs), np.float32)
        x = draw.standard_normal((most, inputs), np.float32)
        one_by_one = np.concatenate([x[row : row + 1] @ weight.T for row in range(most)])
        together = x @ weight.T
        for rows in counts:
            y = x[:rows] @ weight.T
            other[rows] += [(y != one_by_one[:rows]).sum(), (y != together[:rows]).sum(), y.size]
    return [
        {
            "rows": rows,
            "other_than_alone": round(float(alone / size), 4),
            "other_than_512": round(float(in_512 / size), 4),
        }
        for rows, (alone, in_512, size) in other.items()
    ]


def real_prompts(count: int) -> list[list[int]]:
    """`count` pieces of prose, code and many scripts, as SmolLM2's token ids, of 33 to 201 tokens."""
    sources: dict[str, list[int]] = json.loads(PROMPTS.read_text())
    prompts = []
    for number, (ids, length) in enumerate(
        zip(itertools.cycle(sources.values()), itertools.islice(itertools.cycle(PROMPT_TOKENS), count))
    ):
        start = number // len(sources) * 317 % (len(ids) - length)
        prompts.append(ids[start : start + length])
    return prompts


def numpy_run(ops: type[ReferenceOps], spec: ModelSpec, weights: DecoderWeights[Rows], kv: ReferenceKv) -> Run:
    """The decoder over `ops`."""
    return lambda batch: np.asarray(forward(ops(kv, batch), spec, weights), np.float32)


def measure(path: Path, prompts: list[list[int]], tokens: int) -> list[Difference]:
    """All linear layers on all schedules; each printed as it is done."""
    checkpoint = open_checkpoint(path)
    spec, blocks = checkpoint.spec, COMPANY * blocks_for(prompts, tokens)
    ropes = tuple(rope_table(rope, blocks * BLOCK_TOKENS // COMPANY) for rope in spec.ropes)
    found: list[Difference] = []

    def add(linear: str, run: Run, prompts: list[list[int]] = prompts, tokens: int = tokens) -> None:
        started = time.perf_counter()
        new = differences(linear, run, prompts, tokens, spec.vocab)
        print(*map(table_row, new), sep="\n", flush=True)
        print(f"{linear}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        found.extend(new)

    def tensor(name: str) -> Rows:
        return checkpoint.tensor(name).dequantise() if len(checkpoint.shape(name)) == 2 else checkpoint.vector(name)

    def bf16_tensor(name: str) -> Rows:
        return round_to_bf16(tensor(name)) if len(checkpoint.shape(name)) == 2 else tensor(name)

    kv = ReferenceKv(KvLayout.of(spec, block_tokens=BLOCK_TOKENS, dtype="f32"), blocks)
    print(TABLE_HEAD)
    weights = reference_weights(spec, tensor, ropes)
    control = numpy_run(ReferenceOps, spec, weights, kv)
    add("row by row", control, prompts[:CONTROL_PROMPTS], min(tokens, CONTROL_TOKENS))
    add("vendor fp32", numpy_run(VendorOps, spec, weights, kv))
    weights = reference_weights(spec, bf16_tensor, ropes)
    add("vendor bf16", numpy_run(Bf16VendorOps, spec, weights, kv))
    del weights, kv
    for name, options in (("legato fp32", {"activations": "f32", "kv_dtype": "f32"}), ("legato int8", {})):
        model = load_model(
            path,
            max_num_batched_tokens=COMPANY * max(map(len, prompts)),
            max_num_seqs=COMPANY,
            kv_tokens=blocks * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            **options,  # type: ignore[arg-type]
        )
        add(name, model.backend.run)
    return found


TABLE_HEAD = (
    f"\n{'linear layers':14}{'schedule':36}{'logits with other bits':>24}{'largest':>10}{'other tokens':>16}"
    f"{'texts diverged':>16}{'after':>9}\n"
    f"{'':14}{'':36}{'':>24}{'change':>10}{'of positions':>16}{'in 50 / in all':>16}{'(median)':>9}"
)


def table_row(row: Difference) -> str:
    """One line under `TABLE_HEAD`."""
    texts = len(row.same_tokens)
    median = row.median_same_tokens()
    return (
        f"{row.linear:14}{row.schedule:36}{row.other_logits / row.logits:>24.2%}{row.max_abs:>10.2g}"
        f"{f'{row.other_tokens} of {row.positions}':>16}"
        f"{f'{row.diverged(50)} / {row.diverged(WHOLE)} of {texts}':>16}{'-' if median is None else f'{median:.0f}':>9}"
    )


def blas() -> str:
    """Name and version of the library NumPy multiplies with."""
    found = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name')} {found.get('version')}"


def main() -> None:
    """Measure, print both tables, and a JSON line if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="SmolLM2 in any size: the prompts are its token ids")
    parser.add_argument("--prompts", type=int, default=16, help="texts; beside each other in eights (default 16)")
    parser.add_argument("--tokens", type=int, default=100, help="of each text after its prompt (default 100)")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end")
    options = parser.parse_args()
    if options.prompts < 1 or options.tokens < 1:
        parser.error("--prompts and --tokens are at least 1")
    path = resolve(options.model)
    spec = open_checkpoint(path).spec
    print(f"NumPy {np.__version__} on {blas()}, {default_threads()} cores\n")
    print("one product: outputs whose bits are others than in a product of")
    print(f"{'rows':>6}{'1 row':>10}{'512 rows':>10}")
    shapes = [(spec.q_width, spec.hidden), (spec.kv_width, spec.hidden), (spec.ffn, spec.hidden)]
    table = products([*shapes, (spec.hidden, spec.ffn)])
    for row in table:
        print(f"{row['rows']:>6}{row['other_than_alone']:>10.1%}{row['other_than_512']:>10.1%}")
    found = measure(path, real_prompts(options.prompts), options.tokens)
    if options.json:
        document = {
            "model": path.name,
            "numpy": np.__version__,
            "blas": blas(),
            "threads": default_threads(),
            "tokens": options.tokens,
            "products": table,
            "schedules": [asdict(row) for row in found],
        }
        print(json.dumps(document))


if __name__ == "__main__":
    main()
