// The integer kernel's arithmetic (see linear_int.hpp) on AMX tiles, for blocks of 16 rows and pairs of panels.
//
// Loop order: block of 16 rows, pair of panels, batch of N groups, group, row. A tile product gives the exact int32
// dots of 16 rows by 16 outputs over one group; they go through memory that stays in L1, and vector code adds them to
// the fp32 sums with the same three roundings in the same ascending order of groups as the other kernels: rows keep
// their bits. Panels are unpacked to bytes once for all rows of an item and then come from L2. The tile products of a
// step are issued between the vector code of the step before, one for every 8 rows by 2 panels by 1 group, so that both
// units are busy.
#pragma once

#include "amx.hpp"
#include "linear_int_avx512.hpp"

namespace legato::LEGATO_ISA {

constexpr int amx_batch_max = 4;  // groups of one step

// Two panels, unpacked: one group of k.
struct alignas(64) AmxGroup {
    std::int8_t codes[2][1024];
    float factors[2][2][16];  // [scale, minimum][panel]
};

struct alignas(64) AmxScratch {
    std::int32_t dots[2][amx_batch_max][2][256];
    float sums[16][2][16];
};

// Tiles 0 and 1 hold activations, 2 and 3 weights, 4 to 7 sums.

// One group of one panel in the order of a B tile, less its zero: first 8 times, for the high plane of the activations,
// then as it is, for the low one.
LEGATO_INLINE void unpack_codes(const PanelLayout& w, const std::byte* at, std::int8_t* codes) {
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(w.zero));
    const __m512i five_bits = _mm512_set1_epi8(static_cast<char>(0xf8));
    const auto put = [&](int quad, __m512i code) __attribute__((always_inline)) {
        const __m512i value = _mm512_sub_epi8(code, shift);
        _mm512_store_si512(codes + quad * 64, _mm512_and_si512(_mm512_slli_epi16(value, 3), five_bits));
        _mm512_store_si512(codes + 512 + quad * 64, value);
    };
    if (w.kind == WeightKind::q4) {
        const __m512i low = _mm512_set1_epi8(15);
        unroll<4>([&](auto v) {
            const __m512i packed = _mm512_loadu_si512(at + v * 64);
            put(v, _mm512_and_si512(packed, low));
            put(v + 4, _mm512_and_si512(_mm512_srli_epi16(packed, 4), low));
        });
        return;
    }
    unroll<8>([&](auto quad) { put(quad, _mm512_loadu_si512(at + quad * 64)); });
}

template <bool Unsigned, int Sums, int X, int W>
LEGATO_INLINE void tile_product() {
    // The compiler does not see tiles, and the intrinsics want literal numbers.
    if constexpr (Unsigned) {
        asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(W), "i"(X), "i"(Sums));
    } else {
        asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(W), "i"(X), "i"(Sums));
    }
}

// One step: N groups of k for 16 rows and 2 panels.
struct AmxStep {
    const std::int8_t* activations;  // of the first row and group
    const AmxGroup* weights;         // first group
    std::int32_t* dots;
};

// The I-th of a step's 2 N tile products: group I / 2, panel I % 2.
template <bool Unsigned, int I>
LEGATO_INLINE void amx_product(const AmxStep& step) {
    constexpr int group = I / 2, panel = I % 2, activations = group % 2, weights = 2 + panel, sums = 4 + I % 4;
    if constexpr (panel == 0) {
        tile_load<activations>(step.activations + group * quant_block_rows * quant_nbytes, quant_nbytes);
    }
    tile_load<weights>(step.weights[group].codes[panel], 64);
    tile_zero<sums>();
    tile_product<Unsigned, sums, activations, weights>();
    tile_store<sums>(step.dots + I * 256, 64);
}

inline void unpack_pair(const PanelLayout& w, const std::byte* first, const std::byte* second, AmxGroup* out) {
    const std::int64_t codes = code_nbytes(w), factors = factor_nbytes(w);
    const std::byte* panels[2] = {first, second};
    for (std::int64_t g = 0; g < w.cols / w.group; ++g, ++out) {
        for (int p = 0; p < 2; ++p) {
            const std::byte* at = panels[p] + g * w.group_nbytes;
            unpack_codes(w, at, out->codes[p]);
            load_factors(at + codes, w.half_scales, out->factors[0][p]);
            if (w.has_minimum) load_factors(at + codes + factors, w.half_scales, out->factors[1][p]);
        }
    }
}

// A block of 16 rows by a pair of panels.
struct AmxBlock {
    const AmxGroup* weights;
    QuantisedRows x;
    const std::byte* fetch;     // packed panels to bring into L2 meanwhile, or null
    std::int64_t fetch_nbytes;  // for each group
};

