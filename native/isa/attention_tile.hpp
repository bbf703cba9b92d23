// The two products of attention over one tile of 64 keys, and the softmax between them.
//
// Rows stay invariant because every number has one order of operations whatever the blocking: a score is one chain of
// multiply-adds over the dimensions, an output element one chain over the tile's keys, and a key that a row must not
// see has weight exactly 0, which leaves the chain as it is. fp16 keys and values are widened exactly, so it does not
// matter whether that happens on the fly or once a tile.
#pragma once

#include "attention.hpp"
#include "isa/simd.hpp"

namespace legato::LEGATO_ISA {

constexpr int kTileBlocks = kTileKeys / kKeyLanes;  // sub-blocks of 16 keys in a tile
constexpr int kKeyVecs = kKeyLanes / kLanes;        // vectors in a sub-block
constexpr float kEmptyMax = -1e30f;  // the running maximum before any key; finite, so differences are not NaN

// Rows of the register block: rows times vectors of accumulators, the vectors and one broadcast fill the register file.
#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX
constexpr int kRegisterRows = 6;
constexpr int kRegisterVecs = 4;
#elif LEGATO_ISA_AVX2
constexpr int kRegisterRows = 6;
constexpr int kRegisterVecs = 2;
#else
constexpr int kRegisterRows = 2;
constexpr int kRegisterVecs = 4;
#endif

// A tile's keys and values, as up to four sub-blocks of 16 keys wherever they are.
template <class T>
struct Tile {
    const T* keys[kTileBlocks];    // each [dim][16]
    const T* values[kTileBlocks];  // each [16][padded_dim]
};

// scores[r][16 b + key] for `Blocks` sub-blocks. Loop: dimensions; inside, all rows against all vectors of keys.
template <int R, int Blocks, class T>
LEGATO_INLINE void score(const float* q, std::int64_t q_stride, const T* const* keys, std::int64_t dim, float* scores) {
    constexpr int kVecs = Blocks * kKeyVecs;
    Vec sums[R][kVecs];
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<kVecs>([&](auto j) __attribute__((always_inline)) { sums[r][j] = zero(); });
    });
    for (std::int64_t d = 0; d < dim; ++d) {
        Vec k[kVecs];
        unroll<kVecs>([&](auto j) __attribute__((always_inline)) {
            k[j] = load(keys[j / kKeyVecs] + d * kKeyLanes + j % kKeyVecs * kLanes);
        });
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            const Vec x = splat(q[r * q_stride + d]);
            unroll<kVecs>([&](auto j) __attribute__((always_inline)) { sums[r][j] = fma(x, k[j], sums[r][j]); });
        });
    }
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<kVecs>([&](auto j)
                          __attribute__((always_inline)) { store(scores + r * kTileKeys + j * kLanes, sums[r][j]); });
    });
}

// All scores of R rows against sub-blocks [first, last).
template <int R, class T>
LEGATO_INLINE void score_blocks(const float* q, std::int64_t q_stride, const Tile<T>& tile, std::int64_t dim, int first,
                                int last, float* scores) {
    constexpr int kStep = kRegisterVecs / kKeyVecs > 1 ? kRegisterVecs / kKeyVecs : 1;
    int b = first;
    if constexpr (kStep >= 4)
        for (; b + 4 <= last; b += 4) score<R, 4>(q, q_stride, tile.keys + b, dim, scores + b * kKeyLanes);
    if constexpr (kStep >= 2)
        for (; b + 2 <= last; b += 2) score<R, 2>(q, q_stride, tile.keys + b, dim, scores + b * kKeyLanes);
    for (; b < last; ++b) score<R, 1>(q, q_stride, tile.keys + b, dim, scores + b * kKeyLanes);
}

