// Attention of a block of query rows against one split of 256 keys with vdpbf16ps, for fp16 KV: twice the rate of fp32
// multiply-adds. Queries, keys, weights and values are rounded to bf16 (8 significant bits), sums are fp32.
//
// Loop order: 6 query rows; 64 keys and pairs of dimensions for the scores; softmax over the split; dimensions and
// pairs of keys for the output. Rows stay invariant: every sum is one chain of the same instruction, in one order, and
// keys that a row must not see have weight exactly 0, which leaves its sums as they are.
#pragma once

#include "attention.hpp"
#include "isa/attention_tile.hpp"
#include "isa/bf16.hpp"

namespace legato::LEGATO_ISA {

constexpr std::int64_t kPairKeys = 2 * kKeyLanes;             // keys n and n + 16 are a pair; so are dimensions
constexpr std::int64_t kSplitPairs = kSplitKeys / kPairKeys;  // blocks of 16 pairs in a split
constexpr std::int64_t kTilePairs = kTileKeys / kPairKeys;

// sums + the two products of each lane's pairs.
LEGATO_INLINE Vec add_products(Vec sums, __m512i a, __m512i b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
}

LEGATO_INLINE __m512i round_pair(Vec a, Vec b) { return join_bf16(bf16_bits(a), bf16_bits(b)); }

LEGATO_INLINE __m512i splat_pair(std::uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }

// to[r][16 j] for R rows and `Vecs` vectors of sums: `steps` blocks of 16 pairs of `a` (rows a_stride apart) with as
// many of b; b(s, i, j) are pairs i of block s for vector j. From 0 if `fresh`.
template <int R, int Vecs, class B>
LEGATO_INLINE void pair_products(const std::uint32_t* a, std::int64_t a_stride, std::int64_t steps, B&& b, bool fresh,
                                 float* to, std::int64_t to_stride) {
    Vec sums[R][Vecs];
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<Vecs>([&](auto j) __attribute__((always_inline)) {
            sums[r][j] = fresh ? zero() : load(to + r * to_stride + j * kKeyLanes);
        });
    });
    for (std::int64_t s = 0; s < steps; ++s, a += kKeyLanes)
        for (std::int64_t i = 0; i < kKeyLanes; ++i) {
            __m512i x[Vecs];
            unroll<Vecs>([&](auto j) __attribute__((always_inline)) { x[j] = b(s, i, j); });
            unroll<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i pair = splat_pair(a[r * a_stride + i]);
                unroll<Vecs>([&](auto j)
                                 __attribute__((always_inline)) { sums[r][j] = add_products(sums[r][j], x[j], pair); });
            });
        }
    unroll<R>([&](auto r) __attribute__((always_inline)) {
        unroll<Vecs>([&](auto j)
                         __attribute__((always_inline)) { store(to + r * to_stride + j * kKeyLanes, sums[r][j]); });
    });
}

// One thread's operands; the interface of AmxTiles, whose comment tells the caller's loop. Many rows share the rounding
// of a tile, which goes through scratch; few (a decode) round keys and values in registers as they read them.
class Bf16Tiles {
  public:
    static constexpr bool used = true;
    static constexpr bool whole_blocks = false;  // rows are done as many as there are

    Bf16Tiles(std::byte* scratch, std::int64_t rows, std::int64_t dim, std::int64_t padded_dim)
        : dim_(dim), vectors_(padded_dim / kKeyLanes), pairs_((dim + kPairKeys - 1) / kPairKeys) {
        auto* at = reinterpret_cast<std::uint32_t*>(scratch);
        const auto take = [&](std::int64_t count) {
            std::uint32_t* taken = at;
            at += (count + kKeyLanes - 1) / kKeyLanes * kKeyLanes;
            return taken;
        };
        queries_ = take(rows * query_stride());
        weights_ = take(rows * weight_stride);
        keys_ = take(kTileBlocks * pairs_ * kBlock);
        values_ = take(kTilePairs * vectors_ * kBlock);
        nbytes_ = static_cast<std::size_t>(reinterpret_cast<std::byte*>(at) - scratch);
    }

    std::size_t nbytes() const { return nbytes_; }

    static void configure() {}
    static void release() {}

