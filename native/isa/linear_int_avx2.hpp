// The integer kernel (see linear_int.hpp) with vpmaddubsw: products of 4-bit codes and int8 activations are summed in
// 16 bits over a whole group of 32 (15 * 127 * 16 = 30480 at most) and widened once. 8-bit codes are taken as two
// nibbles. Eight outputs at a time for several rows; both halves of the panel in one pass for one row.
#pragma once

#include "linear_unpack.hpp"

namespace legato::LEGATO_ISA {

constexpr int int_rows = 6;  // 6 sums of 16 bits and 6 fp32 sums, for one half of the panel

LEGATO_INLINE __m256i splat_dword(const void* p) {
    std::int32_t dword;
    std::memcpy(&dword, p, sizeof dword);
    return _mm256_set1_epi32(dword);
}

LEGATO_INLINE Vec load_factors(const std::byte* from, bool half, int first) {
    return half ? load(reinterpret_cast<const Half*>(from) + first)
                : load(reinterpret_cast<const float*>(from) + first);
}

LEGATO_INLINE __m256i low_nibbles(__m256i packed) { return _mm256_and_si256(packed, _mm256_set1_epi8(15)); }
LEGATO_INLINE __m256i high_nibbles(__m256i packed) { return low_nibbles(_mm256_srli_epi16(packed, 4)); }

// H halves of 8 outputs from output 8 * `half_index` on.
template <IntWeights W, int R, int H>
LEGATO_INLINE void int_half(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, int half_index,
                            float* sums) {
    constexpr bool halves = W == IntWeights::q8_group16;
    constexpr bool nibbles = W == IntWeights::q4;
    constexpr bool small = nibbles || W == IntWeights::q4_bytes;  // codes below 16: one sum of 16 bits holds a group
    constexpr int group = halves ? 16 : 32;
    constexpr int vectors = group / (nibbles ? 8 : 4);
    constexpr int codes = vectors * 64;
    constexpr int N = R * H;
    const std::int64_t factors = factor_nbytes(w), groups = w.cols / group;
    const std::int8_t* a = x.codes;
    const float* scales = x.scales;
    const std::int16_t* minus = x.minus_halves;
    const std::byte* at = panel + 32 * half_index;
    Vec acc[N];
    unroll<N>([&](auto i) { acc[i] = zero(); });
    for (std::int64_t g = 0; g < groups; ++g, at += w.group_nbytes) {
        const std::int8_t* activations = a + (halves ? g % 2 * 16 : 0);
        if (W != IntWeights::q4_bytes && half_index == 0) fetch_ahead(at, codes + 64);
        __m256i low[N], high[small ? 1 : N];
        unroll<vectors>([&](auto v) {
            constexpr bool start = v == 0;
            __m256i packed[H];
            unroll<H>([&](auto h) {
                packed[h] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + v * 64 + h * 32));
            });
            // Adds the products of one quad of k to `sum`, or starts it.
            const auto products = [&](__m256i codes_of_quad, __m256i activations, __m256i& sum,
                                      bool first) __attribute__((always_inline)) {
                const __m256i p = _mm256_maddubs_epi16(codes_of_quad, activations);
                sum = first ? p : _mm256_add_epi16(sum, p);
                asm(""
                    : "+x"(sum));  // GCC would turn the chain of sums into a tree, whose leaves do not fit in registers
            };
            unroll<R>([&](auto r) {
                const __m256i quad = splat_dword(activations + r * quant_nbytes + v * 4);
                unroll<H>([&](auto h) {
                    products(W == IntWeights::q4_bytes ? packed[h] : low_nibbles(packed[h]), quad, low[r * H + h],
                             start);
                });
                if constexpr (!small) {
                    unroll<H>([&](auto h) { products(high_nibbles(packed[h]), quad, high[r * H + h], start); });
                }
            });
            if constexpr (nibbles) {
                unroll<R>([&](auto r) {
                    const __m256i quad = splat_dword(activations + r * quant_nbytes + 16 + v * 4);
                    unroll<H>([&](auto h) { products(high_nibbles(packed[h]), quad, low[r * H + h], false); });
                });
            }
        });
        const std::byte* factor = at - 32 * half_index + codes;
        unroll<H>([&](auto h) {
            const Vec scale = load_factors(factor, w.half_scales, 8 * (half_index + h));
            unroll<R>([&](auto r) {
                constexpr int i = r * H + h;
                __m256i dot = _mm256_madd_epi16(low[i], _mm256_set1_epi16(1));
                if constexpr (!small) dot = _mm256_add_epi32(dot, _mm256_madd_epi16(high[i], _mm256_set1_epi16(16)));
                if (w.zero != 0) {
                    const int pair = !halves ? w.zero * 0x10001 : g % 2 ? w.zero << 16 : w.zero;
                    const __m256i sum_a = splat_dword(minus + 2 * r);
                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(sum_a, _mm256_set1_epi32(pair)));
                }
                acc[i] = fma(mul(scale, _mm256_cvtepi32_ps(dot)), splat(scales[r]), acc[i]);
            });
            if (w.has_minimum) {
                const Vec minimum = load_factors(factor + factors, w.half_scales, 8 * (half_index + h));
                unroll<R>(
                    [&](auto r) { acc[r * H + h] = fma(minimum, splat(scaled_sum<halves>(x, r, g)), acc[r * H + h]); });
            }
        });
        if (!halves || g % 2) {
            a += x.stride * quant_nbytes;
            scales += x.stride;
            minus += 2 * x.stride;
        }
    }
    unroll<R>([&](auto r) {
        unroll<H>([&](auto h) { store(sums + r * panel_outputs + 8 * (half_index + h), acc[r * H + h]); });
    });
}

template <IntWeights W, int R, int>
[[gnu::flatten]] void int_kernel(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, float* sums) {
    if constexpr (R == 1) {
        int_half<W, 1, 2>(w, panel, x, 0, sums);
    } else {
        for (int half_index = 0; half_index < 2; ++half_index) int_half<W, R, 1>(w, panel, x, half_index, sums);
    }
}

}  // namespace legato::LEGATO_ISA
