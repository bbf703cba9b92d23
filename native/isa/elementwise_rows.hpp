// RMS norm of one row: used for whole rows and for single heads.
#pragma once

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

}  // namespace legato::LEGATO_ISA
