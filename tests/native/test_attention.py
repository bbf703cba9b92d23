import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato import _native
from native.replay import AttentionRig, Shape

SHAPES = [
    Shape(head_dim=64, heads=9, kv_heads=3),
    Shape(head_dim=64, heads=2, kv_heads=2, dtype="f32"),
    Shape(head_dim=128, heads=8, kv_heads=2, softcap=20.0),
    Shape(head_dim=256, heads=4, kv_heads=1, window=100, dtype="f32"),
    Shape(head_dim=80, heads=4, kv_heads=4, window=33, block_tokens=16),
    Shape(head_dim=72, heads=14, kv_heads=1, block_tokens=64),
    Shape(head_dim=64, heads=9, kv_heads=3, activations="int8"),
    Shape(head_dim=80, heads=4, kv_heads=4, window=33, block_tokens=16, softcap=20.0, activations="int8"),
    Shape(head_dim=256, heads=4, kv_heads=1, window=300, activations="int8"),
]


def random_qkv(shape: Shape, ids: int = 400, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ids, shape.cols)).astype(np.float32)


def assert_close(got: np.ndarray, wanted: np.ndarray, shape: Shape) -> None:
    """vdpbf16ps multiplies numbers of 8 significant bits, AMX of 16; the other kernels stay under 8e-6."""
    rounds = _native.isa() == "avx512bf16" and shape.activations == "int8" and shape.dtype == "f16"
    bound = 4e-2 if rounds else 4e-5 if _native.isa() == "amx" else 8e-6
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)
    assert np.abs(got - wanted).std() < bound / 8


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"dim{s.head_dim}x{s.heads}over{s.kv_heads}{s.dtype}w{s.window}{s.activations}"
)
def test_a_ragged_step_of_decodes_and_chunks_agrees_with_dense_attention(isa: str, shape: Shape) -> None:
    rng = np.random.default_rng(1)
    rig = AttentionRig(shape, random_qkv(shape))
    tokens = [rng.integers(0, 400, n) for n in (300, 131, 64, 7)]
    rig.step([(0, 0, tokens[0][:299]), (1, 0, tokens[1][:20]), (3, 0, tokens[3][:6])])
    # One decode far along, a chunk, a whole prompt, a decode near the start.
    chunks = [(0, 299, tokens[0][299:]), (1, 20, tokens[1][20:]), (2, 0, tokens[2]), (3, 6, tokens[3][6:])]
    for (sequence, start, _), out in zip(chunks, rig.step(chunks, threads=2), strict=True):
        assert_close(out, rig.expect(tokens[sequence], start), shape)


@pytest.mark.parametrize("chunk", [16, 32, 64, 96])
def test_a_window_of_32_is_exact_in_chunks_shorter_and_longer_than_itself(isa: str, chunk: int) -> None:
    shape = Shape(heads=2, kv_heads=1, window=32)
    rig = AttentionRig(shape, random_qkv(shape))
    tokens = np.random.default_rng(2).integers(0, 400, 320)
    outs = [rig.step([(0, at, tokens[at : at + chunk])])[0] for at in range(0, len(tokens), chunk)]
    assert_close(np.concatenate(outs), rig.expect(tokens), shape)


@pytest.mark.parametrize("window", [0, 1, 32, 63, 64, 65, 256])
def test_no_row_sees_a_key_too_many_or_too_few(isa: str, window: int) -> None:
    """With q = 0 all visible keys weigh the same, and v = position: the output is the mean of the visible positions,
    which moves by 1/2 if one end of the mask is off by one. Chunks end at boundaries of tiles, splits and blocks, and
    one before and after."""
    shape = Shape(head_dim=8, heads=2, kv_heads=1, window=window, dtype="f32")
    count = 600
    qkv = np.zeros((count, shape.cols), np.float32)
    qkv[:, -shape.head_dim :] = np.arange(count)[:, None]
    rig = AttentionRig(shape, qkv, sequences=1)
    ends = sorted(
        {boundary + d for boundary in (16, 32, 64, 128, 192, 256, 320, 512, 576) for d in (-1, 0, 1)} | {count}
    )
    first = np.maximum(0, np.arange(count) - window + 1) if window else np.zeros(count)
    wanted = (first + np.arange(count)) / 2
    start = 0
    for end in ends:
        (out,) = rig.step([(0, start, range(start, end))], threads=2)
        np.testing.assert_allclose(out, np.broadcast_to(wanted[start:end, None], out.shape), rtol=1e-5)
        start = end


@pytest.mark.parametrize("length", [69, 70])
@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_what_lies_in_a_block_behind_a_sequence_never_matters(isa: str, activations: str, length: int) -> None:
    """A block that another sequence had may hold anything, infinities too: nothing behind the end is read."""
    shape = Shape(heads=2, kv_heads=1, dtype="f16", activations=activations)
    qkv = random_qkv(shape)
    qkv[399] = np.inf
    rig = AttentionRig(shape, qkv, sequences=2)
    tokens = np.random.default_rng(3).integers(0, 399, length)
    (clean,) = rig.step([(1, 0, tokens)])
    rig.step([(1, 0, [399] * 160)])
    (reused,) = rig.step([(1, 0, tokens)])
    np.testing.assert_array_equal(reused, clean)


