// The linear layer on AMX tiles of bf16: 4- and 8-bit weights are expanded, scale and minimum applied, to bf16; so are
// the activations; products are summed in fp32 inside the tiles.
//
// Loop order: pair of panels, pair of blocks of 16 rows, 32 of k. A tile computes each of its rows by itself, over k in
// ascending order, one product after the other: a row's bits do not depend on its company, and one row takes the same
// products as 512. Panels are expanded once for all rows of an item.
#pragma once

#include "amx.hpp"
#include "linear_int_avx512.hpp"

namespace legato::LEGATO_ISA {

constexpr std::int64_t bf16_rows = 16;           // of a tile
constexpr std::int64_t bf16_tile_nbytes = 1024;  // 16 rows of 32 bf16

// bf16 activations: [block of 16 rows][32 of k][row][32].
LEGATO_INLINE std::byte* bf16_block(const Quantised& x, std::int64_t row) {
    return x.storage + row / bf16_rows * (x.cols / quant_group) * bf16_tile_nbytes;
}

LEGATO_INLINE std::size_t bf16_nbytes(std::int64_t rows, std::int64_t cols) {
    return static_cast<std::size_t>((rows + bf16_rows - 1) / bf16_rows * (cols / quant_group) * bf16_tile_nbytes);
}

inline void bf16_convert_rows(const Rows& x, const Quantised& out, std::int64_t begin, std::int64_t end) {
    const std::int64_t groups = x.cols / quant_group;
    for (std::int64_t r = begin; r < end; ++r) {
        const float* from = x.data + r * x.stride;
        std::byte* to = bf16_block(out, r) + r % bf16_rows * 64;
        for (std::int64_t g = 0; g < groups; ++g, from += quant_group, to += bf16_tile_nbytes) {
            unroll<2>([&](auto h) {
                const __m512i bits = _mm512_srli_epi32(bf16_bits(load(from + 16 * h)), 16);
                _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32 * h), _mm512_maskz_cvtepi32_epi16(0xffff, bits));
            });
        }
    }
    // Rows that fill up the last block; a single block is as high as it has rows.
    if (end == out.rows && end > bf16_rows && end % bf16_rows != 0) {
        for (std::int64_t g = 0; g < groups; ++g)
            std::memset(bf16_block(out, end) + g * bf16_tile_nbytes + end % bf16_rows * 64, 0,
                        static_cast<std::size_t>(bf16_rows - end % bf16_rows) * 64);
    }
}

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights; for few rows the first six are as high as those.
inline void configure_bf16_tiles(std::int64_t rows) { configure_tiles(6, rows < bf16_rows ? rows : bf16_rows); }

// One panel as weight tiles, [32 of k][pair of k][output][2].
template <int Group, bool Nibbles>
[[gnu::flatten]] void expand_bf16(const PanelLayout& w, const std::byte* at, std::byte* out) {
    constexpr int quads = Group / 4, vectors = Nibbles ? quads / 2 : quads;
    const std::int64_t codes = code_nbytes(w), factors = factor_nbytes(w);
    const Vec minus_zero = splat(static_cast<float>(-w.zero));
    // A permutation looks at the low four bits of its index only.
    const Vec nibbles = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i byte = _mm512_set1_epi32(255);
    for (std::int64_t g = 0; g < w.cols / Group; ++g, at += w.group_nbytes, out += Group * 32) {
        fetch_ahead(at, w.group_nbytes);
        const Vec scale = load_factors(at + codes, w.half_scales);
        // value = scale * q + (minimum - scale * zero)
        const Vec start = w.has_minimum ? load_factors(at + codes + factors, w.half_scales) : zero();
        const Vec base = fma(scale, minus_zero, start);
        // The code of output o, `shift` bits up in dword o, as a value.
        const auto value = [&](__m512i quad, auto shift) __attribute__((always_inline)) {
            const __m512i code = _mm512_srli_epi32(quad, shift);
            const Vec q = Nibbles ? _mm512_permutexvar_ps(code, nibbles) : to_float(_mm512_and_si512(code, byte));
            return bf16_bits(fma(scale, q, base));
        };
        const auto put = [&](__m512i quad, auto first, std::byte* to) __attribute__((always_inline)) {
            const __m512i low = value(quad, first), high = value(quad, std::integral_constant<int, first + 8>{});
            _mm512_store_si512(to, join_bf16(low, high));
        };
        unroll<vectors>([&](auto v) __attribute__((always_inline)) {
            const __m512i packed = _mm512_loadu_si512(at + v * 64);
            put(packed, std::integral_constant<int, 0>{}, out + v * 128);
            put(packed, std::integral_constant<int, 16>{}, out + v * 128 + 64);
            if constexpr (Nibbles) {
                put(packed, std::integral_constant<int, 4>{}, out + (v + vectors) * 128);
                put(packed, std::integral_constant<int, 20>{}, out + (v + vectors) * 128 + 64);
            }
        });
    }
}

inline void expand_bf16_panel(const PanelLayout& w, const std::byte* panel, std::byte* out) {
    if (w.kind == WeightKind::q4) return expand_bf16<32, true>(w, panel, out);
    if (w.group == 32) return expand_bf16<32, false>(w, panel, out);
    expand_bf16<16, false>(w, panel, out);
}

// sums[16 RowBlocks][2][16]: `RowBlocks` blocks of rows, `x_stride` bytes apart, by two panels; of an odd panel the
// second is the first again, and its sums are dropped.
template <int RowBlocks>
LEGATO_INLINE void bf16_products(const std::byte* x, std::int64_t x_stride, const std::byte* first,
                                 const std::byte* second, std::int64_t groups, float* sums) {
    order_memory();
    unroll<2 * RowBlocks>([&](auto t) __attribute__((always_inline)) { tile_zero<t>(); });
    for (std::int64_t g = 0; g < groups; ++g) {
        tile_load<4>(x + g * bf16_tile_nbytes, 64);
        tile_load<6>(first + g * bf16_tile_nbytes, 64);
        tile_load<7>(second + g * bf16_tile_nbytes, 64);
        tile_product_bf16<0, 4, 6>();
        tile_product_bf16<1, 4, 7>();
        if constexpr (RowBlocks == 2) {
            tile_load<5>(x + x_stride + g * bf16_tile_nbytes, 64);
            tile_product_bf16<2, 5, 6>();
            tile_product_bf16<3, 5, 7>();
        }
    }
    unroll<2 * RowBlocks>([&](auto t) __attribute__((always_inline)) {
        tile_store<t>(sums + (t / 2 * bf16_rows * 2 + t % 2) * panel_outputs, 2 * panel_outputs * 4);
    });
    order_memory();
}

}  // namespace legato::LEGATO_ISA
