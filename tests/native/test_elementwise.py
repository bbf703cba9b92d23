import numpy as np
import pytest

from legato import _native
from native.replay import I32, run_rows

COLS = [1, 7, 16, 17, 576, 640, 1000]


def table_of(cols: int, rows: int = 13, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * scale).astype(np.float32)


def assert_rows_alone_give_the_same_bits(record, table: np.ndarray, whole: np.ndarray) -> None:
    """Row by row, in another order and at two threads: not one bit moves."""
    order = np.random.default_rng(9).permutation(len(table))
    np.testing.assert_array_equal(run_rows(record, table, order, threads=2), whole[order])
    for row in order[:3]:
        np.testing.assert_array_equal(run_rows(record, table, [row])[0], whole[row])


@pytest.mark.parametrize("cols", COLS)
def test_rms_norm(isa: str, cols: int) -> None:
    x, weight = table_of(cols), table_of(cols, 1, seed=1)[0]
    x[3] = 0.0

    def record(program, slot):
        return program.rms_norm(slot, weight, 1e-5)

    got = run_rows(record, x, range(13))
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + np.float32(1e-5)) * weight
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-30)
    assert_rows_alone_give_the_same_bits(record, x, got)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("cols", COLS)
def test_gated(isa: str, kind: str, cols: int) -> None:
    x = table_of(2 * cols, scale=4.0)
    x[0, :cols] = np.resize([0.0, -0.0, 100.0, -100.0, 30.0, -30.0, 1e-20], cols)

    def record(program, slot):
        return program.gated(slot, kind)

    got = run_rows(record, x, range(13))
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    if kind == "silu":
        wanted = gate / (1 + np.exp(-gate)) * up
    else:
        wanted = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)
    assert_rows_alone_give_the_same_bits(record, x, got)


@pytest.mark.parametrize("cols", COLS)
def test_softcap_and_add(isa: str, cols: int) -> None:
    x = table_of(cols, scale=40.0)

    def record(program, slot):
        return program.add(program.softcap(slot, 30.0), slot)

    got = run_rows(record, x, range(13))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got, 30.0 * np.tanh(wide / 30.0) + wide, rtol=1e-6, atol=1e-5)
    assert_rows_alone_give_the_same_bits(record, x, got)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("rotary", [64, 24], ids=["full", "partial"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rope_rotates_queries_and_keys_at_their_positions(
    isa: str, interleaved: bool, rotary: int, normed: bool
) -> None:
    heads, kv_heads, dim, count, start = 4, 2, 64, 40, 13
    rng = np.random.default_rng(0)
    angles = np.arange(100)[:, None] * 1.0 / 100.0 ** (np.arange(rotary // 2) / rotary)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    qkv = table_of((heads + 2 * kv_heads) * dim, count + start)
    norms = [rng.uniform(0.5, 2, dim).astype(np.float32) if normed else None for _ in range(2)]
    kv = _native.KvCache(1, 4, 32, kv_heads, dim, "f32")
    program = _native.Program(kv, max_rows=64, max_logit_rows=64, max_seqs=1, activations="f32", max_threads=2)
    x = program.embed(_native.Matrix.pack_dense(qkv, dtype="f32"))
    q = program.rope_kv(
        x, 0, cos, sin, interleaved=interleaved, heads=heads, q_norm=norms[0], k_norm=norms[1], eps=1e-6
    )
    program.seal(q)
    tables = np.array([[2, 0, 3]], I32)
    got_q = np.empty((count + start, heads * dim), np.float32)
    for first, stop in ((0, start), (start, start + count)):
        ids = np.arange(first, stop, dtype=I32)
        rows = np.arange(len(ids), dtype=I32)
        got_q[first:stop] = program.run(ids, ids, np.array([0, len(ids)], I32), tables, rows, 2)
    got_k = np.concatenate([kv.read(0, block)[0] for block in tables[0]])[: count + start]

    def rotated(x: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        x = x.astype(np.float64)
        if norm is not None:
            x = x / np.sqrt((x**2).mean(axis=2, keepdims=True) + 1e-6) * norm
        half = rotary // 2
        first, second = (
            (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else (slice(half), slice(half, rotary))
        )
        out = x.copy()
        c, s = (t[: len(x), None].astype(np.float64) for t in (cos, sin))
        out[..., first] = x[..., first] * c - x[..., second] * s
        out[..., second] = x[..., second] * c + x[..., first] * s
        return out

    rows = qkv.reshape(count + start, -1, dim)
    np.testing.assert_allclose(
        got_q.reshape(count + start, heads, dim), rotated(rows[:, :heads], norms[0]), rtol=1e-5, atol=2e-6
    )
    np.testing.assert_allclose(got_k, rotated(rows[:, heads : heads + kv_heads], norms[1]), rtol=1e-5, atol=2e-6)


def test_embedding_scales_and_select_picks_rows(isa: str) -> None:
    table = table_of(48)
    kv = _native.KvCache(1, 1, 16, 1, 8, "f32")
    program = _native.Program(kv, max_rows=8, max_logit_rows=4, max_seqs=1, activations="f32", max_threads=2)
    program.seal(program.select(program.embed(_native.Matrix.pack_dense(table, dtype="f32"), 2.0)))
    ids = np.array([5, 5, 12, 0], I32)
    got = program.run(ids, np.arange(4, dtype=I32), np.array([0, 4], I32), np.zeros((1, 1), I32), ids[3:] + 2, 2)
    np.testing.assert_array_equal(got, 2 * table[12:13])
