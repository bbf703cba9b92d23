// Integer activations as the linear kernels read them. Per row and group of 32 along k: scale = max|x| / levels and
// q = round-to-nearest-even(x * (levels / max|x|)); the value is scale * q. Beside them what the weights' zeros and
// minima need. Measured on SmolLM2 (docs/lab-notebook.md), the most likely token is another one than in fp32 at
//   4.5 % of positions with 127 levels, one plane of int8;
//   2 % with 127 levels of equalised activations (equaliser.hpp): x and the value are those of x * 2^-shift;
//   0.6 % with 1,016 levels: q = 8 h + l in two planes, 32 h and then 32 l; on AVX2 one plane of int16.
// VNNI takes equalised ones for weights of up to 6 bits, whose bytes have room for the shifts, and AVX2 if some of the
// weights are nibbles: the others cost it the same either way. A tile of AMX does 64 products of k in the time of 32:
// two planes are nearly free there.
//
// Rows lie in blocks of about equal size: [block, group, row of block, codes]. So the rows of a micro-kernel are
// constant offsets from one pointer, and an AMX tile of activations is 1,024 contiguous bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "equaliser.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace legato::LEGATO_ISA {

constexpr std::int64_t quant_group = 32;
constexpr int quant_step = 8;  // what a unit of h is worth
constexpr float quant_levels = 127.0f * quant_step;
constexpr std::int64_t quant_nbytes = 2 * quant_group;  // codes of one row and group, unless equalised
#if LEGATO_ISA_AVX512
constexpr ShiftLimits quant_shifts{.most = 4};
#elif LEGATO_ISA_AVX2
constexpr ShiftLimits quant_shifts{.most = 3, .sum = 17};  // 17 * 15 * 127 fits 16 bits
#else
constexpr ShiftLimits quant_shifts{};
#endif
constexpr bool quant_equalises = quant_shifts.most > 0;
#if LEGATO_ISA_AVX2
constexpr bool quant_equalises_bytes = false;  // 11 bits of activations cost 8-bit codes no more than 8
#else
constexpr bool quant_equalises_bytes = quant_equalises;
#endif
#if LEGATO_ISA_AMX
constexpr std::int64_t quant_block_rows = 16;  // of a tile
#else
constexpr std::int64_t quant_block_rows = 12;  // at most; a multiple of every micro-kernel's most rows
#endif

// From some row of some block on; `stride` rows are between two groups of a row.
struct QuantisedRows {
    std::int8_t* codes;          // [group, row, plane, 32], AVX2: int16 [group, row, 32]; `nbytes` a row and group
    float* scales;               // [group, row]
    float* scaled_sums;          // [group, row]: scale * sum of q
    std::int16_t* minus_halves;  // [group, row, 2]: minus the sums of q over k's first and second 16
    std::int64_t stride;
    std::int64_t groups;
    std::int64_t nbytes;
    const Equaliser* equaliser;
};

LEGATO_INLINE std::int64_t coded_nbytes(Coding coding) {
    return coding == Coding::equalised ? quant_group : quant_nbytes;
}

// Rows of a block if there are `rows` in all: split evenly, but for AMX.
LEGATO_INLINE std::int64_t block_rows(std::int64_t rows) {
    if (rows <= quant_block_rows) return rows;
#if LEGATO_ISA_AMX
    return quant_block_rows;
#else
    const std::int64_t blocks = (rows + quant_block_rows - 1) / quant_block_rows;
    return (rows + blocks - 1) / blocks;
#endif
}

LEGATO_INLINE std::int64_t padded_rows(std::int64_t rows) {
    const std::int64_t block = block_rows(rows);
    return (rows + block - 1) / block * block;
}

LEGATO_INLINE QuantisedRows rows_from(const Quantised& q, std::int64_t row) {
    const std::int64_t groups = q.cols / quant_group, count = padded_rows(q.rows) * groups, block = block_rows(q.rows);
    const std::int64_t first = row / block * block * groups + row % block, nbytes = coded_nbytes(q.coding);
    auto* codes = reinterpret_cast<std::int8_t*>(q.storage);
    auto* scales = reinterpret_cast<float*>(q.storage + count * nbytes);
    float* sums = scales + count;
    auto* halves = reinterpret_cast<std::int16_t*>(sums + count);
    return {
        codes + first * nbytes, scales + first, sums + first, halves + 2 * first, block, groups, nbytes, q.equaliser};
}

std::size_t quantised_nbytes(std::int64_t rows, std::int64_t cols, Coding coding);
// Codes one group of 32 columns for rows [begin, begin + rows): `values` [rows, 32].
void quantise_columns(const float* values, const Quantised& out, std::int64_t group, std::int64_t begin,
                      std::int64_t rows);
void decode(const Quantised& x, const Rows& out);
void quantise(const Rows& x, const Quantised& out);
void quantise_rows(const Rows& x, const Quantised& out, std::int64_t begin, std::int64_t end);

}  // namespace legato::LEGATO_ISA
