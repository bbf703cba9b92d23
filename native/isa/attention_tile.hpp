// The two products of attention, over one tile of 64 keys at a time, and the softmax between them, over a split of 256.
//
// Rows stay invariant because every number has one order of operations whatever the blocking: a score is one chain of
// multiply-adds over the dimensions, an output element one chain over the split's keys, and a key that a row must not
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

constexpr std::int64_t kLine = 64;  // bytes

// `ahead`, here and below: what will be read next, or null. It is fetched a little at a time while a tile is computed;
// the few rows of a decode wait for memory otherwise.

// scores[r][16 b + key] for `Blocks` sub-blocks, the first of which is `first`. Loop: dimensions; inside, all rows
// against all vectors of keys.
template <int R, int Blocks, class T>
LEGATO_INLINE void score(const float* q, std::int64_t q_stride, const Tile<T>& tile, int first, std::int64_t dim,
                         float* scores, const Tile<T>* ahead) {
    const T* const* keys = tile.keys + first;
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
        // As much of each sub-block's values and of the next keys as this round reads of its keys.
        if (ahead != nullptr && d * kKeyLanes * std::int64_t{sizeof(T)} % kLine == 0)
            unroll<Blocks>([&](auto b) __attribute__((always_inline)) {
                __builtin_prefetch(ahead->values[first + b] + d * kKeyLanes);
                __builtin_prefetch(ahead->keys[first + b] + d * kKeyLanes);
            });
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            const Vec x = splat(q[r * q_stride + d]);
            unroll<kVecs>([&](auto j) __attribute__((always_inline)) { sums[r][j] = fma(x, k[j], sums[r][j]); });
        });
    }
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<kVecs>([&](auto j)
                          __attribute__((always_inline)) { store(scores + r * kSplitKeys + j * kLanes, sums[r][j]); });
    });
}

// Keys that rows see in a tile or a split, as offsets from its start; none if first >= last.
struct Visible {
    std::int64_t first;
    std::int64_t last;
};

// Calls f(integral_constant of the rows, first row) for blocks of `count` rows as the registers hold them.
template <class F>
LEGATO_INLINE void for_row_blocks(std::int64_t count, F&& f) {
    std::int64_t m = 0;
    for (; m + kRegisterRows <= count; m += kRegisterRows) f(std::integral_constant<int, kRegisterRows>{}, m);
    unroll<kRegisterRows - 1>([&](auto r) __attribute__((always_inline)) {
        if (count - m == r + 1) f(std::integral_constant<int, r + 1>{}, m);
    });
}

// All scores of R rows against sub-blocks [first, last).
template <int R, class T>
LEGATO_INLINE void score_blocks(const float* q, std::int64_t q_stride, const Tile<T>& tile, std::int64_t dim, int first,
                                int last, float* scores, const Tile<T>* ahead) {
    constexpr int kStep = kRegisterVecs / kKeyVecs > 1 ? kRegisterVecs / kKeyVecs : 1;
    int b = first;
    if constexpr (kStep >= 4)
        for (; b + 4 <= last; b += 4) score<R, 4>(q, q_stride, tile, b, dim, scores + b * kKeyLanes, ahead);
    if constexpr (kStep >= 2)
        for (; b + 2 <= last; b += 2) score<R, 2>(q, q_stride, tile, b, dim, scores + b * kKeyLanes, ahead);
    for (; b < last; ++b) score<R, 1>(q, q_stride, tile, b, dim, scores + b * kKeyLanes, ahead);
}

