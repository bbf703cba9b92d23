"""What `Ops` promises, op by op, of every implementation: numbers by formulas in float64, and row invariance.

Torch's own products round by shape: of it, only numbers are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from exec.backends import (
    ISAS,
    NativeUnderTest,
    OpsUnderTest,
    ReferenceUnderTest,
    TorchUnderTest,
    batch_of,
    needs_torch,
)
from legato.exec.batch import Batch
from legato.exec.kv import KvLayout

BLOCK_TOKENS, BLOCKS, LAYERS = 16, 64, 2
IMPLEMENTATIONS = [
    "reference",
    *(f"{isa}-{threads}" for isa in ISAS for threads in (1, 2)),
    pytest.param("torch", marks=needs_torch),
]
F32 = NDArray[np.float32]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    if ISAS:
        from legato import _native

        _native.set_isa(ISAS[-1])


def make(implementation: str, *, kv_heads: int = 2, head_dim: int = 16, dtype: Any = "f32") -> OpsUnderTest:
    layout = KvLayout(LAYERS, kv_heads, head_dim, BLOCK_TOKENS, dtype)
    if implementation == "reference":
        return ReferenceUnderTest(layout, BLOCKS)
    if implementation == "torch":
        return TorchUnderTest(layout, BLOCKS)
    isa, threads = implementation.split("-")
    return NativeUnderTest(layout, BLOCKS, isa, int(threads))


def agree(implementation: str, found: F32, expected: F32) -> bool:
    """Bit for bit, where that is promised."""
    if implementation == "torch":
        return bool(np.allclose(found, expected, rtol=1e-4, atol=1e-5))
    return found.tobytes() == expected.tobytes()


def values(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def apply(ops: OpsUnderTest, build: Any, x: F32, batch: Batch | None = None) -> F32:
    """Rows of `build(ops, tensor with the rows of x)`."""
    batch = batch or batch_of((0, len(x)), block_tokens=BLOCK_TOKENS)
    inputs = ops.weight(x)
    return ops.run(lambda o: o.select(build(o, o.embed(inputs, 1.0))), batch)


def check(implementation: str, build: Any, x: F32, expected: NDArray[np.float64], tolerance: float = 1e-5) -> None:
    """The formula's numbers for all rows together, and the same bits for each row alone."""
    ops = make(implementation)
    found = apply(ops, build, x)
    assert found.shape == expected.shape and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    for row in range(len(x)):
        assert agree(implementation, apply(ops, build, x[row : row + 1])[0], found[row]), f"row {row} alone"


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_embed_gathers_scaled_rows(implementation: str, rows: int) -> None:
    check(implementation, lambda o, x: x, values(rows, 40), values(rows, 40).astype(np.float64))
    ops, table = make(implementation), values(50, 40)
    batch = batch_of((3, 4), block_tokens=BLOCK_TOKENS, tokens=np.array([49, 0, 7, 7], np.int32))
    weight = ops.weight(table)
    found = ops.run(lambda o: o.select(o.embed(weight, 2.5)), batch)
    np.testing.assert_array_equal(found, table[[49, 0, 7, 7]] * np.float32(2.5))


