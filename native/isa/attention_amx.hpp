// Attention of a block of query rows against one split of 256 keys on AMX tiles, for fp16 KV.
//
// AMX multiplies bf16, which has 8 significant bits. Each operand is therefore split into a high and a low bf16 and a
// product is high*high + high*low + low*high, accumulated in fp32. For fp16 keys and values the two parts are exact;
// queries and weights keep 16 bits. That is 5 times the rate of fp32 multiply-adds, and far finer than the rounding of
// KV to fp16.
//
// Loop order: 16 query rows; 64 keys and pairs of dimensions for the scores; softmax over the split; dimensions and
// pairs of keys for the output. Rows stay invariant: a tile computes each row by itself, in one order, and keys that a
// row must not see have weight exactly 0, which leaves its sums as they are.
#pragma once

#include "attention.hpp"
#include "isa/amx.hpp"
#include "isa/attention_tile.hpp"

namespace legato::LEGATO_ISA {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kTileDwords = 256;                     // of a tile: 16 rows of 16 pairs of bf16
constexpr std::int64_t kPairKeys = 2 * kKeyLanes;             // keys n and n + 16 are a pair; so are dimensions
constexpr std::int64_t kSplitPairs = kSplitKeys / kPairKeys;  // tiles of weights of a split
constexpr std::int64_t kTilePairs = kTileKeys / kPairKeys;

// High and low parts of the same tiles.
struct SplitTiles {
    std::uint32_t* high;
    std::uint32_t* low;

