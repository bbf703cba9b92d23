// Query rows attended to splits of their keys: their memory, and how splits are merged.
#pragma once

#include "isa/attention_tile.hpp"
#include "isa/simd.hpp"

namespace legato::LEGATO_ISA {

constexpr std::int64_t round_up(std::int64_t n) { return (n + kKeyLanes - 1) / kKeyLanes * kKeyLanes; }

// Rows attended to some splits.
struct SplitRows {
    float* out;     // [rows, padded_dim], not divided by the sum yet
    float* sums;    // [rows, 16], lane sums of the weights
    float* maxima;  // [rows]
};

// One thread's scratch, carved in this order; all parts are multiples of 16 floats.
struct Scratch {
    float* q;         // [rows, head_dim], scaled
    SplitRows part;   // the split at hand
    SplitRows total;  // the splits before it
    float* scores;    // [rows, 256], of a split
    float* keys;      // a widened tile
    float* values;

    Scratch(std::byte* data, std::int64_t rows, std::int64_t dim, std::int64_t padded_dim) {
        float* at = reinterpret_cast<float*>(data);
        const auto take = [&](std::int64_t n) {
            float* taken = at;
            at += round_up(n);
            return taken;
        };
        q = take(rows * dim);
        for (SplitRows* state : {&part, &total}) {
            state->out = take(rows * padded_dim);
            state->sums = take(rows * kKeyLanes);
            state->maxima = take(rows);
        }
        scores = take(rows * kSplitKeys);
        keys = take(kTileKeys * dim);
        values = take(kTileKeys * padded_dim);
        nbytes = (static_cast<std::size_t>(reinterpret_cast<std::byte*>(at) - data) + 63) / 64 * 64;
    }
    std::size_t nbytes;
};

inline void clear(const SplitRows& state, std::int64_t first, std::int64_t rows, std::int64_t padded_dim) {
    std::memset(state.out + first * padded_dim, 0, static_cast<std::size_t>(rows * padded_dim) * 4);
    std::memset(state.sums + first * kKeyLanes, 0, static_cast<std::size_t>(rows * kKeyLanes) * 4);
    for (std::int64_t r = first; r < first + rows; ++r) state.maxima[r] = kEmptyMax;
}

// total = total + part, for one row. A part in which the row saw nothing changes no bit; into an empty total it is
// copied.
LEGATO_INLINE void merge_row(float* out, float* sums, float& maximum, const float* part_out, const float* part_sums,
                             float part_maximum, std::int64_t padded_dim) {
    const float new_max = part_maximum > maximum ? part_maximum : maximum;
    const Vec old_factor = exp2_weight(splat(maximum - new_max));
    const Vec part_factor = exp2_weight(splat(part_maximum - new_max));
    maximum = new_max;
    store(sums, fma(part_factor, load(part_sums), mul(old_factor, load(sums))));
    for (std::int64_t d = 0; d < padded_dim; d += kLanes)
        store(out + d, fma(part_factor, load(part_out + d), mul(old_factor, load(out + d))));
}

inline void finish_row(const float* sums_out, const float* sums, std::int64_t dim, float* out) {
    const Vec factor = splat(1.0f / lane_sum(load(sums)));
    std::int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(out + d, mul(load(sums_out + d), factor));
    if (d < dim) store_n(out + d, mul(load(sums_out + d), factor), dim - d);
}

LEGATO_INLINE void widen_block(const float*, std::int64_t, float*) {}          // fp32 is wide already
LEGATO_INLINE void widen_block(const Half* from, std::int64_t n, float* to) {  // n: a multiple of 64
    for (std::int64_t i = 0; i < n; i += 4 * kKeyLanes)
        unroll<4 * kKeyVecs>(
            [&](auto j) __attribute__((always_inline)) { store(to + i + j * kLanes, load(from + i + j * kLanes)); });
}

}  // namespace legato::LEGATO_ISA
