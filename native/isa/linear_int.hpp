// Integer micro-kernel of one panel: R rows of int8 activations by 16 outputs of 4- or 8-bit weights.
//
// Loop order: group of k, quad of k, row. One arithmetic for every instruction set, number of rows and thread:
//   dot = sum over the group of (q - zero) * a                   exact in int32, so its inner order is free
//   t   = scale_w * float(dot)                                   one rounding
//   sum = fma(t, scale_a, sum); sum = fma(minimum_w, scale_a * sum of a, sum)      groups in ascending order, from 0
// So a row's bits depend neither on the rows beside it nor on the kernel that did it. (The portable build has no fused
// multiply-add; it is consistent in itself.)
#pragma once

#include "linear_expand.hpp"
#include "matrix.hpp"
#include "quantised.hpp"
#include "simd.hpp"

namespace legato::LEGATO_ISA {

// sums: [rows, 16], written. All rows are of one block of `x`.
using IntKernel = void (*)(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, float* sums);

enum class IntWeights { q4, q8_group32, q8_group16 };

LEGATO_INLINE IntWeights int_weights(const PanelLayout& w) {
    if (w.kind == WeightKind::q4) return IntWeights::q4;
    return w.group == 32 ? IntWeights::q8_group32 : IntWeights::q8_group16;
}

// scale_a * sum of a of row `r` over weight group `g`: half of an activation group if the weight's groups are of 16.
template <bool Halves>
LEGATO_INLINE float scaled_sum(const QuantisedRows& x, std::int64_t r, std::int64_t g) {
    if constexpr (!Halves) return x.scaled_sums[g * x.stride + r];
    const std::int64_t at = g / 2 * x.stride + r;
    return x.scales[at] * static_cast<float>(-x.minus_halves[2 * at + g % 2]);
}

}  // namespace legato::LEGATO_ISA