    SplitTiles from(std::int64_t tile) const { return {high + tile * kTileDwords, low + tile * kTileDwords}; }
};

// Writes one row of a tile pair: element i of `a` and of `b` become pair i. `Exact`: both fit two bf16 by truncation.
template <bool Exact>
LEGATO_INLINE void split_pair(Vec a, Vec b, std::uint32_t* high, std::uint32_t* low) {
    const auto bits = [](Vec x)
                          __attribute__((always_inline)) { return Exact ? _mm512_castps_si512(x) : bf16_bits(x); };
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i high_a = _mm512_and_si512(bits(a), top), high_b = _mm512_and_si512(bits(b), top);
    const Vec rest_a = sub(a, _mm512_castsi512_ps(high_a)), rest_b = sub(b, _mm512_castsi512_ps(high_b));
    _mm512_store_si512(high, join_bf16(high_a, high_b));
    _mm512_store_si512(low, join_bf16(bits(rest_a), bits(rest_b)));
}

constexpr std::int64_t dim_pairs(std::int64_t dim) { return (dim + kPairKeys - 1) / kPairKeys; }

// Queries [rows, dim] as tiles [blocks of 16 rows][pairs of dimensions]; rows that fill up the last block are zero.
inline void split_queries(const float* q, std::int64_t rows, std::int64_t dim, const SplitTiles& out) {
    const std::int64_t pairs = dim_pairs(dim);
    for (std::int64_t m = 0; m < (rows + kTileRows - 1) / kTileRows * kTileRows; ++m)
        for (std::int64_t p = 0; p < pairs; ++p) {
            Vec part[2];
            for (int h = 0; h < 2; ++h) {
                const std::int64_t d = (2 * p + h) * kKeyLanes, left = m < rows ? dim - d : 0;
                part[h] = left >= kKeyLanes ? load(q + m * dim + d) : left > 0 ? load_n(q + m * dim + d, left) : zero();
            }
            const std::int64_t at = (m / kTileRows * pairs + p) * kTileDwords + m % kTileRows * kKeyLanes;
            split_pair<false>(part[0], part[1], out.high + at, out.low + at);
        }
}

// One block of 16 keys, [dim][16], as tiles.
inline void split_keys(const Half* keys, std::int64_t dim, const SplitTiles& out, std::int64_t block) {
    const std::int64_t pairs = dim_pairs(dim);
    for (std::int64_t p = 0; p < pairs; ++p)
        for (std::int64_t i = 0; i < kKeyLanes; ++i) {
            const std::int64_t d = p * 2 * kKeyLanes + i;
            const Vec a = d < dim ? load(keys + d * kKeyLanes) : zero();
            const Vec b = d + kKeyLanes < dim ? load(keys + (d + kKeyLanes) * kKeyLanes) : zero();
            const std::int64_t at = (block * pairs + p) * kTileDwords + i * kKeyLanes;
            split_pair<true>(a, b, out.high + at, out.low + at);
        }
}

// Two blocks of 16 values, [16][padded_dim], as tiles. Values from `count` on are not written yet and taken as zero.
inline void split_values(const Half* const* values, std::int64_t padded_dim, std::int64_t count, const SplitTiles& out,
                         std::int64_t pair) {
    const std::int64_t tiles = padded_dim / kKeyLanes;
    for (std::int64_t t = 0; t < tiles; ++t)
        for (std::int64_t i = 0; i < kKeyLanes; ++i) {
            const std::int64_t from = i * padded_dim + t * kKeyLanes;
            const Vec a = i < count ? load(values[0] + from) : zero();
            const Vec b = i + kKeyLanes < count ? load(values[1] + from) : zero();
            const std::int64_t at = (pair * tiles + t) * kTileDwords + i * kKeyLanes;
            split_pair<true>(a, b, out.high + at, out.low + at);
        }
}

// `Sums` tiles of sums, to[16][16 Sums], from products of `steps` tiles of `a` with a grid of tiles of `b`: sum j takes
// b[step * step_stride + j * sum_stride]. The sums begin at 0 if `fresh`, else go on. Tiles 0 and 1 hold a, 2 and 3 b,
// 4 to 7 the sums. A product takes 52 cycles and one may begin every 16, so the three products of one sum are apart.
template <int Sums>
LEGATO_INLINE void split_products(const SplitTiles& a, const SplitTiles& b, std::int64_t steps,
                                  std::int64_t step_stride, std::int64_t sum_stride, bool fresh, float* to,
                                  std::int64_t to_stride) {
    unroll<Sums>([&](auto j) __attribute__((always_inline)) {
        if (fresh) {
            tile_zero<4 + j>();
        } else {
            tile_load<4 + j>(to + j * kKeyLanes, to_stride * 4);
        }
    });
    for (std::int64_t s = 0; s < steps; ++s) {
        const SplitTiles x = a.from(s), y = b.from(s * step_stride);
        tile_load<0>(x.high, 64);
        tile_load<1>(x.low, 64);
        unroll<Sums>([&](auto j) __attribute__((always_inline)) {
            tile_load<2 + j % 2>(y.from(j * sum_stride).high, 64);
            tile_product_bf16<4 + j, 0, 2 + j % 2>();
        });
        unroll<Sums>([&](auto j) __attribute__((always_inline)) {
            tile_load<2 + j % 2>(y.from(j * sum_stride).low, 64);
            tile_product_bf16<4 + j, 0, 2 + j % 2>();
        });
        unroll<Sums>([&](auto j) __attribute__((always_inline)) {
            tile_load<2 + j % 2>(y.from(j * sum_stride).high, 64);
            tile_product_bf16<4 + j, 1, 2 + j % 2>();
        });
    }
    unroll<Sums>([&](auto j) __attribute__((always_inline)) { tile_store<4 + j>(to + j * kKeyLanes, to_stride * 4); });
    order_memory();
}

// One thread's tiles. The caller's loop: `load_queries`; then for each split, tiles of 64 keys: `load_keys` and `score`
// for each block of rows, `soften` each block, and again tiles: `load_values` and `weigh` for each block.
class AmxTiles {
  public:
    static constexpr bool used = true;
    static constexpr bool whole_blocks = true;  // rows that fill up a tile are computed too

    AmxTiles(std::byte* scratch, std::int64_t rows, std::int64_t dim, std::int64_t padded_dim)
        : dim_(dim), padded_dim_(padded_dim), pairs_(dim_pairs(dim)) {
        auto* at = reinterpret_cast<std::uint32_t*>(scratch);
        const auto take = [&](std::int64_t tiles) {
            SplitTiles taken{at, at + tiles * kTileDwords};
            at += 2 * tiles * kTileDwords;
            return taken;
        };
        const std::int64_t blocks = (rows + kTileRows - 1) / kTileRows;
        queries_ = take(blocks * pairs_);
        weights_ = take(blocks * kSplitPairs);
        keys_ = take(kTileKeys / kKeyLanes * pairs_);
        values_ = take(kTilePairs * (padded_dim / kKeyLanes));
        nbytes_ = static_cast<std::size_t>(reinterpret_cast<std::byte*>(at) - scratch);
    }

    std::size_t nbytes() const { return nbytes_; }

    static void configure() { configure_tiles(); }
    static void release() { _tile_release(); }

