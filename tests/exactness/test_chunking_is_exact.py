"""A prompt in any chunks, beside any company, on one thread or two: the same bits as alone and in one pass.

Compared are logits at marked positions, the last one of every prompt among them, and the keys and values of all layers
at every position. The text is the project's own prose and code and a page of many scripts (`prompts.json`, as ids).
An example is a batch of one to four prompts, each split for itself: the default run has some 200 splits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from legato.exec.batch import Batch
from legato.exec.ops import FloatArray

_native = pytest.importorskip("legato._native")

PROMPTS: dict[str, list[int]] = json.loads((Path(__file__).parent / "prompts.json").read_text())
BLOCK_TOKENS, POOL_TOKENS, MAX_ROWS = 32, 16_384, 2_048
# Lengths around tiles (64), blocks (32), splits (256) and chunks, and some that are none of these.
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 79, 96, 100, 127, 128, 129, 191, 193, 255, 256, 257, 300,
           320, 400, 511, 512, 513, 600, 700, 1000, 1024, 1025, 1137, 1500, 1999, 2000]  # fmt: skip
MARKS = np.array(LENGTHS) - 1
seeds = st.integers(0, 2**32 - 1)
# Half a minute on two idle cores; threads that wait for cores that others keep busy can take ten times that.
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Alone:
    """What one whole prompt gives by itself in one pass: logits by marked position, keys and values by layer."""

    logits: dict[int, bytes]
    kv: list[tuple[FloatArray, FloatArray]]


@dataclass
class Sequence:
    """One prompt on its way: `target` of its tokens in `blocks`, `computed` so far."""

    name: str
    target: int
    blocks: list[int]
    computed: int = 0


class Model:
    """A backend and the oracle's answers, one for each prompt."""

    def __init__(self, path: Path, **options: str) -> None:
        from legato.exec.model import load_model

        loaded = load_model(
            path,
            max_num_batched_tokens=MAX_ROWS,
            max_num_seqs=8,
            max_logit_rows=64,
            kv_tokens=POOL_TOKENS,
            block_tokens=BLOCK_TOKENS,
            max_model_len=2_048,
            threads=2,
            **options,  # type: ignore[arg-type]
        )
        self.backend, self.layers, self.vocab = loaded.backend, len(loaded.spec.layers), loaded.spec.vocab
        self.alone = {name: self._alone(name) for name in PROMPTS}

    def _alone(self, name: str) -> Alone:
        length = len(PROMPTS[name])
        sequence = Sequence(name, length, list(range(-(-length // BLOCK_TOKENS))))
        return Alone(self.step([(sequence, length)]), self.read(sequence))

    def step(self, work: list[tuple[Sequence, int]]) -> dict[int, bytes]:
        """Computes the next `count` tokens of each sequence; logits of the marked rows of the first one."""
        batch, marks = batch_of(work)
        logits = self.backend.run(batch)
        for sequence, count in work:
            sequence.computed += count
        return {position: logits[row].tobytes() for row, position in enumerate(marks)}

    def read(self, sequence: Sequence) -> list[tuple[FloatArray, FloatArray]]:
        """Keys and values of its computed positions, layer by layer."""
        layers = []
        for layer in range(self.layers):
            parts = [self.backend.kv.read(layer, block) for block in sequence.blocks]
            keys, values = (np.concatenate(part)[: sequence.computed] for part in zip(*parts, strict=True))
            layers.append((keys, values))
        return layers

    def check(self, seed: int, lengths: list[int], small_chunks: bool) -> None:
        """Splits prompts of about these lengths at random, in random company, and compares every bit."""
        rng = random.Random(seed)
        note(f"split seed {seed}")
        free = list(range(POOL_TOKENS // BLOCK_TOKENS))
        rng.shuffle(free)
        sequences = []
        for _ in range(rng.randint(1, 4)):
            name, target = rng.choice(list(PROMPTS)), rng.choice(lengths)
            target = min(target, 600 if name == "scripts" else target)
            sequences.append(Sequence(name, target, [free.pop() for _ in range(-(-target // BLOCK_TOKENS))]))
        seen: dict[int, dict[int, bytes]] = {i: {} for i in range(len(sequences))}
        while unfinished := [i for i, s in enumerate(sequences) if s.computed < s.target]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            widest = rng.choice([3, 20, 70] if small_chunks else [70, 200, 512])
            work = [(sequences[i], min(rng.randint(1, widest), sequences[i].target - sequences[i].computed))
                    for i in chosen]  # fmt: skip
            # Two threads less often for small steps: on a busy machine they wait for each other at some 300 barriers.
            self.backend.threads = rng.choice([1] * 11 + [2] if small_chunks else [1, 2])
            seen[chosen[0]] |= self.step(work)
        for i, sequence in enumerate(sequences):
            alone = self.alone[sequence.name]
            for position, found in seen[i].items():
                assert found == alone.logits[position], f"seed {seed}: logits of {sequence.name} at {position}"
            for layer, (found_kv, kept) in enumerate(zip(self.read(sequence), alone.kv, strict=True)):
                for what, one, other in zip(("keys", "values"), found_kv, kept, strict=True):
                    same = one.tobytes() == other[: sequence.target].tobytes()
                    assert same, f"seed {seed}: {what} of {sequence.name}[:{sequence.target}] in layer {layer}"


def batch_of(work: list[tuple[Sequence, int]]) -> tuple[Batch, list[int]]:
    """The rows of a step, and the marked positions among those of its first sequence, whose logits it asks for."""
    starts = [s.computed for s, _ in work]
    counts = [count for _, count in work]
    row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables = np.zeros((len(work), max(len(s.blocks) for s, _ in work)), np.int32)
    for row, (s, _) in enumerate(work):
        tables[row, : len(s.blocks)] = s.blocks
    marks = MARKS[(starts[0] <= MARKS) & (starts[0] + counts[0] > MARKS)]
    batch = Batch(
        tokens=np.array([t for s, c in work for t in PROMPTS[s.name][s.computed : s.computed + c]], np.int32),
        positions=np.concatenate([np.arange(a, a + c) for a, c in zip(starts, counts, strict=True)]).astype(np.int32),
        seq_row_starts=row_starts,
        block_tables=tables,
        logit_rows=(marks - starts[0]).astype(np.int32),
    )
    return batch, marks.tolist()


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Model:
    return Model(smollm2_path)


SHORT = [length for length in LENGTHS if length <= 130]


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_short_prompts_in_small_chunks(smollm2: Model, seed: int) -> None:
    smollm2.check(seed, SHORT, small_chunks=True)


@settings(max_examples=8, deadline=None)
@given(seeds)
def test_prompts_of_up_to_2000_tokens(smollm2: Model, seed: int) -> None:
    smollm2.check(seed, LENGTHS, small_chunks=False)


def test_one_token_at_a_time(smollm2: Model) -> None:
    smollm2.backend.threads = 1
    sequence = Sequence("code", 300, list(range(200, 210)))
    seen: dict[int, bytes] = {}
    while sequence.computed < sequence.target:
        seen |= smollm2.step([(sequence, 1)])
    assert seen == {p: v for p, v in smollm2.alone["code"].logits.items() if p < 300}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(seeds)
def test_200_splits_of_prompts_of_up_to_2000_tokens(smollm2: Model, seed: int) -> None:
    smollm2.check(seed, LENGTHS, small_chunks=seed % 4 == 0)


@pytest.fixture(scope="module")
def bf16(smollm2_path: Path) -> Model:
    if _native.isa() != "amx":
        pytest.skip("bf16 activations need AMX")
    return Model(smollm2_path, activations="bf16")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seeds)
def test_bf16_activations(bf16: Model, seed: int) -> None:
    bf16.check(seed, LENGTHS, small_chunks=seed % 2 == 0)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Model:
    return Model(gemma3_path)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seeds)
def test_gemma_with_its_windows(gemma3: Model, seed: int) -> None:
    gemma3.check(seed, LENGTHS, small_chunks=False)


@pytest.fixture(scope="module", params=_native.isas())
def exact_arithmetic(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Model]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield Model(smollm2_path, activations="f32", kv_dtype="f32")
    _native.set_isa(before)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(seeds)
def test_fp32_activations_and_cache_on_every_instruction_set(exact_arithmetic: Model, seed: int) -> None:
    exact_arithmetic.check(seed, SHORT, small_chunks=True)
