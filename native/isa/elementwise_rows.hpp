// RMS norm of one row, used for whole rows and for single heads, and the activations of gates.
#pragma once

#include "elementwise.hpp"
#include "isa/simd.hpp"

namespace legato::LEGATO_ISA {

// out = x / sqrt(mean(x^2) + eps) * weight. Two running sums of squares, even and odd vectors; masked lanes add exact
// zeros.
LEGATO_INLINE void rms_norm_row(const float* x, const float* weight, float eps, std::int64_t cols, float* out) {
    Vec even = zero(), odd = zero();
    std::int64_t i = 0;
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
        const Vec a = load(x + i), b = load(x + i + kLanes);
        even = fma(a, a, even);
        odd = fma(b, b, odd);
    }
    for (; i < cols; i += kLanes) {
        const Vec a = cols - i < kLanes ? load_n(x + i, cols - i) : load(x + i);
        even = fma(a, a, even);
    }
    const float mean = lane_sum(add(even, odd)) / static_cast<float>(cols);
    const Vec factor = splat(1.0f / __builtin_sqrtf(mean + eps));
    for (i = 0; i + kLanes <= cols; i += kLanes) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
    if (i < cols) {
        const std::int64_t n = cols - i;
        store_n(out + i, mul(mul(load_n(x + i, n), factor), load_n(weight + i, n)), n);
    }
}

template <Gate gate>
LEGATO_INLINE Vec activate(Vec x) {
    if constexpr (gate == Gate::silu) {
        return mul(x, sigmoid(x));
    } else {  // 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        const Vec cube = mul(mul(x, x), x);
        const Vec u = fma(cube, splat(0.044715f), x);
        return mul(x, sigmoid(mul(u, splat(1.5957691216057308f))));
    }
}

}  // namespace legato::LEGATO_ISA
