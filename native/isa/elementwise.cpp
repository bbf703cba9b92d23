// Row-wise operations. A row is the unit of work; within it, vectors go from left to right and a masked vector ends it,
// so a row's bits depend on that row alone.
#include "elementwise.hpp"

#include "isa/elementwise_rows.hpp"
#include "isa/quantised.hpp"
#include "isa/simd.hpp"
#include "isa/tables.hpp"
#include "isa/team_loop.hpp"

namespace legato::LEGATO_ISA {
namespace {

// Calls f(column, lanes) for each vector of a row: full ones, then the rest.
template <class F>
LEGATO_INLINE void for_vectors(std::int64_t cols, F&& f) {
    std::int64_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) f(i, std::integral_constant<int, kLanes>{});
    if (i < cols) f(i, cols - i);
}

LEGATO_INLINE Vec load_lanes(const float* p, std::integral_constant<int, kLanes>) { return load(p); }
LEGATO_INLINE Vec load_lanes(const float* p, std::int64_t n) { return load_n(p, n); }
LEGATO_INLINE void store_lanes(float* p, Vec x, std::integral_constant<int, kLanes>) { store(p, x); }
LEGATO_INLINE void store_lanes(float* p, Vec x, std::int64_t n) { store_n(p, x, n); }

// Calls f(row) for all rows, several an item when there are many: whole blocks of a coded copy, whose rows share cache
// lines.
template <class F>
LEGATO_INLINE void for_rows(std::int64_t rows, F&& f, bool coded = false) {
    const std::int64_t step = rows < 64 ? 1 : coded ? block_rows(rows) : 8;
    team_for((rows + step - 1) / step, [&](std::int64_t item) __attribute__((always_inline)) {
        const std::int64_t stop = item * step + step < rows ? item * step + step : rows;
        for (std::int64_t r = item * step; r < stop; ++r) f(r);
    });
}

template <Gate gate>
LEGATO_INLINE void gated_row(const float* x, std::int64_t cols, float* out) {
    for_vectors(cols, [&](std::int64_t i, auto lanes) __attribute__((always_inline)) {
        const Vec up = load_lanes(x + cols + i, lanes);
        store_lanes(out + i, mul(activate<gate>(load_lanes(x + i, lanes)), up), lanes);
    });
}

void rms_norm(const Rows& x, const float* weight, float eps, const Rows& out, const Quantised* copy) {
    for_rows(
        x.rows,
        [&](std::int64_t r) __attribute__((always_inline)) {
            rms_norm_row(x.data + r * x.stride, weight, eps, x.cols, out.data + r * out.stride);
            if (copy != nullptr) quantise_rows(out, *copy, r, r + 1);
        },
        copy != nullptr);
}

void gated(const Rows& x, Gate gate, const Rows& out, const Quantised* copy) {
    for_rows(
        x.rows,
        [&](std::int64_t r) __attribute__((always_inline)) {
            const float* from = x.data + r * x.stride;
            float* to = out.data + r * out.stride;
            if (gate == Gate::silu) {
                gated_row<Gate::silu>(from, out.cols, to);
            } else {
                gated_row<Gate::gelu_tanh>(from, out.cols, to);
            }
            if (copy != nullptr) quantise_rows(out, *copy, r, r + 1);
        },
        copy != nullptr);
}

void add_rows(const Rows& x, const Rows& y, const Rows& out) {
    for_rows(x.rows, [&](std::int64_t r) __attribute__((always_inline)) {
        const float* a = x.data + r * x.stride;
        const float* b = y.data + r * y.stride;
        float* to = out.data + r * out.stride;
        for_vectors(x.cols, [&](std::int64_t i, auto lanes) __attribute__((always_inline)) {
            store_lanes(to + i, add(load_lanes(a + i, lanes), load_lanes(b + i, lanes)), lanes);
        });
    });
}

void softcap(const Rows& x, float cap, const Rows& out) {
    const Vec inverse = splat(1.0f / cap);
    for_rows(x.rows, [&](std::int64_t r) __attribute__((always_inline)) {
        const float* from = x.data + r * x.stride;
        float* to = out.data + r * out.stride;
        for_vectors(x.cols, [&](std::int64_t i, auto lanes) __attribute__((always_inline)) {
            store_lanes(to + i, mul(splat(cap), tanh(mul(load_lanes(from + i, lanes), inverse))), lanes);
        });
    });
}

void select(const Rows& x, const std::int32_t* rows, const Rows& out) {
    for_rows(out.rows, [&](std::int64_t r) __attribute__((always_inline)) {
        std::memcpy(out.data + r * out.stride, x.data + rows[r] * x.stride, static_cast<std::size_t>(x.cols) * 4);
    });
}

}  // namespace

ElementwiseKernels elementwise_kernels() {
    return {.rms_norm = rms_norm, .gated = gated, .add = add_rows, .softcap = softcap, .select = select};
}

}  // namespace legato::LEGATO_ISA
