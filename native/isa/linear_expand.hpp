// Packed weights to fp32, a block of k of one panel at a time: the same values as Matrix::unpack, bit for bit.
#pragma once

#include "matrix.hpp"
#include "quant.hpp"
#include "simd.hpp"

namespace legato::LEGATO_ISA {

LEGATO_INLINE std::int64_t factor_nbytes(const PanelLayout& w) { return panel_outputs * (w.half_scales ? 2 : 4); }

LEGATO_INLINE std::int64_t code_nbytes(const PanelLayout& w) {
    return w.group_nbytes - factor_nbytes(w) * (w.has_minimum ? 2 : 1);
}

// 16 scales or minima as fp32.
LEGATO_INLINE void load_factors(const std::byte* from, bool half, float* to) {
    for (int v = 0; v < panel_outputs; v += kLanes) {
        store(to + v,
              half ? load(reinterpret_cast<const Half*>(from) + v) : load(reinterpret_cast<const float*>(from) + v));
    }
}

// One quad of k, 16 outputs: dword o of `codes` holds four codes of output o.
LEGATO_INLINE void expand_quad(const std::byte* codes, int shift, std::uint32_t mask, std::int32_t zero_code,
                               const float* scale, const float* minimum, float* out) {
    std::uint32_t quad[panel_outputs];
    std::memcpy(quad, codes, sizeof quad);
    for (int b = 0; b < 4; ++b) {
        for (int o = 0; o < panel_outputs; ++o) {
            const auto code = static_cast<std::int32_t>(quad[o] >> (8 * b + shift) & mask);
            const float value = scale[o] * static_cast<float>(code - zero_code);
            out[b * panel_outputs + o] = minimum ? value + minimum[o] : value;
        }
    }
}

// fp32 values of k in [first, last) (multiples of the group), [k, 16] in `out`.
inline void expand_panel(const PanelLayout& w, const std::byte* panel, std::int64_t first, std::int64_t last,
                         float* out) {
    const std::byte* at = panel + first / w.group * w.group_nbytes;
    if (w.kind == WeightKind::f16 || w.kind == WeightKind::bf16) {
        const auto* bits = reinterpret_cast<const std::uint16_t*>(at);
        const std::int64_t count = (last - first) * panel_outputs;
        if (w.kind == WeightKind::f16) {
            for (std::int64_t i = 0; i < count; i += kLanes) store(out + i, load(bits + i));
        } else {
            for (std::int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(bits[i]);
        }
        return;
    }
    const bool nibbles = w.kind == WeightKind::q4;
    const std::int64_t factors = factor_nbytes(w), codes = code_nbytes(w);
    for (std::int64_t k = first; k < last; k += w.group, at += w.group_nbytes) {
        alignas(64) float scale[panel_outputs], minimum[panel_outputs];
        load_factors(at + codes, w.half_scales, scale);
        if (w.has_minimum) load_factors(at + codes + factors, w.half_scales, minimum);
        for (int quad = 0; quad < w.group / 4; ++quad, out += 4 * panel_outputs) {
            const std::byte* from = at + (nibbles ? quad % 4 : quad) * 64;
            const int shift = nibbles && quad >= 4 ? 4 : 0;
            const float* minima = w.has_minimum ? minimum : nullptr;
            expand_quad(from, shift, nibbles ? 15 : 255, w.zero, scale, minima, out);
        }
    }
}

}  // namespace legato::LEGATO_ISA
