// The integer kernel (see linear_int.hpp). Equalised activations, int8: vpmaddubsw sums their products with codes of 4
// bits in 16 bits over half a group (see quant_shifts), which are then widened; 8-bit codes are taken as two nibbles.
// Others, of 11 bits in int16: vpmaddwd, at the price of those two nibbles. Eight outputs at a time for several rows;
// both halves of the panel in one pass for one row.
#pragma once

#include "linear_unpack.hpp"

namespace legato::LEGATO_ISA {

constexpr int int_rows = 6;  // 6 sums of 16 bits and 6 fp32 sums, for one half of the panel

LEGATO_INLINE Vec load_factors(const std::byte* from, bool half, int first) {
    return half ? load(reinterpret_cast<const Half*>(from) + first)
                : load(reinterpret_cast<const float*>(from) + first);
}

// sum + the products of one quad of k, or those alone.
LEGATO_INLINE __m256i add_quad(__m256i sum, __m256i codes, __m256i activations, bool first) {
    const __m256i products = _mm256_maddubs_epi16(codes, activations);
    sum = first ? products : _mm256_add_epi16(sum, products);
    asm("" : "+x"(sum));  // GCC would turn the chain of sums into a tree, whose leaves do not fit in registers
    return sum;
}

LEGATO_INLINE void add_products(__m256i& sum, __m256i codes, __m256i activations, bool first) {
    const __m256i products = _mm256_madd_epi16(codes, activations);
    sum = first ? products : _mm256_add_epi32(sum, products);
    asm("" : "+x"(sum));
}

// Codes of one quad of k and eight outputs, to bytes where they are packed.
template <bool Nibbles>
LEGATO_INLINE __m256i load_quad(const std::byte* at, int quad, int half) {
    const __m256i codes =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + (Nibbles ? quad % 4 : quad) * 64 + half * 32));
    return !Nibbles ? codes : quad < 4 ? low_nibbles(codes) : high_nibbles(codes);
}

LEGATO_INLINE __m256i widen(__m256i sums, short factor) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(factor)); }

// dot[r * H + h] of a group of codes below 16; packed ones are multiplied by an equaliser's `powers` here.
template <bool Nibbles, int R, int H>
LEGATO_INLINE void dots_of_nibbles(const std::byte* at, const std::uint32_t* powers, const std::int8_t* activations,
                                   __m256i* dot) {
    constexpr int spans = 2, quads = 8 / spans;
    unroll<spans>([&](auto span) __attribute__((always_inline)) {
        __m256i sum[R * H];
        unroll<quads>([&](auto i) __attribute__((always_inline)) {
            constexpr int quad = span * quads + i;
            __m256i codes[H];
            unroll<H>([&](auto h) __attribute__((always_inline)) {
                codes[h] = load_quad<Nibbles>(at, quad, h);
                if constexpr (Nibbles) codes[h] = scale_quad(codes[h], powers + 2 * quad);
            });
            unroll<R>([&](auto r) __attribute__((always_inline)) {
                const __m256i a = splat_dword(activations + r * quant_group + quad * 4);
                unroll<H>([&](auto h) __attribute__((always_inline)) {
                    sum[r * H + h] = add_quad(sum[r * H + h], codes[h], a, i == 0);
                });
            });
        });
        unroll<R * H>([&](auto n) __attribute__((always_inline)) {
            const __m256i wide = widen(sum[n], 1);
            dot[n] = span == 0 ? wide : _mm256_add_epi32(dot[n], wide);
        });
    });
}

// The same for 8-bit codes: low nibbles, and 16 times the high ones.
template <int Quads, bool Scaled, int R, int H>
LEGATO_INLINE void dots_of_bytes(const std::byte* at, const std::uint32_t* powers, const std::int8_t* activations,
                                 __m256i* dot) {
    __m256i low[R * H], high[R * H];
    unroll<Quads>([&](auto quad) __attribute__((always_inline)) {
        __m256i codes[H];
        unroll<H>([&](auto h) __attribute__((always_inline)) {
            codes[h] = load_quad<false>(at, quad, h);
            if constexpr (Scaled) codes[h] = scale_quad(codes[h], powers + 2 * quad);
        });
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            const __m256i a = splat_dword(activations + r * quant_group + quad * 4);
            unroll<H>([&](auto h) __attribute__((always_inline)) {
                low[r * H + h] = add_quad(low[r * H + h], low_nibbles(codes[h]), a, quad == 0);
                high[r * H + h] = add_quad(high[r * H + h], high_nibbles(codes[h]), a, quad == 0);
            });
        });
    });
    unroll<R * H>([&](auto n) __attribute__((always_inline)) {
        dot[n] = _mm256_add_epi32(widen(low[n], 1), widen(high[n], 16));
    });
}

