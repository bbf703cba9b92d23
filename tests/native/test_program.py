import gc

import numpy as np
import pytest

from legato import _native
from native.replay import I32, AttentionRig, Shape, identity_rope

VOCABULARY, HIDDEN, DIM, HEADS, KV_HEADS, FFN = 96, 64, 16, 4, 2, 128


def weight(rows: int, cols: int, seed: int, quantised: bool = False) -> _native.Matrix:
    rng = np.random.default_rng(seed)
    if not quantised:
        return _native.Matrix.pack_dense(
            (rng.standard_normal((rows, cols)) / cols**0.5).astype(np.float32), dtype="f32"
        )
    q = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.03, (rows, cols // 32)).astype(np.float16).astype(np.float32)
    return _native.Matrix.pack_grouped(q, scale, None, zero=8, bits=4, group=32)


def tiny_decoder(
    layers: int, *, quantised: bool = False, activations: str = "f32", max_rows: int = 64, kv=None
) -> _native.Program:
    """A small decoder of the usual form, on random weights."""
    kv = kv or _native.KvCache(layers, 16, 16, KV_HEADS, DIM, "f16")
    program = _native.Program(
        kv, max_rows=max_rows, max_logit_rows=8, max_seqs=4, activations=activations, max_threads=2
    )
    cos, sin = identity_rope(64, DIM)
    norm = np.ones(HIDDEN, np.float32)
    x = program.embed(weight(VOCABULARY, HIDDEN, 0))
    for layer in range(layers):
        seeds = iter(range(10 * layer + 1, 10 * layer + 11))
        h = program.rms_norm(x, norm, 1e-5)
        sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        qkv = program.linear(h, [weight(size, HIDDEN, next(seeds), quantised) for size in sizes])
        q = program.rope_kv(qkv, layer, cos, sin, interleaved=True, heads=HEADS)
        a = program.attention(q, layer, heads=HEADS, scale=0.25)
        x = program.linear(a, [weight(HIDDEN, HEADS * DIM, next(seeds), quantised)], residual=x)
        h = program.rms_norm(x, norm, 1e-5)
        gate_up = program.linear(h, [weight(FFN, HIDDEN, next(seeds), quantised) for _ in range(2)])
        x = program.linear(program.gated(gate_up, "silu"), [weight(HIDDEN, FFN, next(seeds), quantised)], residual=x)
    x = program.rms_norm(program.select(x), norm, 1e-5)
    program.seal(program.linear(x, [weight(VOCABULARY, HIDDEN, 0)]))
    return program


def step(program: _native.Program, **changed):
    """A step of two sequences, 3 rows and 1 row, that is fine unless `changed` makes it bad."""
    arguments = {
        "tokens": np.array([1, 2, 3, 4], I32),
        "positions": np.array([0, 1, 2, 0], I32),
        "seq_row_starts": np.array([0, 3, 4], I32),
        "block_tables": np.array([[3, 1, 0], [2, 4, 5]], I32),
        "logit_rows": np.array([2, 3], I32),
        "threads": 1,
    }
    return program.run(**(arguments | changed))


BAD = {
    "token below 0": ({"tokens": np.array([1, 2, -3, 4], I32)}, "token id -3"),
    "token too large": ({"tokens": np.array([1, 2, VOCABULARY, 4], I32)}, "token id 96"),
    "lengths differ": ({"tokens": np.array([1, 2, 3], I32)}, "differ in length"),
    "position below 0": ({"positions": np.array([-1, 0, 1, 0], I32)}, "position -1"),
    "position beyond the block table": ({"positions": np.array([0, 1, 2, 48], I32)}, "position 48"),
    "positions not consecutive": ({"positions": np.array([0, 2, 3, 0], I32)}, "not consecutive"),
    "block below 0": ({"block_tables": np.array([[-1, 1, 0], [2, 4, 5]], I32)}, "KV block -1"),
    "block too large": ({"block_tables": np.array([[3, 1, 0], [16, 4, 5]], I32)}, "KV block 16"),
    "tables for other sequences": ({"block_tables": np.array([[3, 1, 0]], I32)}, "one row a sequence"),
    "empty sequence": ({"seq_row_starts": np.array([0, 0, 4], I32)}, "no rows"),
    "starts go back": ({"seq_row_starts": np.array([0, 5, 4], I32)}, "no rows"),
    "starts end early": ({"seq_row_starts": np.array([0, 1, 3], I32)}, "seq_row_starts"),
    "no sequence": ({"seq_row_starts": np.array([0], I32)}, "seq_row_starts"),
    "logit row too large": ({"logit_rows": np.array([4], I32)}, "logit row 4"),
    "too many logit rows": ({"logit_rows": np.zeros(9, I32)}, "9 logit rows"),
    "no threads": ({"threads": 0}, "threads"),
    "too many threads": ({"threads": 3}, "threads"),
    "no rows": (
        {"tokens": np.zeros(0, I32), "positions": np.zeros(0, I32), "seq_row_starts": np.zeros(3, I32)},
        "0 rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_step_is_refused_and_nothing_is_written(name: str) -> None:
    changed, message = BAD[name]
    kv = _native.KvCache(1, 16, 16, KV_HEADS, DIM, "f16")
    program = tiny_decoder(1, kv=kv)
    with pytest.raises(ValueError, match=message):
        step(program, **changed)
    assert all(not kv.read(0, block)[0].any() for block in range(16))
    assert np.isfinite(step(program)).all()


def test_arrays_of_another_dtype_or_layout_are_type_errors() -> None:
    program = tiny_decoder(1)
    for changed in (
        {"tokens": np.array([1, 2, 3, 4], np.int64)},
        {"positions": np.array([0.0, 1.0, 2.0, 0.0])},
        {"block_tables": np.zeros((4, 4), I32)[::2, ::2]},
    ):
        with pytest.raises(TypeError):
            step(program, **changed)


def test_more_rows_than_planned_for_are_refused() -> None:
    program = tiny_decoder(1, max_rows=8)
    ids = np.arange(9, dtype=I32)
    with pytest.raises(ValueError, match="9 rows"):
        program.run(ids, ids, np.array([0, 9], I32), np.zeros((1, 1), I32), np.zeros(0, I32))


def test_recording_refuses_shapes_that_do_not_fit() -> None:
    kv = _native.KvCache(1, 4, 16, KV_HEADS, DIM, "f16")
    program = _native.Program(kv, max_rows=8, max_logit_rows=8, max_seqs=1)
    cos, sin = identity_rope(64, DIM)
    x = program.embed(weight(VOCABULARY, HIDDEN, 0))
    picked = program.select(x)
    refused = [
        lambda: program.rms_norm(x, np.ones(HIDDEN + 1, np.float32), 1e-5),
        lambda: program.rms_norm(99, np.ones(HIDDEN, np.float32), 1e-5),
        lambda: program.linear(x, []),
        lambda: program.linear(x, [weight(8, HIDDEN + 1, 0)]),
        lambda: program.linear(x, [weight(HIDDEN, HIDDEN, 0)], bias=np.ones(3, np.float32)),
        lambda: program.linear(x, [weight(8, HIDDEN, 0)], residual=x),
        lambda: program.linear(x, [weight(HIDDEN, HIDDEN, 0)], residual=picked),
        lambda: program.rope_kv(x, 0, cos, sin, interleaved=True, heads=HEADS),
        lambda: program.attention(x, 1, heads=HEADS, scale=1.0),
        lambda: program.attention(x, 0, heads=3, scale=1.0),
        lambda: program.attention(x, 0, heads=HEADS, scale=1.0, window=-1),
        lambda: program.attention(picked, 0, heads=HEADS, scale=1.0),
        lambda: program.gated(x, "relu"),
        lambda: program.add(x, picked),
        lambda: program.select(picked),
        lambda: program.softcap(x, 0.0),
        lambda: program.scratch_nbytes,
        lambda: step(program),
    ]
    for attempt in refused:
        with pytest.raises(ValueError):
            attempt()
    program.seal(x)
    with pytest.raises(ValueError, match="sealed"):
        program.add(x, x)


@pytest.mark.parametrize(
    "arguments", [(0, 4, 16, 1, 8), (1, 0, 16, 1, 8), (1, 4, 24, 1, 8), (1, 4, 16, 0, 8), (1, 4, 16, 1, 12)]
)
def test_a_cache_of_impossible_shape_is_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        _native.KvCache(*arguments)
    with pytest.raises(ValueError):
        _native.KvCache.predict_nbytes(*arguments)


def test_the_cache_takes_what_was_predicted() -> None:
    assert _native.KvCache.predict_nbytes(2, 4, 32, 3, 64, "f16") == 2 * 4 * 32 * 3 * 64 * 2 * 2
    kv = _native.KvCache(2, 4, 32, 3, 64, "f32")
    assert kv.nbytes == _native.KvCache.predict_nbytes(2, 4, 32, 3, 64, "f32") == 2 * 4 * 32 * 3 * 64 * 2 * 4
    with pytest.raises(ValueError):
        kv.read(2, 0)
    with pytest.raises(ValueError):
        kv.read(0, 4)


def test_twelve_layers_need_no_more_scratch_than_two() -> None:
    assert tiny_decoder(12).scratch_nbytes == tiny_decoder(2).scratch_nbytes


def test_a_step_without_logit_rows_writes_the_cache_and_returns_nothing(isa: str) -> None:
    kv = _native.KvCache(1, 16, 16, KV_HEADS, DIM, "f16")
    program = tiny_decoder(1, kv=kv)
    assert step(program, logit_rows=np.zeros(0, I32)).shape == (0, VOCABULARY)
    assert kv.read(0, 3)[0][:3].all()


def test_values_that_are_needed_later_are_not_written_over(isa: str) -> None:
    """x is a residual, an addend and a norm's input before its last use: no in-place operation may touch it earlier."""
    kv = _native.KvCache(1, 4, 16, 1, 8, "f32")
    program = _native.Program(kv, max_rows=4, max_logit_rows=4, max_seqs=1, activations="f32", max_threads=1)
    table = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    eye = _native.Matrix.pack_dense(np.eye(32, dtype=np.float32), dtype="f32")
    x = program.embed(_native.Matrix.pack_dense(table, dtype="f32"))
    doubled = program.linear(x, [eye], residual=x)
    capped = program.softcap(x, 1.0)
    normed = program.rms_norm(x, np.ones(32, np.float32), 0.0)
    total = program.add(program.add(doubled, capped), program.add(normed, x))
    program.seal(program.linear(total, [eye], bias=np.arange(32, dtype=np.float32), residual=total))
    ids = np.arange(4, dtype=I32)
    got = program.run(ids, ids, np.array([0, 4], I32), np.zeros((1, 1), I32), ids)
    wide = table.astype(np.float64)
    wanted = 2 * (3 * wide + np.tanh(wide) + wide / np.sqrt((wide**2).mean(axis=1, keepdims=True))) + np.arange(32)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("quantised", "activations"), [(False, "f32"), (True, "f32"), (True, "int8"), (True, "bf16")])
def test_a_decoder_gives_the_same_bits_in_any_chunks(isa: str, quantised: bool, activations: str) -> None:
    if activations == "bf16" and isa != "amx":
        pytest.skip("bf16 activations need AMX")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 40).astype(I32)
    tables = np.array([[3, 1, 0], [2, 4, 5]], I32)

    def logits(sizes: list[int], threads: int, company: bool) -> np.ndarray:
        program = tiny_decoder(2, quantised=quantised, activations=activations)
        program.equalise([[3 * (k % 32 == i) for k in range(len(old))] for i, old in enumerate(program.shifts)])
        at = 0
        for size in sizes:
            ids, positions = tokens[at : at + size], np.arange(at, at + size, dtype=I32)
            starts = np.array([0, size], I32)
            if company:
                ids, positions = np.append(ids, I32(at % 7)), np.append(positions, I32(at % 40)).astype(I32)
                starts = np.array([0, size, size + 1], I32)
            out = program.run(ids, positions, starts, tables[: len(starts) - 1], np.array([size - 1], I32), threads)
            at += size
        return out.copy()

    whole = logits([40], 1, False)
    for sizes in ([1] * 40, [39, 1], [7, 16, 17], [16, 16, 8]):
        for threads in (1, 2):
            np.testing.assert_array_equal(logits(sizes, threads, threads == 2), whole)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_gate_applied_where_its_products_are_changes_no_bit(isa: str, kind: str) -> None:
    """Two programs: in the second another reader wants the product in fp32, so that nothing is fused."""
    table = np.random.default_rng(0).standard_normal((60, 64)).astype(np.float32)

    def run(fused: bool, rows: int, threads: int) -> np.ndarray:
        program = _native.Program(
            _native.KvCache(1, 4, 16, 1, 8), max_rows=60, max_logit_rows=60, max_seqs=1, max_threads=2
        )
        x = program.embed(_native.Matrix.pack_dense(table, dtype="f32"))
        h = program.gated(program.linear(x, [weight(96, 64, seed, quantised=True) for seed in (1, 2)]), kind)
        y = program.linear(h, [weight(96, 96, 3, quantised=True)])
        program.seal(y if fused else program.add(y, program.linear(h, [zeros])))
        ids = np.arange(rows, dtype=I32)
        program.set_profile(True)
        out = program.run(ids, ids, np.array([0, rows], I32), np.arange(4, dtype=I32)[None], ids, threads).copy()
        assert ("gated_linear" in program.profile()) == (fused and isa != "amx")
        return out

    zeros = _native.Matrix.pack_dense(np.zeros((96, 96), np.float32), dtype="f32")
    for rows in (1, 4, 5, 12, 13, 31, 60):
        np.testing.assert_array_equal(run(True, rows, 2), run(False, rows, 1))


@pytest.mark.parametrize("shift", [0, 2])
def test_nibbles_and_bytes_that_share_an_input_are_multiplied_as_it_is_coded(isa: str, shift: int) -> None:
    """As in Q4_K_M, where some values' weights have 6 bits: equalised activations meet 8-bit codes on AVX2 too."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((60, 64)).astype(np.float32)
    q = rng.integers(0, 64, (32, 64), dtype=np.uint8)
    scale = rng.uniform(0.003, 0.01, (32, 4)).astype(np.float32)
    parts = [
        weight(32, 64, 1, quantised=True),
        _native.Matrix.pack_grouped(q, scale, None, zero=32, bits=8, group=16),
    ]
    program = _native.Program(_native.KvCache(1, 4, 16, 1, 8), max_rows=60, max_logit_rows=60, max_seqs=1)
    program.seal(program.linear(program.embed(_native.Matrix.pack_dense(table, dtype="f32")), parts))
    program.equalise([[shift * (k == 5) for k in range(len(old))] for old in program.shifts])

    def run(rows: int) -> np.ndarray:
        ids = np.arange(rows, dtype=I32)
        return program.run(ids, ids, np.array([0, rows], I32), np.arange(4, dtype=I32)[None], ids, 1).copy()

    whole = run(60)
    exact = table.astype(np.float64) @ np.concatenate([part.unpack() for part in parts]).T.astype(np.float64)
    # A code is wrong by half a step at most, and by 2^shift of those in the column that was divided.
    steps = np.abs(table).reshape(60, 2, 32).max(axis=2).sum(axis=1)[:, None] / 127 * 32 * 2**shift / 2
    largest = np.abs(np.concatenate([part.unpack() for part in parts])).max(axis=1)
    assert (np.abs(whole - exact) < steps * largest * 0.25).all()
    for rows in (1, 4, 5, 12, 31):
        np.testing.assert_array_equal(run(rows), whole[:rows])


@pytest.mark.parametrize("name", [name for name in _native.isas() if name.startswith("avx")])
def test_shifts_are_chosen_for_columns_that_are_always_large(name: str) -> None:
    before = _native.isa()
    _native.set_isa(name)
    try:
        table = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
        table[:, [3, 40]] *= [30, 4]
        table[0] *= 1000  # one token of giants does not decide
        program = _native.Program(_native.KvCache(1, 4, 16, 1, 8), max_rows=16, max_logit_rows=1, max_seqs=1)
        x = program.embed(_native.Matrix.pack_dense(table, dtype="f32"))
        program.seal(program.linear(x, [weight(16, 64, 1, quantised=True)]))
        ids = np.arange(16, dtype=I32)
        (chosen,) = program.choose_shifts(ids, ids, np.array([0, 16], I32), np.zeros((1, 1), I32), ids[:1])
        assert chosen[3] >= 3 and chosen[40] >= 1
        assert max(shift for k, shift in enumerate(chosen) if k not in (3, 40)) <= 1
        assert program.shifts == [[0] * 64]
        program.equalise([chosen])
        assert program.shifts == [chosen]
        for bad in ([], [chosen, chosen], [chosen[:-1]], [[5] * 64]):
            with pytest.raises(ValueError, match="shift"):
                program.equalise(bad)
        assert program.shifts == [chosen]
    finally:
        _native.set_isa(before)


def test_a_result_outlives_its_program() -> None:
    out = step(tiny_decoder(1))
    kept = out.copy()
    gc.collect()
    np.testing.assert_array_equal(out, kept)


def test_the_profile_counts_only_when_switched_on() -> None:
    rig = AttentionRig(Shape(), np.ones((4, Shape().cols), np.float32))
    rig.step([(0, 0, [1, 2])])
    assert rig.program.profile() == {}
    rig.program.set_profile(True)
    rig.step([(0, 0, [1, 2])])
    profile = rig.program.profile()
    assert set(profile) == {"embed", "rope_kv", "attention", "select"} and min(profile.values()) > 0
    rig.program.set_profile(False)
    rig.step([(0, 0, [1, 2])])
    assert rig.program.profile() == profile


def test_an_unknown_isa_is_refused() -> None:
    with pytest.raises(ValueError, match="available"):
        _native.set_isa("mmx")
    assert _native.isa() in _native.isas()
