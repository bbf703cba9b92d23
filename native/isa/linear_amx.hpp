// The integer kernel's arithmetic (see linear_int.hpp) on AMX tiles, for blocks of 16 rows and pairs of panels.
//
// Loop order: block of k, block of 16 rows, batch of N groups, group, row. A tile product gives the exact int32 dots of 16
// rows by 16 outputs over one group; they go through memory that stays in L1, and vector code adds them to the fp32 sums
// with the same three roundings in the same ascending order of groups as the other kernels: rows keep their bits. Weights
// are unpacked to signed bytes once for all rows. The tile products of a step are issued between the vector code of the
// step before, one for every 8 rows by 2 panels by 1 group, so that both units are busy.
#pragma once

#include "linear_int_avx512.hpp"

namespace legato::LEGATO_ISA {

constexpr int amx_groups = 24;     // of a block of k: 24 KiB of unpacked codes for two panels
constexpr int amx_batch_max = 4;   // groups of one step
constexpr int amx_row_chunk = 256;  // rows a panel pair is unpacked for

struct alignas(64) AmxScratch {
    std::int8_t codes[amx_groups][2][512];
    float factors[amx_groups][2][2][16];  // [group][scale, minimum][panel]
    std::int32_t dots[2][amx_batch_max][2][256];
    float sums[amx_row_chunk][2][16];
};

struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_nbytes[16] = {32, 32, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 8, 8, 16, 16, 16, 16};
};

// Tiles 0 and 1 hold activations, 2 and 3 weights, 4 to 7 sums. Every thread configures its tiles before and releases after.
inline void configure_tiles() {
    const TileConfig config;
    _tile_loadconfig(&config);
}

struct AmxItem {
    const PanelLayout* w;
    const std::byte* panels[2];
    const Quantised* x;
    std::int64_t row, row_count;  // row is a multiple of 16, row_count <= amx_row_chunk; rows up to the next multiple of 16 are computed too
};

// Signed (or, if zero is 0, unsigned) bytes of one group of one panel in the order of a B tile; a group of 16 is padded with
// zero codes on the side of the other half.
LEGATO_INLINE void unpack_codes(const PanelLayout& w, const std::byte* at, std::int64_t g, std::int8_t* codes) {
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(w.zero));
    if (w.kind == WeightKind::q4) {
        const __m512i low = _mm512_set1_epi8(15);
        unroll<4>([&](auto v) {
            const __m512i packed = _mm512_loadu_si512(at + v * 64);
            const __m512i first = _mm512_and_si512(packed, low);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
            _mm512_store_si512(codes + v * 64, _mm512_sub_epi8(first, shift));
            _mm512_store_si512(codes + 256 + v * 64, _mm512_sub_epi8(second, shift));
        });
        return;
    }
    const int quads = w.group / 4, begin = w.group == 32 ? 0 : static_cast<int>(g % 2) * quads;
    for (int quad = 0; quad < 8; ++quad) {
        const bool inside = quad >= begin && quad < begin + quads;
        const __m512i packed = inside ? _mm512_loadu_si512(at + (quad - begin) * 64) : shift;
        _mm512_store_si512(codes + quad * 64, _mm512_sub_epi8(packed, shift));
    }
}

// Orders tile loads and stores, whose memory the compiler is not told of, against everything else. Not inside a step: it
// would force the sums in registers to the stack.
LEGATO_INLINE void order_memory() { asm volatile("" ::: "memory"); }

template <bool Unsigned, int Sums, int Activations, int Weights>
LEGATO_INLINE void tile_product() {
    // The compiler does not see tiles, and the intrinsics want literal numbers.
    if constexpr (Unsigned) {
        asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(Weights), "i"(Activations), "i"(Sums));
    } else {
        asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(Weights), "i"(Activations), "i"(Sums));
    }
}

template <int Tile>
LEGATO_INLINE void tile_load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile));
}

template <int Tile>
LEGATO_INLINE void tile_store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile));
}

template <int Tile>
LEGATO_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// One step: N groups of k for 16 rows and 2 panels.
struct AmxStep {
    const std::int8_t* activations;  // of the first row and group
    const std::int8_t* weights;      // of the first group
    std::int32_t* dots;
    int first_half;  // of the first group, if groups are of 16
};

// The I-th of a step's 2 N tile products: group I / 2, panel I % 2.
template <bool Unsigned, bool Halves, int I>
LEGATO_INLINE void amx_product(const AmxStep& step) {
    constexpr int group = I / 2, panel = I % 2, activations = group % 2, weights = 2 + panel, sums = 4 + I % 4;
    if constexpr (panel == 0) {
        const int activation_group = Halves ? (step.first_half + group) / 2 : group;
        tile_load<activations>(step.activations + activation_group * quant_block_rows * quant_group, quant_group);
    }
    tile_load<weights>(step.weights + I * 512, 64);
    tile_zero<sums>();
    tile_product<Unsigned, sums, activations, weights>();
    tile_store<sums>(step.dots + I * 256, 64);
}

// Where a step adds its dots.
struct AmxTarget {
    const std::int32_t* dots;
    QuantisedRows x;      // from the block of rows on
    float* sums;          // [16, 2, 16]
    int group;            // first of the step, within the block of k
    std::int64_t first;   // of the block of k
    bool fresh;           // sums start at zero
};

