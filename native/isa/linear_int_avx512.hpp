// The integer kernel (see linear_int.hpp) with VNNI: one vpdpbusd multiplies a quad of k of 16 outputs with one row's
// four activations, broadcast from memory. Weights are unpacked once for all R rows.
#pragma once

#include "linear_unpack.hpp"

namespace legato::LEGATO_ISA {

constexpr int int_rows = 12;  // 12 int32 sums and 12 fp32 sums in registers

// vcvtdq2ps; GCC 12 warns about the undefined operand inside its own intrinsic.
LEGATO_INLINE Vec to_float(__m512i x) {
    typedef std::int32_t Ints __attribute__((vector_size(64)));
    return __builtin_convertvector(reinterpret_cast<Ints>(x), Vec);
}

LEGATO_INLINE Vec load_factors(const std::byte* from, bool half) {
    return half ? load(reinterpret_cast<const Half*>(from)) : load(reinterpret_cast<const float*>(from));
}

template <IntWeights W, int R, bool Equalised>
[[gnu::flatten]] void int_kernel(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, float* sums) {
    constexpr bool halves = groups_of_16(W);
    constexpr int Planes = Equalised ? 1 : 2;
    constexpr bool shifted = Equalised && scales_codes(W);
    constexpr int group = halves ? 16 : 32;
    constexpr int quads = group / 4;
    constexpr int vectors = W == IntWeights::q4 ? quads / 2 : quads;
    constexpr int codes = vectors * 64;
    constexpr int nbytes = Planes * static_cast<int>(quant_group);
    const std::int64_t factors = factor_nbytes(w), groups = w.cols / group;
    // With few rows each plane of the activations has sums of its own; with more, registers are left for one, and the
    // planes take turns.
    constexpr bool together = R <= 8;
    const __m512i low = _mm512_set1_epi8(15);
    // Zero is subtracted as (-sum of a) * zero with one vpdpwssd on the two int16 half sums.
    const int zero_pair = w.zero * 0x10001;
    const std::int8_t* a = x.codes;
    const float* scales = x.scales;
    const std::int16_t* minus = x.minus_halves;
    const std::uint32_t* powers = shifted ? x.equaliser->factors() : nullptr;
    Vec acc[R];
    unroll<R>([&](auto r) { acc[r] = zero(); });
    for (std::int64_t g = 0; g < groups; ++g, panel += w.group_nbytes) {
        if constexpr (scales_codes(W)) fetch_ahead(panel, codes + 64);
        __m512i dot[R];
        if (w.zero != 0) {
            const __m512i zeros = _mm512_set1_epi32(!halves ? zero_pair : g % 2 ? w.zero << 16 : w.zero);
            unroll<R>([&](auto r) {
                dot[r] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), zeros, splat_dword(minus + 2 * r));
            });
        } else {
            unroll<R>([&](auto r) { dot[r] = _mm512_setzero_si512(); });
        }
        const std::int8_t* activations = a + (halves ? g % 2 * 16 : 0);
        const auto add_plane = [&](__m512i* sums, __m512i weights, const std::int8_t* plane,
                                   auto q) __attribute__((always_inline)) {
            unroll<R>([&](auto r) {
                sums[r] = _mm512_dpbusd_epi32(sums[r], weights, splat_dword(plane + r * nbytes + q * 4));
            });
        };
        // Calls f(weights, quad) for all quads of the group.
        const auto for_quads = [&](auto f) __attribute__((always_inline)) {
            unroll<vectors>([&](auto v) {
                const __m512i packed = _mm512_loadu_si512(panel + v * 64);
                if constexpr (W == IntWeights::q4) {
                    const __m512i first = _mm512_and_si512(packed, low),
                                  second = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
                    f(shifted ? scale_quad(first, powers + 2 * v) : first, v);
                    f(shifted ? scale_quad(second, powers + 2 * v + 8) : second, std::integral_constant<int, v + 4>{});
                } else {
                    f(shifted ? scale_quad(packed, powers + 2 * v) : packed, v);
                }
            });
        };
        if constexpr (Planes == 1) {
            for_quads([&](__m512i weights, auto q)
                          __attribute__((always_inline)) { add_plane(dot, weights, activations, q); });
        } else {
            __m512i high[R];
            unroll<R>([&](auto r) { high[r] = _mm512_setzero_si512(); });
            const auto join = [&] {
                unroll<R>([&](auto r) { dot[r] = _mm512_add_epi32(dot[r], _mm512_slli_epi32(high[r], 3)); });
            };
            if constexpr (together) {
                for_quads([&](__m512i weights, auto q) __attribute__((always_inline)) {
                    add_plane(high, weights, activations, q);
                    add_plane(dot, weights, activations + quant_group, q);
                });
                join();
            } else {
                for_quads([&](__m512i weights, auto q)
                              __attribute__((always_inline)) { add_plane(high, weights, activations, q); });
                join();
                for_quads([&](__m512i weights, auto q) __attribute__((always_inline)) {
                    add_plane(dot, weights, activations + quant_group, q);
                });
            }
        }
        const Vec scale = load_factors(panel + codes, w.half_scales);
        unroll<R>([&](auto r) { acc[r] = fma(mul(scale, to_float(dot[r])), splat(scales[r]), acc[r]); });
        if (w.has_minimum) {
            const Vec minimum = load_factors(panel + codes + factors, w.half_scales);
            unroll<R>([&](auto r) { acc[r] = fma(minimum, splat(scaled_sum<halves>(x, r, g)), acc[r]); });
        }
        if constexpr (shifted) powers += group / 2;
        if (!halves || g % 2) {
            a += x.stride * nbytes;
            scales += x.stride;
            minus += 2 * x.stride;
        }
    }
    unroll<R>([&](auto r) { store(sums + r * panel_outputs, acc[r]); });
}

}  // namespace legato::LEGATO_ISA
