// Loop order: row, group of 32, element. A group's numbers depend on its 32 values only, so rows are invariant. The maximum
// and the sums are taken over integers (the bits of |x| order like |x|), exact in any order, so the compiler may vectorise.
#include "quantised.hpp"

#include "quant.hpp"

namespace legato::LEGATO_ISA {
namespace {

constexpr float rounding = 0x1.8p23f;  // x + rounding has the nearest integer, ties to even, in its low bits
constexpr float least_maximum = 0x1p-100f;  // below it 127 / max|x| could overflow; such a group is zero

LEGATO_INLINE void quantise_group(const float* x, std::int8_t* codes, float& scale, float& scaled_sum,
                                  std::int16_t* minus_halves) {
    std::int32_t bits[quant_group];
    std::memcpy(bits, x, sizeof bits);
    std::int32_t largest = 0;
    for (std::int32_t b : bits) {
        const std::int32_t magnitude = b & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float maximum;
    std::memcpy(&maximum, &largest, sizeof maximum);
    const bool nonzero = maximum > least_maximum;
    scale = nonzero ? maximum / 127.0f : 0.0f;
    const float inverse = nonzero ? 127.0f / maximum : 0.0f;
    float shifted[quant_group];
    for (int k = 0; k < quant_group; ++k) shifted[k] = x[k] * inverse + rounding;
    std::int32_t q[quant_group];
    std::memcpy(q, shifted, sizeof q);
    std::int32_t half[2] = {0, 0};
    for (int h = 0; h < 2; ++h) {
        for (int k = 16 * h; k < 16 * h + 16; ++k) half[h] += q[k] - 0x4b400000;
    }
    for (int k = 0; k < quant_group; ++k) codes[k] = static_cast<std::int8_t>(q[k]);
    scaled_sum = scale * static_cast<float>(half[0] + half[1]);
    minus_halves[0] = static_cast<std::int16_t>(-half[0]);
    minus_halves[1] = static_cast<std::int16_t>(-half[1]);
}

}  // namespace

std::size_t quantised_nbytes(std::int64_t rows, std::int64_t cols) {
    return static_cast<std::size_t>(padded_rows(rows) * (cols / quant_group) * (quant_group + 12));
}

void quantise(const Rows& x, const Quantised& out) {
    constexpr std::int64_t chunk = 4;
    // The rows that fill up the last block are zero: a tile may multiply them, and no stray NaN or subnormal slows it down.
    const std::int64_t rows = padded_rows(x.rows);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t first = 0; first < rows; first += chunk) {
        for (std::int64_t r = first; r < rows && r < first + chunk; ++r) {
            const QuantisedRows q = rows_from(out, r);
            for (std::int64_t g = 0; g < q.groups; ++g) {
                const std::int64_t at = g * q.stride;
                std::int8_t* codes = q.codes + at * quant_group;
                if (r < x.rows) {
                    quantise_group(x.data + r * x.stride + g * quant_group, codes, q.scales[at], q.scaled_sums[at],
                                   q.minus_halves + 2 * at);
                } else {
                    std::memset(codes, 0, quant_group);
                    q.scales[at] = q.scaled_sums[at] = 0.0f;
                    q.minus_halves[2 * at] = q.minus_halves[2 * at + 1] = 0;
                }
            }
        }
    }
}

}  // namespace legato::LEGATO_ISA
