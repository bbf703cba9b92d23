// Integer micro-kernel of one panel: R rows of integer activations by 16 outputs of 4- or 8-bit weights.
//
// Loop order: group of k, quad of k, row. One arithmetic for every instruction set, number of rows and thread:
//   dot = sum over the group of (q - zero) * a                   exact in int32, so its inner order is free
//   t   = scale_w * float(dot)                                   one rounding
//   sum = fma(t, scale_a, sum); sum = fma(minimum_w, scale_a * sum of a, sum)      groups in ascending order, from 0
// So a row's bits depend neither on the rows beside it nor on the kernel that did it. (Two are consistent in themselves
// only: the portable build, which has no fused multiply-add, and AVX2, whose activations are coarser, see
// quantised.hpp.)
#pragma once

#include "linear_expand.hpp"
#include "matrix.hpp"
#include "quantised.hpp"
#include "simd.hpp"

namespace legato::LEGATO_ISA {

// sums: [rows, 16], written. All rows are of one block of `x`.
using IntKernel = void (*)(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, float* sums);

enum class IntWeights { q4, q4_bytes, q8_group32, q8_group16 };

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
// stops (measured: a twelfth of a decode step at one row, a third at eight).
LEGATO_INLINE void fetch_ahead(const std::byte* at, std::int64_t nbytes) {
    for (std::int64_t line = 0; line < nbytes; line += 64) __builtin_prefetch(at + 2048 + line);
}

// For many rows a panel of nibbles is first unpacked to bytes, as IntWeights::q4_bytes: the 8-bit format, scales in
// fp32.
inline PanelLayout unpack_nibbles(const PanelLayout& w, const std::byte* panel, std::byte* out) {
    PanelLayout unpacked = w;
    unpacked.kind = WeightKind::q8;
    unpacked.half_scales = false;
    unpacked.group_nbytes = 512 + 64 * (w.has_minimum ? 2 : 1);
    const std::int64_t codes = code_nbytes(w), factors = factor_nbytes(w);
    for (std::int64_t g = 0; g < w.cols / 32; ++g, panel += w.group_nbytes, out += unpacked.group_nbytes) {
        fetch_ahead(panel, w.group_nbytes);
        for (int j = 0; j < 256; ++j) {
            out[j] = panel[j] & std::byte{15};
            out[j + 256] = panel[j] >> 4;
        }
        load_factors(panel + codes, w.half_scales, reinterpret_cast<float*>(out + 512));
        if (w.has_minimum) load_factors(panel + codes + factors, w.half_scales, reinterpret_cast<float*>(out + 576));
    }
    return unpacked;
}

// scale_a * sum of a of row `r` over weight group `g`: half of an activation group if the weight's groups are of 16.
template <bool Halves>
LEGATO_INLINE float scaled_sum(const QuantisedRows& x, std::int64_t r, std::int64_t g) {
    if constexpr (!Halves) return x.scaled_sums[g * x.stride + r];
    const std::int64_t at = g / 2 * x.stride + r;
    return x.scales[at] * static_cast<float>(-x.minus_halves[2 * at + g % 2]);
}

}  // namespace legato::LEGATO_ISA
