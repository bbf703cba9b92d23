// int8 activations as the linear kernels read them. Per row and group of 32 along k: scale = max|x| / 127 and
// q = round-to-nearest-even(x * (127 / max|x|)); the value is scale * q. Beside them what the weights' zeros and minima need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"
#include "simd.hpp"

namespace legato::LEGATO_ISA {

constexpr std::int64_t quant_group = 32;
constexpr std::int64_t tile_rows = 16;  // an AMX tile may read the codes of this many rows, some of them beyond the last

struct QuantisedView {
    std::int8_t* codes;          // [rows, codes_stride]
    float* scales;               // [rows, groups]
    float* scaled_sums;          // [rows, groups]: scale * sum of q
    std::int16_t* minus_halves;  // [rows, groups, 2]: minus the sum of q over k's first and second 16
    std::int64_t codes_stride;
    std::int64_t groups;
};

LEGATO_INLINE std::int64_t codes_stride(std::int64_t cols) {
    const std::int64_t lines = (cols + 63) / 64;
    return (lines + (lines % 2 == 0)) * 64;  // an odd number of cache lines: rows do not fall into the same cache set
}

LEGATO_INLINE std::int64_t padded_rows(std::int64_t rows) { return (rows + tile_rows - 1) / tile_rows * tile_rows; }

LEGATO_INLINE QuantisedView view(const Quantised& q) {
    const std::int64_t rows = padded_rows(q.rows), groups = q.cols / quant_group, stride = codes_stride(q.cols);
    auto* codes = reinterpret_cast<std::int8_t*>(q.storage);
    auto* scales = reinterpret_cast<float*>(q.storage + rows * stride);
    float* sums = scales + rows * groups;
    return {codes, scales, sums, reinterpret_cast<std::int16_t*>(sums + rows * groups), stride, groups};
}

std::size_t quantised_nbytes(std::int64_t rows, std::int64_t cols);
void quantise(const Rows& x, const Quantised& out);

}  // namespace legato::LEGATO_ISA