// The same for activations in 16 bits and codes of up to 8, packed nibbles or bytes.
template <bool Nibbles, int Quads, int R, int H>
LEGATO_INLINE void dots_of_words(const std::byte* at, const std::int8_t* activations, __m256i* dot) {
    __m256i low[R * H], high[R * H];  // two sums an output, of outputs 0, 1, 4, 5 and 2, 3, 6, 7
    unroll<Quads>([&](auto quad) __attribute__((always_inline)) {
        __m256i low_codes[H], high_codes[H];
        unroll<H>([&](auto h) __attribute__((always_inline)) {
            const __m256i codes = load_quad<Nibbles>(at, quad, h);
            low_codes[h] = _mm256_unpacklo_epi8(codes, _mm256_setzero_si256());
            high_codes[h] = _mm256_unpackhi_epi8(codes, _mm256_setzero_si256());
        });
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            const __m256i a = splat_qword(activations + r * quant_nbytes + quad * 8);
            unroll<H>([&](auto h) __attribute__((always_inline)) {
                add_products(low[r * H + h], low_codes[h], a, quad == 0);
                add_products(high[r * H + h], high_codes[h], a, quad == 0);
            });
        });
    });
    unroll<R * H>([&](auto n) __attribute__((always_inline)) { dot[n] = _mm256_hadd_epi32(low[n], high[n]); });
}

// H halves of 8 outputs from output 8 * `half_index` on.
template <IntWeights W, int R, bool Equalised, int H>
LEGATO_INLINE void int_half(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, int half_index,
                            float* sums) {
    constexpr bool halves = groups_of_16(W);
    constexpr bool nibbles = W == IntWeights::q4;
    constexpr bool small = nibbles || W == IntWeights::q4_bytes;
    constexpr int group = halves ? 16 : 32;
    constexpr int codes = group / (nibbles ? 8 : 4) * 64;
    constexpr int nbytes = Equalised ? quant_group : quant_nbytes;  // of one row's activations
    constexpr int N = R * H;
    const std::int64_t factors = factor_nbytes(w), groups = w.cols / group;
    const std::int8_t* a = x.codes;
    const float* scales = x.scales;
    const std::int16_t* minus = x.minus_halves;
    const std::uint32_t* powers = Equalised ? x.equaliser->factors() : nullptr;
    const std::byte* at = panel + 32 * half_index;
    Vec acc[N];
    unroll<N>([&](auto i) { acc[i] = zero(); });
    for (std::int64_t g = 0; g < groups; ++g, at += w.group_nbytes) {
        const std::int8_t* activations = a + (halves ? g % 2 * (nbytes / 2) : 0);
        if (scales_codes(W) && half_index == 0) fetch_ahead(at, codes + 64);
        __m256i dot[N];
        if constexpr (!Equalised) {
            dots_of_words<nibbles, group / 4, R, H>(at, activations, dot);
        } else if constexpr (small) {
            dots_of_nibbles<nibbles, R, H>(at, powers, activations, dot);
        } else {
            dots_of_bytes<group / 4, scales_codes(W), R, H>(at, powers, activations, dot);
        }
        const std::byte* factor = at - 32 * half_index + codes;
        unroll<H>([&](auto h) {
            const Vec scale = load_factors(factor, w.half_scales, 8 * (half_index + h));
            unroll<R>([&](auto r) {
                constexpr int i = r * H + h;
                if (w.zero != 0) {
                    const int pair = !halves ? w.zero * 0x10001 : g % 2 ? w.zero << 16 : w.zero;
                    const __m256i sum_a = splat_dword(minus + 2 * r);
                    dot[i] = _mm256_add_epi32(dot[i], _mm256_madd_epi16(sum_a, _mm256_set1_epi32(pair)));
                }
                acc[i] = fma(mul(scale, _mm256_cvtepi32_ps(dot[i])), splat(scales[r]), acc[i]);
            });
            if (w.has_minimum) {
                const Vec minimum = load_factors(factor + factors, w.half_scales, 8 * (half_index + h));
                unroll<R>(
                    [&](auto r) { acc[r * H + h] = fma(minimum, splat(scaled_sum<halves>(x, r, g)), acc[r * H + h]); });
            }
        });
        if constexpr (Equalised) powers += group / 2;
        if (!halves || g % 2) {
            a += x.stride * nbytes;
            scales += x.stride;
            minus += 2 * x.stride;
        }
    }
    unroll<R>([&](auto r) {
        unroll<H>([&](auto h) { store(sums + r * panel_outputs + 8 * (half_index + h), acc[r * H + h]); });
    });
}

template <IntWeights W, int R, bool Equalised>
[[gnu::flatten]] void int_kernel(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, float* sums) {
    if constexpr (R == 1) {
        int_half<W, 1, Equalised, 2>(w, panel, x, 0, sums);
    } else {
        for (int half_index = 0; half_index < 2; ++half_index)
            int_half<W, R, Equalised, 1>(w, panel, x, half_index, sums);
    }
}

}  // namespace legato::LEGATO_ISA