    void load_queries(const float* q, std::int64_t rows) {
        few_ = rows <= kRegisterRows;
        for (std::int64_t m = 0; m < rows; ++m)
            for (std::int64_t p = 0; p < pairs_; ++p) {
                Vec part[2];
                for (int h = 0; h < 2; ++h) {
                    const std::int64_t d = (2 * p + h) * kKeyLanes, left = dim_ - d;
                    const float* from = q + m * dim_ + d;
                    part[h] = left >= kKeyLanes ? load(from) : left > 0 ? load_n(from, left) : zero();
                }
                _mm512_store_si512(queries_ + m * query_stride() + p * kKeyLanes, round_pair(part[0], part[1]));
            }
    }

    // Blocks of 16 keys [first, last) of a tile; its values, and `ahead`'s keys, are fetched meanwhile.
    void load_keys(const Tile<Half>& tile, std::int64_t first, std::int64_t last, const Tile<Half>& ahead) {
        tile_ = tile;
        ahead_ = ahead;
        if (few_) return;
        for (std::int64_t b = first; b < last; ++b)
            for (std::int64_t p = 0; p < pairs_; ++p)
                for (std::int64_t i = 0; i < kKeyLanes; ++i)
                    _mm512_store_si512(keys_ + (b * pairs_ + p) * kBlock + i * kKeyLanes, key_pairs(b, p, i));
    }

    // Scores of rows [m, m + count) against blocks [first, last) of the tile loaded; rows of `scores` are a split
    // apart.
    void score(std::int64_t m, std::int64_t count, std::int64_t first, std::int64_t last, float* scores) const {
        for_row_blocks(count, [&](auto r, std::int64_t at) __attribute__((always_inline)) {
            const std::uint32_t* q = queries_ + (m + at) * query_stride();
            float* to = scores + at * kSplitKeys;
            const auto blocks = [&](auto vecs, std::int64_t b) __attribute__((always_inline)) {
                const auto stored = [&](std::int64_t p, std::int64_t i, auto j) __attribute__((always_inline)) {
                    return _mm512_load_si512(keys_ + ((b + j) * pairs_ + p) * kBlock + i * kKeyLanes);
                };
                const auto rounded = [&](std::int64_t p, std::int64_t i, auto j)
                                         __attribute__((always_inline)) { return key_pairs(b + j, p, i); };
                float* out = to + b * kKeyLanes;
                if (few_) {
                    pair_products<r, vecs>(q, query_stride(), pairs_, rounded, true, out, kSplitKeys);
                } else {
                    pair_products<r, vecs>(q, query_stride(), pairs_, stored, true, out, kSplitKeys);
                }
            };
            if (last - first == kTileBlocks) return blocks(std::integral_constant<int, kTileBlocks>{}, first);
            for (std::int64_t b = first; b < last; ++b) blocks(std::integral_constant<int, 1>{}, b);
        });
    }

    // The softmax of one row (see softmax_row) over keys [begin, end) of its split, multiples of 32. Its weights are
    // rounded before they are summed, so that they add up to the sum.
    float soften(std::int64_t row, std::int64_t begin, std::int64_t end, const Visible& visible, float cap,
                 float* scores, float* sums) const {
        const float maximum = softmax_maximum(begin, end, visible, cap, scores);
        const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        Vec sum = zero();
        for (std::int64_t k = begin; k < end; k += kPairKeys) {
            const __m512i a = bf16_bits(exp2_weight(sub(load(scores + k), splat(maximum))));
            const __m512i b = bf16_bits(exp2_weight(sub(load(scores + k + kKeyLanes), splat(maximum))));
            sum = add(add(sum, _mm512_castsi512_ps(_mm512_and_si512(a, top))),
                      _mm512_castsi512_ps(_mm512_and_si512(b, top)));
            _mm512_store_si512(weights_ + row * weight_stride + k / 2, join_bf16(a, b));
        }
        store(sums, sum);
        return maximum;
    }

    // Pairs of blocks of 16 values [first, last) of a tile; values from `count` on are not there yet. `ahead`'s keys
    // are fetched meanwhile, if there are any.
    void load_values(const Tile<Half>& tile, std::int64_t first, std::int64_t last, std::int64_t count,
                     const Tile<Half>* ahead) {
        tile_ = tile;
        count_ = count;
        fetches_ = ahead != nullptr;
        if (fetches_) ahead_ = *ahead;
        if (few_) return;
        for (std::int64_t p = first; p < last; ++p)
            for (std::int64_t i = 0; i < kKeyLanes; ++i)
                for (std::int64_t t = 0; t < vectors_; ++t)
                    _mm512_store_si512(values_ + (p * vectors_ + t) * kBlock + i * kKeyLanes, value_pairs(p, i, t));
    }

