// Integer micro-kernel of one panel: R rows of integer activations by 16 outputs of 4- or 8-bit weights.
//
// Loop order: group of k, quad of k, row. One arithmetic for every instruction set, number of rows and thread:
//   dot = sum over the group of (q - zero) * a                   exact in int32, so its inner order is free
//         (equalised: of (q - zero) * 2^shift * a, the factor on q: up to 240, a byte)
//   t   = scale_w * float(dot)                                   one rounding
//   sum = fma(t, scale_a, sum); sum = fma(minimum_w, scale_a * sum of a, sum)      groups in ascending order, from 0
// So a row's bits depend neither on the rows beside it nor on the kernel that did it. (Two are consistent in themselves
// only: the portable build, which has no fused multiply-add, and those that equalise activations, see quantised.hpp.)
#pragma once

#include "linear_expand.hpp"
#include "matrix.hpp"
#include "quantised.hpp"
#include "simd.hpp"

namespace legato::LEGATO_ISA {

// sums: [rows, 16], written. All rows are of one block of `x`.
using IntKernel = void (*)(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, float* sums);

// Packed nibbles; nibbles unpacked to bytes; bytes; and bytes already times an equaliser's powers.
enum class IntWeights { q4, q4_bytes, q8_group32, q8_group16, q8_group32_scaled, q8_group16_scaled };

constexpr bool groups_of_16(IntWeights weights) {
    return weights == IntWeights::q8_group16 || weights == IntWeights::q8_group16_scaled;
}

// Whether a micro-kernel of equalised activations has to apply the powers itself.
constexpr bool scales_codes(IntWeights weights) {
    return weights == IntWeights::q4 || weights == IntWeights::q8_group32 || weights == IntWeights::q8_group16;
}

LEGATO_INLINE IntWeights int_weights(const PanelLayout& w) {
    if (w.kind == WeightKind::q4) return IntWeights::q4;
    return w.group == 32 ? IntWeights::q8_group32 : IntWeights::q8_group16;
}

// Room for a panel as AMX or, if it is of nibbles, the other kernels unpack it.
LEGATO_INLINE std::int64_t unpacked_nbytes(const PanelLayout& w) {
#if LEGATO_ISA_AMX
    return w.cols / w.group * (1024 + 2 * 64);
#else
    return w.cols / w.group * (512 + 2 * 64);
#endif
}

// Weights that come from memory are fetched this far ahead, across the pages at which the hardware's own prefetching
// stops (measured on a Zen 5: a decode step of 8 takes 4.3 ms, 5.0 without).
LEGATO_INLINE void fetch_ahead(const std::byte* at, std::int64_t nbytes) {
    for (std::int64_t line = 0; line < nbytes; line += 64) __builtin_prefetch(at + 8192 + line);
}

// scale_a * sum of a of row `r` over weight group `g`: half of an activation group if the weight's groups are of 16.
template <bool Halves>
LEGATO_INLINE float scaled_sum(const QuantisedRows& x, std::int64_t r, std::int64_t g) {
    if constexpr (!Halves) return x.scaled_sums[g * x.stride + r];
    const std::int64_t at = g / 2 * x.stride + r;
    return x.scales[at] * static_cast<float>(-x.minus_halves[2 * at + g % 2]);
}

}  // namespace legato::LEGATO_ISA
