"""Packed weights and linear kernels: exact packing, NumPy oracles, equal bits whatever the company, threads or ISA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legato import _native
from legato._native import Matrix

F32 = np.float32
EQUALISING = ("avx2", "avx512", "avx512bf16")
FUSED_ISAS = [name for name in _native.isas() if name != "portable"]  # one arithmetic; portable rounds products


@dataclass(frozen=True)
class Grouped:
    """A quantised format. `top` is the largest code, `half` makes scales that fp16 holds exactly."""

    name: str
    bits: int
    group: int
    zero: int
    top: int
    minimum: bool
    half: bool = True

    def make(self, rows: int, cols: int, seed: int = 0) -> tuple[Matrix, np.ndarray]:
        """The packed matrix and its values by the definition, fp32 [rows, cols]."""
        rng = np.random.default_rng(seed)
        q = rng.integers(0, self.top + 1, (rows, cols), dtype=np.uint8)
        shape = (rows, cols // self.group)
        scale = rng.uniform(0.001, 0.02, shape).astype(F32)
        minimum = rng.uniform(-0.2, 0.1, shape).astype(F32) if self.minimum else None
        if self.half:
            scale = scale.astype(np.float16).astype(F32)
            minimum = None if minimum is None else minimum.astype(np.float16).astype(F32)
        packed = Matrix.pack_grouped(q, scale, minimum, zero=self.zero, bits=self.bits, group=self.group)
        values = np.repeat(scale, self.group, 1) * (q.astype(F32) - F32(self.zero))
        return packed, values if minimum is None else values + np.repeat(minimum, self.group, 1)


@dataclass(frozen=True)
class Dense:
    name: str

    def make(self, rows: int, cols: int, seed: int = 0) -> tuple[Matrix, np.ndarray]:
        values = np.random.default_rng(seed).standard_normal((rows, cols)).astype(F32)
        if self.name == "f16":
            half = values.astype(np.float16)
            return Matrix.pack_dense(half, dtype="f16"), half.astype(F32)
        if self.name == "bf16":
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            return Matrix.pack_dense(bits, dtype="bf16"), (bits.astype(np.uint32) << 16).view(F32)
        return Matrix.pack_dense(values, dtype="f32"), values


GROUPED = [
    Grouped("w4g32f16m", 4, 32, 0, 15, True),  # Q4_1
    Grouped("w4g32f16", 4, 32, 8, 15, False),  # Q4_0
    Grouped("w4g32f32m", 4, 32, 0, 15, True, half=False),  # Q4_K
    Grouped("w8g32f16", 8, 32, 128, 255, False),  # Q8_0
    Grouped("w8g32f16", 8, 32, 16, 31, False),  # Q5_0
    Grouped("w8g32f16m", 8, 32, 0, 255, True),
    Grouped("w8g16f32", 8, 16, 32, 63, False, half=False),  # Q6_K
    Grouped("w8g16f16m", 8, 16, 0, 255, True),
    Grouped("w4g32f16m", 4, 32, 3, 15, True),  # a zero and minima
    Grouped("w4g32f16", 4, 32, 0, 15, False),  # neither
]
FORMATS: list[Grouped | Dense] = [*GROUPED, Dense("f32"), Dense("f16"), Dense("bf16")]


def spare_bits(form: Grouped) -> int:
    """Of a byte that holds a code."""
    return 4 if form.top < 16 else 3 if form.top < 32 else 2 if form.top < 64 else 0


def equalises(form: Grouped) -> bool:
    """Whether inputs of this format are divided by powers of two before they are coded: codes need spare bits.

    AVX2 does so for nibbles only: 8-bit codes cost it no more with 11 bits an activation.
    """
    return _native.isa() in EQUALISING and spare_bits(form) > 0 and (_native.isa() != "avx2" or form.bits == 4)


def levels(form: Grouped) -> int:
    """Largest code of the activations: one plane of int8 where they are equalised, else 3 bits more."""
    return 127 if equalises(form) else 1016


def quantised(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, cols] and scales [rows, cols / 32] of the activations, by the definition."""
    groups = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(groups).max(2)
    safe = np.where(largest > 0, largest, F32(1))
    codes = np.rint(groups * (F32(top) / safe)[:, :, None]) * (largest > 0)[:, :, None]
    return codes.reshape(x.shape).astype(np.int64), largest / F32(top)