    // Adds pairs [first, last) of the tile loaded, which is at `at` in its split, to out[count][padded_dim] of rows
    // from m on.
    void weigh(std::int64_t m, std::int64_t count, std::int64_t at, std::int64_t first, std::int64_t last, bool fresh,
               float* out) const {
        for_row_blocks(count, [&](auto r, std::int64_t row) __attribute__((always_inline)) {
            const std::uint32_t* w = weights_ + (m + row) * weight_stride + (at / kPairKeys + first) * kKeyLanes;
            float* to = out + row * vectors_ * kKeyLanes;
            const auto dims = [&](auto vecs, std::int64_t t) __attribute__((always_inline)) {
                const auto stored = [&](std::int64_t p, std::int64_t i, auto j) __attribute__((always_inline)) {
                    return _mm512_load_si512(values_ + ((first + p) * vectors_ + t + j) * kBlock + i * kKeyLanes);
                };
                const auto rounded = [&](std::int64_t p, std::int64_t i, auto j)
                                         __attribute__((always_inline)) { return value_pairs(first + p, i, t + j); };
                float* columns = to + t * kKeyLanes;
                if (few_) {
                    pair_products<r, vecs>(w, weight_stride, last - first, rounded, fresh, columns,
                                           vectors_ * kKeyLanes);
                } else {
                    pair_products<r, vecs>(w, weight_stride, last - first, stored, fresh, columns,
                                           vectors_ * kKeyLanes);
                }
            };
            std::int64_t t = 0;
            for (; t + 4 <= vectors_; t += 4) dims(std::integral_constant<int, 4>{}, t);
            for (; t < vectors_; ++t) dims(std::integral_constant<int, 1>{}, t);
        });
    }

  private:
    static constexpr std::int64_t kBlock = kKeyLanes * kKeyLanes;
    static constexpr std::int64_t weight_stride = kSplitPairs * kKeyLanes;
    std::int64_t query_stride() const { return pairs_ * kKeyLanes; }

    // Dimensions 32 p + i and 32 p + i + 16 of 16 keys; fetches as much of their values and of the keys to come.
    LEGATO_INLINE __m512i key_pairs(std::int64_t b, std::int64_t p, std::int64_t i) const {
        const Half* keys = tile_.keys[b];
        const std::int64_t d = p * kPairKeys + i, line = (p * kKeyLanes + i) * kPairKeys;
        __builtin_prefetch(tile_.values[b] + line);
        __builtin_prefetch(ahead_.keys[b] + line);
        const Vec low = d < dim_ ? load(keys + d * kKeyLanes) : zero();
        const Vec high = d + kKeyLanes < dim_ ? load(keys + (d + kKeyLanes) * kKeyLanes) : zero();
        return round_pair(low, high);
    }

    // Values 32 p + i and 32 p + i + 16 in 16 dimensions; fetches as much of the keys to come.
    LEGATO_INLINE __m512i value_pairs(std::int64_t p, std::int64_t i, std::int64_t t) const {
        const std::int64_t from = (i * vectors_ + t) * kKeyLanes, left = count_ - p * kPairKeys;
        if (fetches_ && t % 2 == 0) {
            __builtin_prefetch(ahead_.keys[2 * p] + from);
            __builtin_prefetch(ahead_.keys[2 * p + 1] + from);
        }
        const Vec low = i < left ? load(tile_.values[2 * p] + from) : zero();
        const Vec high = i + kKeyLanes < left ? load(tile_.values[2 * p + 1] + from) : zero();
        return round_pair(low, high);
    }

    std::int64_t dim_, vectors_, pairs_;
    std::uint32_t* queries_;  // [rows][pairs of dimensions]
    std::uint32_t* weights_;  // [rows][pairs of keys of a split]
    std::uint32_t* keys_;     // [blocks of 16 keys][pairs of dimensions][16 keys]
    std::uint32_t* values_;   // [32 keys][16 dimensions][16 pairs of keys][16]
    std::size_t nbytes_;
    bool few_ = false, fetches_ = false;
    std::int64_t count_ = 0;
    Tile<Half> tile_{};
    Tile<Half> ahead_{};
};

}  // namespace legato::LEGATO_ISA