// out[r][:] += sum over keys [first, last) of weights[r][key] * value[key][:], for `Vecs` vectors of dimensions; from
// zero if `fresh`. Loop: keys; inside, all rows against all vectors.
template <int R, int Vecs, class T>
LEGATO_INLINE void weigh(const float* weights, const T* const* values, std::int64_t padded_dim, const Visible& seen,
                         bool fresh, float* out, const Tile<T>* ahead) {
    Vec sums[R][Vecs];
    if (fresh) {
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            unroll<Vecs>([&](auto j) __attribute__((always_inline)) { sums[r][j] = zero(); });
        });
    } else {
        unroll<R>([&](auto r) __attribute__((always_inline)) {
            unroll<Vecs>([&](auto j)
                             __attribute__((always_inline)) { sums[r][j] = load(out + r * padded_dim + j * kLanes); });
        });
    }
    for (std::int64_t key = seen.first; key < seen.last;) {
        const std::int64_t block = key / kKeyLanes;
        const std::int64_t stop = (block + 1) * kKeyLanes < seen.last ? (block + 1) * kKeyLanes : seen.last;
        const T* v = values[block] + key % kKeyLanes * padded_dim;
        for (; key < stop; ++key, v += padded_dim) {
            if (ahead != nullptr)
                for (std::int64_t line = 0; line < Vecs * kLanes * std::int64_t{sizeof(T)}; line += kLine)
                    __builtin_prefetch(
                        reinterpret_cast<const char*>(ahead->keys[block] + key % kKeyLanes * padded_dim) + line);
            Vec x[Vecs];
            unroll<Vecs>([&](auto j) __attribute__((always_inline)) { x[j] = load(v + j * kLanes); });
            unroll<R>([&](auto r) __attribute__((always_inline)) {
                const Vec w = splat(weights[r * kSplitKeys + key]);
                unroll<Vecs>([&](auto j) __attribute__((always_inline)) { sums[r][j] = fma(w, x[j], sums[r][j]); });
            });
        }
    }
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<Vecs>([&](auto j)
                         __attribute__((always_inline)) { store(out + r * padded_dim + j * kLanes, sums[r][j]); });
    });
}

template <int R, class T>
LEGATO_INLINE void weigh_dims(const float* weights, const Tile<T>& tile, std::int64_t padded_dim, const Visible& seen,
                              bool fresh, float* out, const Tile<T>* ahead) {
    std::int64_t d = 0;
    const auto step = [&](auto vecs) __attribute__((always_inline)) {
        const T* values[kTileBlocks];
        for (int b = 0; b < kTileBlocks; ++b) values[b] = tile.values[b] + d;
        Tile<T> columns;
        for (int b = 0; b < kTileBlocks && ahead != nullptr; ++b) columns.keys[b] = ahead->keys[b] + d;
        weigh<R, vecs>(weights, values, padded_dim, seen, fresh, out + d, ahead != nullptr ? &columns : nullptr);
        d += vecs * kLanes;
    };
    while (d + kRegisterVecs * kLanes <= padded_dim) step(std::integral_constant<int, kRegisterVecs>{});
    if constexpr (kRegisterVecs * kLanes > 2 * kKeyLanes)
        if (d + 2 * kKeyLanes <= padded_dim) step(std::integral_constant<int, 2 * kKeyVecs>{});
    if constexpr (kRegisterVecs * kLanes > kKeyLanes)
        if (d < padded_dim) step(std::integral_constant<int, kKeyVecs>{});
}

// The maximum of one row's scores (in units of log2) in [begin, end), multiples of 16, once the soft-cap is applied and
// keys outside `visible` are -infinity. cap: log2(e) times the soft-cap, or 0.
LEGATO_INLINE float softmax_maximum(std::int64_t begin, std::int64_t end, const Visible& visible, float cap,
                                    float* row) {
    if (cap != 0.0f)
        for (std::int64_t k = begin; k < end; k += kLanes) store(row + k, mul(splat(cap), tanh(load(row + k))));
    for (std::int64_t k = begin; k < visible.first; ++k) row[k] = -__builtin_inff();
    for (std::int64_t k = visible.last > begin ? visible.last : begin; k < end; ++k) row[k] = -__builtin_inff();
    Vec tops[kKeyVecs] = {};
    unroll<kKeyVecs>([&](auto j) __attribute__((always_inline)) { tops[j] = splat(kEmptyMax); });
    for (std::int64_t k = begin; k < end; k += kKeyLanes)
        unroll<kKeyVecs>([&](auto j)
                             __attribute__((always_inline)) { tops[j] = max(tops[j], load(row + k + j * kLanes)); });
    for (int j = 1; j < kKeyVecs; ++j) tops[0] = max(tops[0], tops[j]);
    return lane_max(tops[0]);
}

// Replaces one row's scores in [begin, end) by weights 2^(score - maximum) and returns the maximum; keys outside
// `visible` get weight 0. `sums` becomes the lane sums of the weights.
LEGATO_INLINE float softmax_row(std::int64_t begin, std::int64_t end, const Visible& visible, float cap, float* row,
                                float* sums) {
    const float maximum = softmax_maximum(begin, end, visible, cap, row);
    Vec sum = zero();
    for (std::int64_t k = begin; k < end; k += kLanes) {
        const Vec weight = exp2_weight(sub(load(row + k), splat(maximum)));
        sum = add(sum, weight);
        store(row + k, weight);
    }
    store(sums, sum);
    return maximum;
}

}  // namespace legato::LEGATO_ISA