def oracle(form: Grouped | Dense, values: np.ndarray, x: np.ndarray, shifts: np.ndarray | None = None) -> np.ndarray:
    """The product with activations as the int8 mode codes them."""
    if isinstance(form, Grouped):
        factor = np.exp2(shifts.astype(F32)) if shifts is not None and equalises(form) else np.ones(x.shape[1], F32)
        codes, scales = quantised(x / factor, levels(form))
        x = codes * np.repeat(scales.astype(np.float64), 32, 1) * factor
    return x.astype(np.float64) @ values.astype(np.float64).T


def some_shifts(form: Grouped, cols: int, seed: int = 2) -> np.ndarray:
    """Any up to the spare bits; on AVX2 up to 3, of nibbles for one of the eight columns that share a sum."""
    most = min(spare_bits(form), 3 if _native.isa() == "avx2" else 4)
    shifts = np.random.default_rng(seed).integers(0, most + 1, cols).astype(np.uint8)
    if _native.isa() != "avx2" or form.group != 32 or form.bits != 4:
        return shifts
    k = np.arange(cols)
    return np.where((k // 4 % 4 == k // 32 % 4) & (k % 2 == 0), shifts, 0).astype(np.uint8)


def activations(rows: int, cols: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(F32)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_unpacking_gives_back_exactly_what_was_packed(form: Grouped | Dense) -> None:
    for rows in (1, 16, 37):
        packed, values = form.make(rows, 96)
        assert packed.format == form.name and (packed.rows, packed.cols) == (rows, 96)
        assert np.array_equal(packed.unpack().view(np.uint32), values.view(np.uint32))


def test_a_matrix_takes_the_bytes_its_format_says() -> None:
    panels = 3  # of 16 outputs: 37 rows
    assert GROUPED[0].make(37, 64)[0].nbytes == panels * 2 * (256 + 32 + 32)
    assert GROUPED[3].make(37, 64)[0].nbytes == panels * 2 * (512 + 32)
    assert GROUPED[6].make(37, 64)[0].nbytes == panels * 4 * (256 + 64)
    assert Dense("f32").make(37, 64)[0].nbytes == panels * 64 * 64
    assert Dense("bf16").make(37, 64)[0].nbytes == panels * 64 * 32


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("mode", ["int8", "f32"])
def test_a_linear_layer_is_the_product_with_the_dequantised_weight(isa: str, form: Grouped | Dense, mode: str) -> None:
    for outputs, cols in ((37, 96), (48, 544)):
        packed, values = form.make(outputs, cols)
        for rows in (1, 2, 5, 13, 33):
            x = activations(rows, cols)
            y = packed.linear(x, activations=mode, threads=2)
            want = oracle(form, values, x) if mode == "int8" else x.astype(np.float64) @ values.astype(np.float64).T
            bound = 2e-6 * np.abs(x).max() * np.abs(values).max() * cols
            assert np.abs(y - want).max() <= bound, (outputs, cols, rows)


@pytest.mark.parametrize("form", GROUPED, ids=lambda form: form.name)
def test_equalised_columns_are_coded_at_their_own_scale(isa: str, form: Grouped) -> None:
    """Columns 16 times as large as the others: their shifts give those 4 bits more, where the weights have room."""
    for outputs, cols in ((37, 96), (48, 544)):
        packed, values = form.make(outputs, cols)
        shifts = some_shifts(form, cols)
        for rows in (1, 2, 5, 13, 24, 25, 33):
            x = activations(rows, cols) * np.exp2(shifts.astype(F32))
            y = packed.linear(x, shifts=shifts, threads=2)
            bound = 2e-6 * np.abs(x).max() * np.abs(values).max() * cols
            assert np.abs(y - oracle(form, values, x, shifts)).max() <= bound, (outputs, cols, rows)


def test_a_large_column_costs_its_group_no_precision_once_it_is_equalised(isa: str) -> None:
    packed, values = GROUPED[0].make(64, 160)
    shifts = np.where(np.arange(160) % 32 == 7, 3, 0).astype(np.uint8)
    x = activations(20, 160) * np.exp2(shifts.astype(F32))
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    plain, equalised = (np.std(packed.linear(x, shifts=s) - exact) for s in (None, shifts))
    if isa in EQUALISING:
        assert equalised < 0.7 * plain
    else:
        assert equalised == plain


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("mode", ["int8", "f32"])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_row_keeps_its_bits_in_any_company(form: Grouped | Dense, mode: str, data: st.DataObject) -> None:
    """Rows, order, number of threads and position in the batch choose other micro-kernels; the bits stay."""
    packed, _ = form.make(53, 160)
    x = activations(64, 160)
    chosen = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=64))
    threads = data.draw(st.integers(1, 3))
    before = _native.isa()
    try:
        for name in _native.isas():
            _native.set_isa(name)
            shifts = some_shifts(form, 160) if isinstance(form, Grouped) else None
            whole = packed.linear(x, activations=mode, shifts=shifts, threads=1)
            some = packed.linear(np.ascontiguousarray(x[chosen]), activations=mode, shifts=shifts, threads=threads)
            assert np.array_equal(some.view(np.uint32), whole[chosen].view(np.uint32)), name
    finally:
        _native.set_isa(before)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("mode", ["int8", "f32"])
def test_every_instruction_set_with_fused_multiply_add_gives_the_same_bits(form: Grouped | Dense, mode: str) -> None:
    # Integer activations are coded as fits the instruction set: AVX2 has fewer shifts, and AMX does not equalise.
    others = {"avx2", "amx"} if isinstance(form, Grouped) and spare_bits(form) else set()
    names = [name for name in FUSED_ISAS if name not in others or mode == "f32" or isinstance(form, Dense)]
    if len(names) < 2:
        pytest.skip("needs two such instruction sets")
    before = _native.isa()
    try:
        for cols in (96, 544):
            packed, _ = form.make(53, cols)
            for rows in (1, 7, 16, 50):
                results = []
                for name in names:
                    _native.set_isa(name)
                    results.append(packed.linear(activations(rows, cols), activations=mode, threads=2).view(np.uint32))
                assert all(np.array_equal(result, results[0]) for result in results), (cols, rows)
    finally:
        _native.set_isa(before)


def test_extreme_codes_and_activations_do_not_overflow(isa: str) -> None:
    """Largest codes against the largest activations, all positive or negative: narrow sums must hold a group."""
    cols = 64
    for form in GROUPED:
        q = np.full((16, cols), form.top, np.uint8)
        scale = np.ones((16, cols // form.group), F32)
        minimum = np.zeros_like(scale) if form.minimum else None
        packed = Matrix.pack_grouped(q, scale, minimum, zero=form.zero, bits=form.bits, group=form.group)
        most = np.full(cols, spare_bits(form), np.uint8)
        shifts = some_shifts(form, cols) if _native.isa() == "avx2" else most
        powers = np.exp2(shifts.astype(F32)) if equalises(form) else np.ones(cols, F32)
        for sign in (1, -1):
            for rows in (1, 20, 40):
                x = np.tile(sign * levels(form) * powers, (rows, 1))
                y = packed.linear(x, shifts=shifts, threads=2)
                assert (y == sign * levels(form) * powers.sum() * (form.top - form.zero)).all(), (form.name, sign)


needs_amx = pytest.mark.skipif("amx" not in _native.isas(), reason="bf16 activations need AMX")


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 values rounded to bf16, halves up."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(F32)


@pytest.fixture
def amx() -> Iterator[None]:
    before = _native.isa()
    _native.set_isa("amx")
    yield
    _native.set_isa(before)


@needs_amx
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("form", GROUPED, ids=lambda form: form.name)
def test_bf16_tiles_give_the_product_of_the_rounded_factors(form: Grouped) -> None:
    for outputs, cols in ((37, 96), (48, 544)):
        packed, values = form.make(outputs, cols)
        for rows in (1, 2, 13, 16, 33, 70):
            x = activations(rows, cols)
            y = packed.linear(x, activations="bf16", threads=2)
            want = to_bf16(x).astype(np.float64) @ to_bf16(values).astype(np.float64).T
            # A weight between two bf16 may go either way: its scale and minimum are applied in one rounding.
            bound = 2e-5 * np.abs(x).max() * np.abs(values).max() * cols
            assert np.abs(y - want).max() <= bound, (outputs, cols, rows)


@needs_amx
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("form", GROUPED, ids=lambda form: form.name)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_row_of_bf16_keeps_its_bits_in_any_company(form: Grouped, data: st.DataObject) -> None:
    packed, _ = form.make(53, 160)
    x = activations(80, 160)
    chosen = data.draw(st.lists(st.integers(0, 79), min_size=1, max_size=80))
    whole = packed.linear(x, activations="bf16", threads=1)
    some = packed.linear(np.ascontiguousarray(x[chosen]), activations="bf16", threads=data.draw(st.integers(1, 3)))
    assert np.array_equal(some.view(np.uint32), whole[chosen].view(np.uint32))


def test_bf16_without_tiles_is_refused() -> None:
    before = _native.isa()
    _native.set_isa("portable")
    try:
        with pytest.raises(ValueError, match="amx"):
            GROUPED[0].make(2, 64)[0].linear(np.zeros((1, 64), F32), activations="bf16")
    finally:
        _native.set_isa(before)


@pytest.mark.skipif("avx2" not in _native.isas(), reason="for AVX2's sums of 16 bits")
def test_shifts_that_would_overflow_avx2_are_refused() -> None:
    before = _native.isa()
    _native.set_isa("avx2")
    try:
        x, (packed, _) = np.ones((1, 64), F32), GROUPED[0].make(16, 64)
        fits = np.array([3, 1, 0, 0, 0, 1] + [0] * 58, np.uint8)  # 8 + 2 + 2 + 5 = 17
        packed.linear(x, shifts=fits)
        fits[8] = 1
        with pytest.raises(ValueError, match="overflow"):
            packed.linear(x, shifts=fits)
    finally:
        _native.set_isa(before)


def test_zero_and_tiny_activations_give_zero(isa: str) -> None:
    packed, _ = GROUPED[0].make(32, 64)
    for value in (0.0, 1e-38, -1e-40):
        x = np.full((17, 64), value, F32)
        assert (packed.linear(x) == 0).all()


def test_activations_that_are_not_finite_stay_in_their_row(isa: str) -> None:
    packed, _ = GROUPED[0].make(32, 64)
    x = activations(18, 64)
    clean = packed.linear(x)
    x[3, 5], x[9, 40] = np.nan, np.inf
    y = packed.linear(x)
    others = [row for row in range(18) if row not in (3, 9)]
    assert np.array_equal(y[others], clean[others])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_gathered_rows_are_the_unpacked_ones(isa: str, form: Grouped | Dense) -> None:
    packed, values = form.make(37, 96)
    ids = np.array([36, 0, 5, 5, 16], np.int32)
    assert np.array_equal(packed.gather(ids), values[ids])
    assert np.array_equal(packed.gather(ids, scale=8.0, threads=2), F32(8.0) * values[ids])


def test_no_rows_give_no_rows(isa: str) -> None:
    packed, _ = GROUPED[0].make(32, 64)
    assert packed.linear(np.empty((0, 64), F32)).shape == (0, 32)
    assert packed.gather(np.empty(0, np.int32)).shape == (0, 64)


def _pack(q: np.ndarray, scale: np.ndarray, zero: int = 0, bits: int = 4, group: int = 32) -> Matrix:
    return Matrix.pack_grouped(q, scale, None, zero=zero, bits=bits, group=group)


BAD: dict[str, Callable[[], object]] = {
    "columns": lambda: _pack(np.zeros((2, 48), np.uint8), np.ones((2, 3), F32), group=16, bits=8),
    "scale shape": lambda: _pack(np.zeros((2, 64), np.uint8), np.ones((2, 3), F32)),
    "code over 15": lambda: _pack(np.full((2, 32), 16, np.uint8), np.ones((2, 1), F32)),
    "zero": lambda: _pack(np.zeros((2, 32), np.uint8), np.ones((2, 1), F32), zero=16),
    "signed range": lambda: _pack(np.full((2, 32), 255, np.uint8), np.ones((2, 1), F32), zero=100, bits=8),
    "infinite scale": lambda: _pack(np.zeros((2, 32), np.uint8), np.full((2, 1), np.inf, F32)),
    "group": lambda: _pack(np.zeros((2, 64), np.uint8), np.ones((2, 1), F32), group=64),
    "bits": lambda: _pack(np.zeros((2, 32), np.uint8), np.ones((2, 1), F32), bits=5),
    "no rows": lambda: _pack(np.zeros((0, 32), np.uint8), np.ones((0, 1), F32)),
    "dtype": lambda: Matrix.pack_dense(np.zeros((2, 3), F32), dtype="f64"),
    "wrong dtype": lambda: Matrix.pack_dense(np.zeros((2, 3), F32), dtype="bf16"),
    "x columns": lambda: GROUPED[0].make(2, 64)[0].linear(np.zeros((1, 32), F32)),
    "activations": lambda: GROUPED[0].make(2, 64)[0].linear(np.zeros((1, 64), F32), activations="int4"),
    "shifts": lambda: GROUPED[0].make(2, 64)[0].linear(np.zeros((1, 64), F32), shifts=np.zeros(32, np.uint8)),
    "shift over 4": lambda: GROUPED[0].make(2, 64)[0].linear(np.zeros((1, 64), F32), shifts=np.full(64, 5, np.uint8)),
    "id": lambda: GROUPED[0].make(2, 64)[0].gather(np.array([2], np.int32)),
    "negative id": lambda: GROUPED[0].make(2, 64)[0].gather(np.array([-1], np.int32)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_raise_value_error(case: str) -> None:
    with pytest.raises(ValueError):
        BAD[case]()