LEGATO_INLINE AmxStep step_at(const AmxBlock& block, std::int64_t group, std::int32_t* dots) {
    return {block.x.codes + group * quant_block_rows * quant_nbytes, block.weights + group, dots};
}

// Adds the dots of groups [group, group + N) to the sums, issuing the products of `next` on the way.
template <bool Unsigned, bool Minimum, int N>
LEGATO_INLINE void amx_add(const AmxBlock& block, std::int64_t group, const std::int32_t* dots, float* all_sums,
                           const AmxStep* next) {
    unroll<2>([&](auto half) {
        float* sums = all_sums + half * 8 * 2 * panel_outputs;
        Vec acc[16];
        if (group == 0) {
            unroll<16>([&](auto i) { acc[i] = zero(); });
        } else {
            unroll<16>([&](auto i) { acc[i] = load(sums + i * 16); });
        }
        unroll<N>([&](auto g) {
            if (next) amx_product<Unsigned, half * N + g>(*next);
            if (half == 0 && block.fetch) {
                const std::byte* from = block.fetch + (group + g) * block.fetch_nbytes;
                for (std::int64_t line = 0; line < block.fetch_nbytes; line += 64)
                    __builtin_prefetch(from + line, 0, 2);
            }
            const auto& factors = block.weights[group + g].factors;
            const Vec scale[2] = {load(factors[0][0]), load(factors[0][1])};
            const Vec minimum[2] = {load(factors[1][0]), load(factors[1][1])};
            const float* scales = block.x.scales + (group + g) * quant_block_rows + 8 * half;
            unroll<8>([&](auto r) {
                const Vec scale_a = splat(scales[r]);
                const Vec sum_a = Minimum ? splat(scaled_sum<false>(block.x, 8 * half + r, group + g)) : zero();
                unroll<2>([&](auto p) {
                    const __m512i dot = _mm512_load_si512(dots + (g * 2 + p) * 256 + (8 * half + r) * 16);
                    Vec& sum = acc[r * 2 + p];
                    sum = fma(mul(scale[p], to_float(dot)), scale_a, sum);
                    if constexpr (Minimum) sum = fma(minimum[p], sum_a, sum);
                });
            });
        });
        unroll<16>([&](auto i) { store(sums + i * 16, acc[i]); });
    });
}

// Leaves the sums of `block` in scratch.sums. Its first products must have been issued: with `start`, or by the block
// before, which issues those of `next`. `parity` says which half of scratch.dots they are in, and is updated.
using AmxKernel = void (*)(const AmxBlock& block, std::int64_t groups, const AmxBlock* next, bool start, int& parity,
                           AmxScratch& scratch);

template <bool Unsigned, bool Minimum, int N>
[[gnu::flatten]] void amx_kernel(const AmxBlock& block, std::int64_t groups, const AmxBlock* next_block, bool start,
                                 int& parity, AmxScratch& scratch) {
    order_memory();
    if (start) {
        const AmxStep first = step_at(block, 0, scratch.dots[parity][0][0]);
        unroll<2 * N>([&](auto i) { amx_product<Unsigned, i>(first); });
    }
    for (std::int64_t group = 0; group < groups; group += N) {
        const std::int32_t* dots = scratch.dots[parity][0][0];
        parity ^= 1;
        std::int32_t* next_dots = scratch.dots[parity][0][0];
        AmxStep next{};
        const bool last = group + N == groups;
        if (!last) {
            next = step_at(block, group + N, next_dots);
        } else if (next_block) {
            next = step_at(*next_block, 0, next_dots);
        }
        order_memory();
        amx_add<Unsigned, Minimum, N>(block, group, dots, scratch.sums[0][0], !last || next_block ? &next : nullptr);
    }
    order_memory();
}

template <bool Unsigned, bool Minimum>
AmxKernel amx_kernel_of_batch(std::int64_t groups) {
    if (groups % 4 == 0) return amx_kernel<Unsigned, Minimum, 4>;
    if (groups % 3 == 0) return amx_kernel<Unsigned, Minimum, 3>;
    return amx_kernel<Unsigned, Minimum, 1>;
}

// Null for what is left to VNNI: codes of more than 5 bits, which do not fit a byte 8 times; groups of 16; and both or
// neither of a zero and minima (rare).
inline AmxKernel amx_kernel_for(const PanelLayout& w) {
    if (w.group == 16 || w.has_minimum != (w.zero == 0) || !w.five_bits) return nullptr;
    const std::int64_t groups = w.cols / w.group;
    return w.has_minimum ? amx_kernel_of_batch<true, true>(groups) : amx_kernel_of_batch<false, false>(groups);
}

}  // namespace legato::LEGATO_ISA