@pytest.mark.parametrize("cols", [16, 37, 64, 576])
def test_rms_norm(implementation: str, cols: int) -> None:
    x, weight = 3 * values(9, cols), values(cols, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    check(implementation, lambda o, t: o.rms_norm(t, weight, 1e-5), x, expected)


@pytest.mark.parametrize(("rows", "inputs", "outs"), [(1, 32, (16,)), (5, 48, (7, 33)), (19, 64, (40, 16, 16))])
def test_linear_puts_its_parts_side_by_side(implementation: str, rows: int, inputs: int, outs: tuple[int, ...]) -> None:
    x, parts = values(rows, inputs), [values(out, inputs, seed=2 + out) for out in outs]
    bias = values(sum(outs), seed=1)
    product = x.astype(np.float64) @ np.concatenate(parts).astype(np.float64).T
    for with_bias in (False, True):
        ops = make(implementation)
        weights = [ops.weight(part) for part in parts]
        found = apply(ops, lambda o, t, w=weights, b=bias if with_bias else None: o.linear(t, w, b), x)
        np.testing.assert_allclose(found, product + bias * with_bias, rtol=1e-5, atol=1e-4)
        for row in range(rows):
            alone = apply(ops, lambda o, t, w=weights, b=bias if with_bias else None: o.linear(t, w, b), x[[row]])
            assert agree(implementation, alone[0], found[row])


def test_linear_adds_bias_and_residual(implementation: str) -> None:
    x, weight, bias = values(6, 32), values(32, 32, seed=1), values(32, seed=2)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias + x
    ops = make(implementation)
    packed = ops.weight(weight)
    found = apply(ops, lambda o, t: o.linear(t, [packed], bias, t), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    # The residual is still there for whoever reads it next.
    twice = apply(ops, lambda o, t: o.add(o.linear(t, [packed], bias, t), t), x)
    np.testing.assert_allclose(twice, expected + x, rtol=1e-5, atol=1e-4)


def test_gated_silu(implementation: str) -> None:
    x = 4 * values(7, 2 * 40)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    check(implementation, lambda o, t: o.gated(t, "silu"), x, gate / (1 + np.exp(-gate)) * up)


def test_gated_gelu(implementation: str) -> None:
    x = 4 * values(7, 2 * 40)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    expected = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    check(implementation, lambda o, t: o.gated(t, "gelu_tanh"), x, expected)


def test_gates_far_from_zero_saturate_and_stay_finite(implementation: str) -> None:
    gate = np.array([[-1e4, -200, -90, 90, 200, 1e4]], np.float32)
    x = np.concatenate([gate, np.ones_like(gate)], axis=1)
    for kind in ("silu", "gelu_tanh"):
        found = apply(make(implementation), lambda o, t, k=kind: o.gated(t, k), x)
        np.testing.assert_allclose(found, np.maximum(gate, 0), rtol=1e-6, atol=1e-30)


def test_add_and_softcap(implementation: str) -> None:
    x = 30 * values(5, 33)
    wide = x.astype(np.float64)
    check(implementation, lambda o, t: o.add(t, o.softcap(t, 20.0)), x, wide + 20 * np.tanh(wide / 20))


def test_select_gives_the_logit_rows_in_order(implementation: str) -> None:
    x, ops = values(9, 20), make(implementation)
    whole = batch_of((0, 9), block_tokens=BLOCK_TOKENS)
    for rows in ([8], [0, 4, 8], []):
        batch = Batch(whole.tokens, whole.positions, whole.seq_row_starts, whole.block_tables, np.array(rows, np.int32))
        found = apply(ops, lambda o, t: o.add(t, t), x, batch)
        np.testing.assert_array_equal(found, 2 * x[rows])
        # Operations after the selection see its rows only.
        weight, table = np.ones(20, np.float32), ops.weight(x)
        later = ops.run(lambda o, e=table, w=weight: o.rms_norm(o.select(o.embed(e, 1.0)), w, 1e-6), batch)
        assert later.shape == (len(rows), 20)


# ── rope, KV and attention ──────────────────────────────────────────────────

ROPE_CASES = [(16, 16, True), (16, 16, False), (16, 8, False), (24, 24, True), (64, 64, False), (256, 256, False)]


def tables(dim: int, positions: int = 400) -> tuple[F32, F32]:
    angle = np.arange(positions)[:, None] * 1000.0 ** (-2 * np.arange(dim // 2) / dim)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotated(x: NDArray[np.float64], positions: NDArray[np.int32], dim: int, interleaved: bool) -> NDArray[np.float64]:
    """`x [rows, heads, head_dim]`, by complex multiplication."""
    cos, sin = tables(dim)
    turn = (cos + 1j * sin)[positions][:, None, :]
    first, second = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 : dim])
    turned = (first + 1j * second) * turn
    out = x.copy()
    if interleaved:
        out[..., 0:dim:2], out[..., 1:dim:2] = turned.real, turned.imag
    else:
        out[..., : dim // 2], out[..., dim // 2 : dim] = turned.real, turned.imag
    return out


def normed(x: NDArray[np.float64], weight: F32 | None) -> NDArray[np.float64]:
    return x if weight is None else x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


@pytest.mark.parametrize(("head_dim", "dim", "interleaved"), ROPE_CASES)
@pytest.mark.parametrize("norms", [False, True])
def test_rope_kv_rotates_and_fills_the_cache(
    implementation: str, head_dim: int, dim: int, interleaved: bool, norms: bool
) -> None:
    heads, kv_heads = 4, 2
    ops = make(implementation, head_dim=head_dim)
    batch = batch_of((0, 5), (30, 4), (15, 2), block_tokens=BLOCK_TOKENS)
    x = values(11, (heads + 2 * kv_heads) * head_dim)
    cos, sin = tables(dim)
    q_norm, k_norm = (values(head_dim, seed=5), values(head_dim, seed=6)) if norms else (None, None)

    def build(o: Any, t: Any) -> Any:
        return o.rope_kv(t, 1, cos, sin, interleaved=interleaved, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=1e-6)

    found = apply(ops, build, x, batch)
    q, k, v = np.split(x.astype(np.float64).reshape(11, -1, head_dim), [heads, heads + kv_heads], axis=1)
    q = rotated(normed(q, q_norm), batch.positions, dim, interleaved)
    k = rotated(normed(k, k_norm), batch.positions, dim, interleaved)
    np.testing.assert_allclose(found, q.reshape(11, -1), rtol=1e-4, atol=1e-5)
    for s in range(3):
        for row in range(batch.seq_row_starts[s], batch.seq_row_starts[s + 1]):
            block, offset = divmod(int(batch.positions[row]), BLOCK_TOKENS)
            keys, stored = ops.read(1, int(batch.block_tables[s, block]))
            np.testing.assert_allclose(keys[offset], k[row], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(stored[offset], v[row].astype(np.float32))


def attend(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], scale: float, window: int, softcap: float
) -> NDArray[np.float64]:
    """Causal attention of one sequence from position 0: `q [n, heads, d]`, `k`, `v [n, kv_heads, d]`."""
    n, group = len(q), q.shape[1] // k.shape[1]
    k, v = np.repeat(k.astype(np.float64), group, axis=1), np.repeat(v.astype(np.float64), group, axis=1)
    scores = scale * np.einsum("qhd,khd->hqk", q.astype(np.float64), k)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(n)[:, None] - np.arange(n)
    scores[:, (distance < 0) | ((distance >= window) if window else False)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v).reshape(n, -1)


ATTENTION_CASES = [
    # heads, kv_heads, head_dim, window, softcap, kv dtype
    (4, 2, 16, 0, 0.0, "f32"),
    (4, 2, 16, 0, 0.0, "f16"),
    (9, 3, 64, 0, 0.0, "f32"),
    (4, 1, 256, 30, 0.0, "f32"),
    (2, 2, 24, 1, 0.0, "f32"),
    (4, 2, 16, 65, 5.0, "f16"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "softcap", "dtype"), ATTENTION_CASES)
def test_attention_in_chunks_of_any_size_is_the_formula_on_the_whole(
    implementation: str, heads: int, kv_heads: int, head_dim: int, window: int, softcap: float, dtype: str
) -> None:
    """And every split gives the same bits."""
    n, scale = 150, head_dim**-0.5
    x = values(n, (heads + 2 * kv_heads) * head_dim)
    cos, sin = np.ones((400, head_dim // 2), np.float32), np.zeros((400, head_dim // 2), np.float32)

    def build(o: Any, t: Any) -> Any:
        q = o.rope_kv(t, 0, cos, sin, interleaved=False, heads=heads)
        return o.attention(q, 0, heads=heads, scale=scale, window=window, softcap=softcap)

    def in_chunks(*counts: int) -> F32:
        ops, start, rows = make(implementation, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype), 0, []
        for count in counts:
            table = np.arange(40, 40 - -(-n // BLOCK_TOKENS), -1, dtype=np.int32)[None]
            batch = batch_of((start, count), block_tokens=BLOCK_TOKENS)
            width = -(-(start + count) // BLOCK_TOKENS)
            batch = Batch(
                batch.tokens, batch.positions, batch.seq_row_starts, table[:, :width].copy(), batch.logit_rows
            )
            rows.append(apply(ops, build, x[start : start + count], batch))
            start += count
        return np.concatenate(rows)

    whole = in_chunks(n)
    q, k, v = np.split(x.reshape(n, -1, head_dim), [heads, heads + kv_heads], axis=1)
    stored = np.float16 if dtype == "f16" else np.float32
    expected = attend(q, k.astype(stored), v.astype(stored), scale, window, softcap)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=2e-5)
    for counts in ((1,) * 70 + (80,), (64, 64, 22), (63, 1, 1, 85), (100, 50), (37, 37, 37, 39)):
        assert agree(implementation, in_chunks(*counts), whole), counts


def test_attention_of_a_sequence_does_not_depend_on_its_company(implementation: str) -> None:
    heads, kv_heads, head_dim = 4, 2, 16
    cos, sin = tables(head_dim)

    def build(o: Any, t: Any) -> Any:
        q = o.rope_kv(t, 0, cos, sin, interleaved=False, heads=heads)
        return o.attention(q, 0, heads=heads, scale=0.25)

    counts = (1, 40, 3, 66, 1)
    x = values(sum(counts), (heads + 2 * kv_heads) * head_dim)
    together = apply(make(implementation), build, x, batch_of(*((0, c) for c in counts), block_tokens=BLOCK_TOKENS))
    start = 0
    for count in counts:
        rows = slice(start, start + count)
        alone = apply(make(implementation), build, x[rows], batch_of((0, count), block_tokens=BLOCK_TOKENS))
        assert agree(implementation, alone, together[rows])
        start += count