// out[r][:] = out[r][:] * decay[r] + sum over keys [first, last) of weights[r][key] * value[key][:], for `Vecs` vectors
// of dimensions. Loop: keys; inside, all rows against all vectors.
template <int R, int Vecs, class T>
LEGATO_INLINE void weigh(const float* weights, const float* decay, const T* const* values, std::int64_t padded_dim,
                         std::int64_t first, std::int64_t last, float* out, std::int64_t out_stride) {
    Vec sums[R][Vecs];
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        const Vec factor = splat(decay[r]);
        unroll<Vecs>([&](auto j) __attribute__((always_inline)) {
            sums[r][j] = mul(load(out + r * out_stride + j * kLanes), factor);
        });
    });
    for (std::int64_t key = first; key < last;) {
        const std::int64_t block = key / kKeyLanes;
        const std::int64_t stop = (block + 1) * kKeyLanes < last ? (block + 1) * kKeyLanes : last;
        const T* v = values[block] + key % kKeyLanes * padded_dim;
        for (; key < stop; ++key, v += padded_dim) {
            Vec x[Vecs];
            unroll<Vecs>([&](auto j) __attribute__((always_inline)) { x[j] = load(v + j * kLanes); });
            unroll<R>([&](auto r) __attribute__((always_inline)) {
                const Vec w = splat(weights[r * kTileKeys + key]);
                unroll<Vecs>([&](auto j) __attribute__((always_inline)) { sums[r][j] = fma(w, x[j], sums[r][j]); });
            });
        }
    }
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<Vecs>([&](auto j)
                         __attribute__((always_inline)) { store(out + r * out_stride + j * kLanes, sums[r][j]); });
    });
}

template <int R, class T>
LEGATO_INLINE void weigh_dims(const float* weights, const float* decay, const Tile<T>& tile, std::int64_t padded_dim,
                              std::int64_t first, std::int64_t last, float* out) {
    std::int64_t d = 0;
    const auto step = [&](auto vecs) __attribute__((always_inline)) {
        const T* values[kTileBlocks];
        for (int b = 0; b < kTileBlocks; ++b) values[b] = tile.values[b] + d;
        weigh<R, vecs>(weights, decay, values, padded_dim, first, last, out + d, padded_dim);
        d += vecs * kLanes;
    };
    while (d + kRegisterVecs * kLanes <= padded_dim) step(std::integral_constant<int, kRegisterVecs>{});
    if constexpr (kRegisterVecs * kLanes > 2 * kKeyLanes)
        if (d + 2 * kKeyLanes <= padded_dim) step(std::integral_constant<int, 2 * kKeyVecs>{});
    if constexpr (kRegisterVecs * kLanes > kKeyLanes)
        if (d < padded_dim) step(std::integral_constant<int, kKeyVecs>{});
}

// State of the online softmax of one block of query rows, within one split.
struct SoftmaxRows {
    float* out;   // [rows, padded_dim], not divided by the sum yet
    float* sums;  // [rows, 16], lane sums
    float* maxima;
};

// Keys that one row sees in a tile, as offsets from the tile's start.
struct Visible {
    std::int64_t first;
    std::int64_t last;
};

struct SoftmaxShape {
    int rows;
    int first_block;  // sub-blocks that hold scores
    int last_block;
    float cap;  // log2(e) * soft-cap, or 0
};

// Replaces scores (in units of log2) by weights 2^(score - maximum), updates maxima and sums, and writes each row's
// decay: what its older weights shrink by. Keys outside `visible` get weight 0.
LEGATO_INLINE void softmax(const SoftmaxShape& shape, const Visible* visible, float* scores, float* maxima, float* sums,
                           float* decay) {
    const std::int64_t begin = shape.first_block * kKeyLanes, end = shape.last_block * kKeyLanes;
    alignas(64) float change[kKeyLanes] = {};
    for (int r = 0; r < shape.rows; ++r) {
        float* row = scores + r * kTileKeys;
        if (shape.cap != 0.0f)
            for (std::int64_t k = begin; k < end; k += kLanes)
                store(row + k, mul(splat(shape.cap), tanh(load(row + k))));
        for (std::int64_t k = begin; k < visible[r].first; ++k) row[k] = -__builtin_inff();
        for (std::int64_t k = visible[r].last > begin ? visible[r].last : begin; k < end; ++k)
            row[k] = -__builtin_inff();
        Vec top = load(row + begin);
        for (std::int64_t k = begin + kLanes; k < end; k += kLanes) top = max(top, load(row + k));
        const float tile_max = lane_max(top);
        const float new_max = tile_max > maxima[r] ? tile_max : maxima[r];
        change[r] = maxima[r] - new_max;
        maxima[r] = new_max;
    }
    for (int i = 0; i < kKeyLanes; i += kLanes) store(decay + i, exp2_weight(load(change + i)));
    for (int r = 0; r < shape.rows; ++r) {
        float* row = scores + r * kTileKeys;
        const Vec top = splat(maxima[r]);
        Vec sum = mul(load(sums + r * kKeyLanes), splat(decay[r]));
        for (std::int64_t k = begin; k < end; k += kLanes) {
            const Vec weight = exp2_weight(sub(load(row + k), top));
            sum = add(sum, weight);
            store(row + k, weight);
        }
        store(sums + r * kKeyLanes, sum);
    }
}

}  // namespace legato::LEGATO_ISA