def test_the_cache_holds_the_rounded_keys_and_values(isa: str) -> None:
    for shape in (Shape(), Shape(dtype="f32", head_dim=72, block_tokens=16)):
        magnitudes = 10.0 ** np.random.default_rng(4).uniform(-9, 4, (400, 1))
        rig = AttentionRig(shape, (random_qkv(shape) * magnitudes).astype(np.float32))
        tokens = np.arange(100)
        rig.step([(2, 0, tokens)])
        wanted = rig.qkv[tokens].reshape(100, -1, shape.head_dim)[:, shape.heads :]
        if shape.dtype == "f16":
            wanted = wanted.astype(np.float16).astype(np.float32)
        k, v = rig.cached(2, 100)
        np.testing.assert_array_equal(k, wanted[:, : shape.kv_heads])
        np.testing.assert_array_equal(v, wanted[:, shape.kv_heads :])


def split_at(cuts: list[int], length: int) -> list[tuple[int, int]]:
    edges = [0, *sorted({cut for cut in cuts if cut < length}), length]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[3], SHAPES[4], *SHAPES[-3:]], ids=lambda s: f"dim{s.head_dim}{s.activations}"
)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_no_split_company_or_thread_count_changes_a_bit(shape: Shape, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 560), min_size=2, max_size=3), label="lengths")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    _native.set_isa(data.draw(st.sampled_from(_native.isas()[1:] or _native.isas()), label="isa"))
    qkv = random_qkv(shape)
    tokens = [rng.integers(0, 400, length) for length in lengths]
    alone = AttentionRig(shape, qkv)
    whole = [alone.step([(s, 0, tokens[s])])[0] for s in range(len(lengths))]

    cuts = st.lists(st.integers(1, 559), max_size=6)
    queues = [split_at(data.draw(cuts, label=f"cuts of {s}"), lengths[s]) for s in range(len(lengths))]
    mixed = AttentionRig(shape, qkv, seed=1)
    outs: list[list[np.ndarray]] = [[] for _ in lengths]
    while any(queues):
        ready = [s for s, queue in enumerate(queues) if queue]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True), label="step")
        spans = [queues[s].pop(0) for s in chosen]
        chunks = [(s, a, tokens[s][a:b]) for s, (a, b) in zip(chosen, spans, strict=True)]
        for s, out in zip(chosen, mixed.step(chunks, threads=data.draw(st.sampled_from([1, 2]))), strict=True):
            outs[s].append(out)
    for s, length in enumerate(lengths):
        np.testing.assert_array_equal(np.concatenate(outs[s]), whole[s])
        for got, wanted in zip(mixed.cached(s, length), alone.cached(s, length), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[2], SHAPES[6], SHAPES[8]], ids=lambda s: f"dim{s.head_dim}w{s.window}{s.activations}"
)
def test_a_short_chunk_far_along_has_the_bits_of_one_shot_however_its_work_is_cut(isa: str, shape: Shape) -> None:
    """On two threads a chunk of 5 to 60 rows has its few items cut at splits, beside a long chunk it has not."""
    length, sizes = 1300, (5, 8, 9, 13, 24, 33, 60)
    tokens = np.random.default_rng(7).integers(0, 400, length)
    rig = AttentionRig(shape, random_qkv(shape), max_tokens=length)
    (whole,) = rig.step([(0, 0, tokens)])
    for threads, beside in ((1, False), (2, False), (2, True)):
        rig.step([(1, 0, tokens[:1000])])
        at = 1000
        for size in sizes:
            chunks = [(1, at, tokens[at : at + size]), *([(2, 0, tokens[:600])] if beside else [])]
            out = rig.step(chunks, threads=threads)[0]
            np.testing.assert_array_equal(out, whole[at : at + size])
            at += size


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_decoding_one_by_one_gives_the_bits_of_one_shot(isa: str, activations: str) -> None:
    shape = Shape(heads=3, kv_heads=1, activations=activations)
    tokens = np.random.default_rng(5).integers(0, 400, 530)
    qkv = random_qkv(shape)
    rig = AttentionRig(shape, qkv)
    (whole,) = rig.step([(0, 0, tokens)], threads=2)
    rig.step([(1, 0, tokens[:500])])
    for at in range(500, 530):
        (row,) = rig.step([(1, at, tokens[at : at + 1])], threads=2)
        np.testing.assert_array_equal(row[0], whole[at])


def test_isas_differ_in_rounding_only() -> None:
    shape = Shape()
    tokens = np.random.default_rng(6).integers(0, 400, 200)
    outs = []
    before = _native.isa()
    for name in _native.isas():
        _native.set_isa(name)
        outs.append(AttentionRig(shape, random_qkv(shape)).step([(0, 0, tokens)])[0])
    _native.set_isa(before)
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=0, atol=4e-5)