// Adds a step's dots to the sums, issuing the next step's products on the way.
template <bool Unsigned, bool Halves, bool Minimum, int N>
LEGATO_INLINE void amx_add(const AmxTarget& to, const AmxScratch& scratch, const AmxStep* next) {
    unroll<2>([&](auto half) {
        float* sums = to.sums + half * 8 * 2 * panel_outputs;
        Vec acc[16];
        if (to.fresh) {
            unroll<16>([&](auto i) { acc[i] = zero(); });
        } else {
            unroll<16>([&](auto i) { acc[i] = load(sums + i * 16); });
        }
        unroll<N>([&](auto g) {
            if (next) amx_product<Unsigned, Halves, half * N + g>(*next);
            const auto& factors = scratch.factors[to.group + g];
            const Vec scale[2] = {load(factors[0][0]), load(factors[0][1])};
            const Vec minimum[2] = {load(factors[1][0]), load(factors[1][1])};
            const std::int64_t weight_group = to.first + to.group + g;
            const float* scales = to.x.scales + (Halves ? weight_group / 2 : weight_group) * quant_block_rows + 8 * half;
            unroll<8>([&](auto r) {
                const Vec scale_a = splat(scales[r]);
                const Vec sum_a = Minimum ? splat(scaled_sum<Halves>(to.x, 8 * half + r, weight_group)) : zero();
                unroll<2>([&](auto p) {
                    const __m512i dot = _mm512_load_si512(to.dots + (g * 2 + p) * 256 + (8 * half + r) * 16);
                    Vec& sum = acc[r * 2 + p];
                    sum = fma(mul(scale[p], to_float(dot)), scale_a, sum);
                    if constexpr (Minimum) sum = fma(minimum[p], sum_a, sum);
                });
            });
        });
        unroll<16>([&](auto i) { store(sums + i * 16, acc[i]); });
    });
}

inline void unpack_block(const AmxItem& item, AmxScratch& scratch, std::int64_t first, int count) {
    const PanelLayout& w = *item.w;
    const std::int64_t codes = code_nbytes(w), factors = factor_nbytes(w);
    for (int p = 0; p < 2; ++p) {
        const std::byte* at = item.panels[p] + first * w.group_nbytes;
        for (int g = 0; g < count; ++g, at += w.group_nbytes) {
            unpack_codes(w, at, first + g, scratch.codes[g][p]);
            load_factors(at + codes, w.half_scales, scratch.factors[g][0][p]);
            if (w.has_minimum) load_factors(at + codes + factors, w.half_scales, scratch.factors[g][1][p]);
        }
    }
}

template <bool Unsigned, bool Halves, bool Minimum, int N>
[[gnu::flatten]] void amx_item(const AmxItem& item, AmxScratch& scratch) {
    const std::int64_t groups = item.w->cols / item.w->group;
    const std::int64_t blocks = (groups + amx_groups - 1) / amx_groups;
    const std::int64_t block_groups = (groups / N + blocks - 1) / blocks * N;
    for (std::int64_t first = 0; first < groups; first += block_groups) {
        const int count = static_cast<int>(first + block_groups < groups ? block_groups : groups - first);
        unpack_block(item, scratch, first, count);
        QuantisedRows x = rows_from(*item.x, item.row);
        const auto step_at = [&](int group, int parity) {
            const std::int64_t activation_group = Halves ? (first + group) / 2 : first + group;
            return AmxStep{x.codes + activation_group * quant_block_rows * quant_group, scratch.codes[group][0],
                           scratch.dots[parity][0][0], static_cast<int>((first + group) % 2)};
        };
        const std::int64_t block_stride = x.groups * quant_block_rows;  // from one block of rows to the next
        AmxTarget to{scratch.dots[0][0][0], x, scratch.sums[0][0], 0, first, first == 0};
        AmxStep step = step_at(0, 0);
        order_memory();
        unroll<2 * N>([&](auto i) { amx_product<Unsigned, Halves, i>(step); });
        int parity = 0;
        for (std::int64_t row = 0; row < item.row_count;) {
            // The step after this one: the next batch of groups, or the next block of rows.
            int group = to.group + N;
            const bool new_row = group == count;
            if (new_row) {
                group = 0;
                row += 16;
                x.codes += block_stride * quant_group;
                x.scales += block_stride;
                x.scaled_sums += block_stride;
                x.minus_halves += 2 * block_stride;
            }
            parity ^= 1;
            const bool more = row < item.row_count;
            if (more) step = step_at(group, parity);
            order_memory();
            amx_add<Unsigned, Halves, Minimum, N>(to, scratch, more ? &step : nullptr);
            to = {scratch.dots[parity][0][0], x, to.sums + (new_row ? 16 * 2 * panel_outputs : 0), group, first,
                  first == 0 && group == 0};
        }
    }
}

template <bool Unsigned, bool Halves, bool Minimum>
void amx_batches(const AmxItem& item, AmxScratch& scratch) {
    const std::int64_t groups = item.w->cols / item.w->group;
    if (groups % 4 == 0) return amx_item<Unsigned, Halves, Minimum, 4>(item, scratch);
    if (groups % 3 == 0) return amx_item<Unsigned, Halves, Minimum, 3>(item, scratch);
    return amx_item<Unsigned, Halves, Minimum, 1>(item, scratch);
}

// Leaves the sums of the item's rows and panels in scratch.sums.
inline void amx_linear(const AmxItem& item, AmxScratch& scratch) {
    const bool is_unsigned = item.w->zero == 0, minimum = item.w->has_minimum;
    if (item.w->group == 16) {
        if (is_unsigned) return minimum ? amx_batches<true, true, true>(item, scratch) : amx_batches<true, true, false>(item, scratch);
        return minimum ? amx_batches<false, true, true>(item, scratch) : amx_batches<false, true, false>(item, scratch);
    }
    if (is_unsigned) return minimum ? amx_batches<true, false, true>(item, scratch) : amx_batches<true, false, false>(item, scratch);
    return minimum ? amx_batches<false, false, true>(item, scratch) : amx_batches<false, false, false>(item, scratch);
}

}  // namespace legato::LEGATO_ISA