    void load_queries(const float* q, std::int64_t rows) const {
        split_queries(q, rows, dim_, queries_);
        order_memory();
    }

    // Blocks of 16 keys [first, last) of a tile.
    void load_keys(const Tile<Half>& tile, std::int64_t first, std::int64_t last, const Tile<Half>&) const {
        // The values come from memory too, and are wanted once the scores are there.
        const std::int64_t value_nbytes = kKeyLanes * padded_dim_ * static_cast<std::int64_t>(sizeof(Half));
        for (std::int64_t b = first; b < last; ++b)
            for (std::int64_t at = 0; at < value_nbytes; at += 64)
                __builtin_prefetch(reinterpret_cast<const std::byte*>(tile.values[b]) + at);
        for (std::int64_t b = first; b < last; ++b) split_keys(tile.keys[b], dim_, keys_, b);
        order_memory();
    }

    // Scores of the block of rows from m on against blocks [first, last) of the tile loaded; rows of `scores` are a
    // split apart.
    void score(std::int64_t m, std::int64_t, std::int64_t first, std::int64_t last, float* scores) const {
        const SplitTiles q = queries_.from(m / kTileRows * pairs_);
        if (last - first == 4) {
            split_products<4>(q, keys_, pairs_, 1, pairs_, true, scores, kSplitKeys);
        } else {
            for (std::int64_t b = first; b < last; ++b)
                split_products<1>(q, keys_.from(b * pairs_), pairs_, 1, pairs_, true, scores + b * kKeyLanes,
                                  kSplitKeys);
        }
    }

    // The softmax of one row (see softmax_row) over keys [begin, end) of its split, multiples of 32; its weights go
    // into the weight tiles.
    float soften(std::int64_t row, std::int64_t begin, std::int64_t end, const Visible& visible, float cap,
                 float* scores, float* sums) const {
        const float maximum = softmax_maximum(begin, end, visible, cap, scores);
        const SplitTiles to = weights_.from(row / kTileRows * kSplitPairs);
        Vec sum = zero();
        for (std::int64_t k = begin; k < end; k += kPairKeys) {
            const Vec a = exp2_weight(sub(load(scores + k), splat(maximum)));
            const Vec b = exp2_weight(sub(load(scores + k + kKeyLanes), splat(maximum)));
            sum = add(add(sum, a), b);
            const std::int64_t at = k / kPairKeys * kTileDwords + row % kTileRows * kKeyLanes;
            split_pair<false>(a, b, to.high + at, to.low + at);
        }
        store(sums, sum);
        order_memory();
        return maximum;
    }

    // Pairs of blocks of 16 values [first, last) of a tile; values from `count` on are not there yet.
    void load_values(const Tile<Half>& tile, std::int64_t first, std::int64_t last, std::int64_t count,
                     const Tile<Half>*) const {
        for (std::int64_t p = first; p < last; ++p)
            split_values(tile.values + 2 * p, padded_dim_, count - p * kPairKeys, values_, p);
        order_memory();
    }

    // Adds pairs [first, last) of the tile loaded, which is at `at` in its split, to out[16][padded_dim] of the block
    // of rows from m on.
    void weigh(std::int64_t m, std::int64_t, std::int64_t at, std::int64_t first, std::int64_t last, bool fresh,
               float* out) const {
        const std::int64_t tiles = padded_dim_ / kKeyLanes;
        const SplitTiles w = weights_.from(m / kTileRows * kSplitPairs + at / kPairKeys + first);
        const SplitTiles v = values_.from(first * tiles);
        std::int64_t t = 0;
        for (; t + 4 <= tiles; t += 4)
            split_products<4>(w, v.from(t), last - first, tiles, 1, fresh, out + t * kKeyLanes, padded_dim_);
        for (; t < tiles; ++t)
            split_products<1>(w, v.from(t), last - first, tiles, 1, fresh, out + t * kKeyLanes, padded_dim_);
    }

  private:
    std::int64_t dim_, padded_dim_, pairs_;
    SplitTiles queries_;  // [blocks of 16 rows][pairs of dimensions]
    SplitTiles weights_;  // [blocks of 16 rows][pairs of keys of a split]
    SplitTiles keys_;     // [blocks of 16 keys of a tile][pairs of dimensions]
    SplitTiles values_;   // [pairs of keys of a tile][blocks of 16 dimensions]
    std::size_t nbytes_;
};

}  // namespace legato::LEGATO_ISA
