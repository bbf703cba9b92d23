// Ragged paged attention: one loop over work items of all sequences, decode rows and prefill chunks alike.
//
// An item is a block of consecutive rows of one sequence against one kv head. The query heads that share the kv head
// are just more rows: row m of the block is position m / heads, head m % heads. Loop order: splits of 256 keys; in a
// split, scores tile by tile, then each row's softmax, then values tile by tile; in a tile, rows by the register block.
// Splits are merged in order (see attention.hpp). On AMX, fp16 KV goes through matrix tiles (see attention_amx.hpp).
#include "attention.hpp"

#include <omp.h>

#include <algorithm>

#include "isa/attention_split.hpp"
#include "isa/attention_tile.hpp"
#if LEGATO_ISA_AMX
#include "isa/attention_amx.hpp"
#elif LEGATO_ISA_BF16
#include "isa/attention_bf16.hpp"
#endif
#include "isa/simd.hpp"
#include "isa/tables.hpp"
#include "isa/team_loop.hpp"

namespace legato::LEGATO_ISA {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
// From this many rows on, a tile of fp16 is widened once into scratch instead of in each register block.
constexpr std::int64_t kWidenRows = 2 * kRegisterRows + 1;

std::int64_t block_rows(std::int64_t head_dim, std::int64_t group_heads) {
    const std::int64_t rows = attention_block_rows(head_dim);
    return round_up(rows > group_heads ? rows : group_heads);
}

// Stands where there are no matrix tiles.
struct NoTiles {
    static constexpr bool used = false;
    static constexpr bool whole_blocks = false;
    NoTiles(std::byte*, std::int64_t, std::int64_t, std::int64_t) {}
    std::size_t nbytes() const { return 0; }
    static void configure() {}
    static void release() {}
};

#if LEGATO_ISA_AMX
using HalfTiles = AmxTiles;
#elif LEGATO_ISA_BF16
using HalfTiles = Bf16Tiles;
#else
using HalfTiles = NoTiles;
#endif

std::size_t thread_nbytes(std::int64_t head_dim, std::int64_t group_heads) {
    const std::int64_t rows = block_rows(head_dim, group_heads), padded_dim = round_up(head_dim);
    return Scratch(nullptr, rows, head_dim, padded_dim).nbytes +
           HalfTiles(nullptr, rows, head_dim, padded_dim).nbytes();
}

// Tiles: how products are formed, HalfTiles or NoTiles.
template <class T, class Tiles>
class Item {
  public:
    // `next`: what this thread will probably do after this item, or null.
    Item(const AttentionArgs& args, const AttentionGroup& group, const AttentionGroup* next, std::byte* scratch)
        : a_(args),
          group_(group),
          next_(next),
          heads_(args.heads / args.kv.kv_heads),
          rows_(group.rows * heads_),
          dim_(args.kv.head_dim),
          padded_dim_(args.kv.padded_dim),
          position_(args.step->positions[group.row]),
          scratch_(scratch, block_rows(dim_, heads_), dim_, padded_dim_),
          tiles_(scratch + scratch_.nbytes, block_rows(dim_, heads_), dim_, padded_dim_) {}

    // All splits, in order, into the output.
    void run_all() {
        load_queries();
        clear(scratch_.total, 0, rows_, padded_dim_);
        for (std::int64_t split = 0; split < group_.splits; ++split) {
            run_split(group_.first_split + split);
            const SplitRows &total = scratch_.total, &part = scratch_.part;
            for (std::int64_t m = 0; m < rows_; ++m)
                merge_row(total.out + m * padded_dim_, total.sums + m * kKeyLanes, total.maxima[m],
                          part.out + m * padded_dim_, part.sums + m * kKeyLanes, part.maxima[m], padded_dim_);
        }
        write_output();
    }

    // One split into its place in `partials`.
    void run_partial(std::int64_t split) {
        load_queries();
        run_split(group_.first_split + split);
        const SplitRows& part = scratch_.part;
        for (std::int64_t m = 0; m < rows_; ++m) {
            float* to = partial(split, m);
            std::memcpy(to, part.out + m * padded_dim_, static_cast<std::size_t>(padded_dim_) * 4);
            std::memcpy(to + padded_dim_, part.sums + m * kKeyLanes, kKeyLanes * 4);
            to[padded_dim_ + kKeyLanes] = part.maxima[m];
        }
    }

    // The splits that others left in `partials`, in order, into the output.
    void merge_partials() {
        clear(scratch_.total, 0, rows_, padded_dim_);
        const SplitRows& total = scratch_.total;
        for (std::int64_t split = 0; split < group_.splits; ++split)
            for (std::int64_t m = 0; m < rows_; ++m) {
                const float* from = partial(split, m);
                merge_row(total.out + m * padded_dim_, total.sums + m * kKeyLanes, total.maxima[m], from,
                          from + padded_dim_, from[padded_dim_ + kKeyLanes], padded_dim_);
            }
        write_output();
    }

  private:
    float* partial(std::int64_t split, std::int64_t m) const {
        return a_.partials + (group_.partial + split * rows_ + m) * attention_partial_floats(padded_dim_);
    }

    // Scores come out in units of log2, or, under a soft-cap, as the argument of its tanh.
    void load_queries() {
        const float factor = a_.softcap != 0.0f ? a_.scale / a_.softcap : a_.scale * kLog2E;
        for (std::int64_t m = 0; m < rows_; ++m) {
            const float* from = row_of(a_.q, a_.q_stride, m);
            float* to = scratch_.q + m * dim_;
            for (std::int64_t d = 0; d < dim_; ++d) to[d] = from[d] * factor;
        }
        if constexpr (Tiles::used) tiles_.load_queries(scratch_.q, rows_);
    }

    void write_output() {
        for (std::int64_t m = 0; m < rows_; ++m)
            finish_row(scratch_.total.out + m * padded_dim_, scratch_.total.sums + m * kKeyLanes, dim_,
                       row_of(a_.out, a_.out_stride, m));
    }

    template <class F>
    F* row_of(F* base, std::int64_t stride, std::int64_t m) const {
        return base + (group_.row + m / heads_) * stride + (group_.kv_head * heads_ + m % heads_) * dim_;
    }

    void run_split(std::int64_t split) {
        const std::int64_t start = split * kSplitKeys;
        if constexpr (Tiles::used) {
            run_split_on_tiles(start);
        } else {
            run_split_on_vectors(start);
        }
    }

    void run_split_on_vectors(std::int64_t start) {
        for_tiles(start, [&](std::int64_t at, const Tile<T>& tile, std::int64_t first, std::int64_t last) {
            if (wide()) {
                score_tile(start, at, widen_keys(tile, first, last), nullptr);
            } else {
                const Tile<T> ahead = ahead_of_scores(tile, start, at + kTileKeys);
                score_tile(start, at, tile, &ahead);
            }
        });
        for_row_blocks(rows_, [&](auto r, std::int64_t m) { softmax_rows(r, m, start); });
        for_tiles(start, [&](std::int64_t at, const Tile<T>& tile, std::int64_t first, std::int64_t last) {
            if (wide()) {
                weigh_tile(start, at, widen_values(tile, first, last), nullptr);
            } else {
                Tile<T> ahead;
                const bool more = ahead_of_values(start, at, ahead);
                weigh_tile(start, at, tile, more ? &ahead : nullptr);
            }
        });
    }

    // While a tile is scored: its values, and the keys of the split's next tile if there is one.
    Tile<T> ahead_of_scores(const Tile<T>& tile, std::int64_t start, std::int64_t next) const {
        const Visible seen = next < kSplitKeys ? span(0, rows_, start + next, kTileKeys) : Visible{0, 0};
        if (seen.first >= seen.last) return tile;
        Tile<T> ahead = locate_seen(group_, start + next, seen);
        std::copy_n(tile.values, kTileBlocks, ahead.values);
        return ahead;
    }

    // While a tile's values are summed up: the keys of the same tile of the next split, or of the next item's first;
    // false if there is neither.
    bool ahead_of_values(std::int64_t start, std::int64_t at, Tile<T>& ahead) const {
        const AttentionGroup* group = &group_;
        std::int64_t from = start + kSplitKeys + at;
        Visible seen = span(0, rows_, from, kTileKeys);
        if (seen.first >= seen.last) {
            if (next_ == nullptr) return false;
            group = next_;
            from = next_->first_split * kSplitKeys + at;
            seen = {0, a_.step->positions[next_->row] + 1 - from};
            if (seen.last > kTileKeys) seen.last = kTileKeys;
            if (seen.last <= 0) return false;
        }
        ahead = locate_seen(*group, from, seen);
        return true;
    }

    void run_split_on_tiles(std::int64_t start) {
        for_tiles(start, [&](std::int64_t at, const Tile<T>& tile, std::int64_t first, std::int64_t last) {
            tiles_.load_keys(tile, first, last, ahead_of_scores(tile, start, at + kTileKeys));
            for (std::int64_t m = 0; m < rows_; m += kKeyLanes) {
                const Visible seen = span(m, tile_rows(m), start + at, kTileKeys);
                if (seen.first < seen.last)
                    tiles_.score(m, tile_rows(m), seen.first / kKeyLanes, (seen.last + kKeyLanes - 1) / kKeyLanes,
                                 scratch_.scores + m * kSplitKeys + at);
            }
        });
        for (std::int64_t m = 0; m < rows_; m += kKeyLanes) soften_tile_rows(start, m);
        constexpr std::int64_t pair = 2 * kKeyLanes;
        const std::int64_t stop = span(0, rows_, start, kSplitKeys).last;
        for_tiles(start, [&](std::int64_t at, const Tile<T>& tile, std::int64_t first, std::int64_t last) {
            Tile<T> ahead;
            const bool more = ahead_of_values(start, at, ahead);
            tiles_.load_values(tile, first / 2, (last + 1) / 2, stop - at, more ? &ahead : nullptr);
            for (std::int64_t m = 0; m < rows_; m += kKeyLanes) {
                const Visible seen = span(m, tile_rows(m), start + at, kTileKeys);
                if (seen.first >= seen.last) continue;
                const bool fresh = span(m, tile_rows(m), start, kSplitKeys).first >= at;
                tiles_.weigh(m, tile_rows(m), at, seen.first / pair, (seen.last + pair - 1) / pair, fresh,
                             scratch_.part.out + m * padded_dim_);
            }
        });
    }

    // Rows that fill up a tile get weight 0.
    void soften_tile_rows(std::int64_t start, std::int64_t m) const {
        const std::int64_t count = tile_rows(m);
        const Visible seen = span(m, count, start, kSplitKeys);
        if (seen.first >= seen.last) {
            clear(scratch_.part, m, count, padded_dim_);
            return;
        }
        constexpr std::int64_t pair = 2 * kKeyLanes;
        const std::int64_t begin = seen.first / pair * pair, end = (seen.last + pair - 1) / pair * pair;
        for (std::int64_t r = m; r < m + (Tiles::whole_blocks ? kKeyLanes : count); ++r)
            scratch_.part.maxima[r] =
                tiles_.soften(r, begin, end, r < rows_ ? visible(r, start) : Visible{0, 0}, a_.softcap * kLog2E,
                              scratch_.scores + r * kSplitKeys, scratch_.part.sums + r * kKeyLanes);
    }

    std::int64_t tile_rows(std::int64_t m) const { return rows_ - m < kKeyLanes ? rows_ - m : kKeyLanes; }

    // Calls f(offset in the split, tile, first sub-block, last sub-block) for the split's tiles of which any row sees
    // keys.
    template <class F>
    void for_tiles(std::int64_t start, F&& f) const {
        for (std::int64_t at = 0; at < kSplitKeys; at += kTileKeys) {
            const Visible seen = span(0, rows_, start + at, kTileKeys);
            if (seen.first >= seen.last) continue;
            const std::int64_t first = seen.first / kKeyLanes, last = (seen.last + kKeyLanes - 1) / kKeyLanes;
            f(at, locate(group_, start + at, first, last), first, last);
        }
    }

    // What one row sees of its split; empty as {0, 0}.
    Visible visible(std::int64_t m, std::int64_t start) const {
        const Visible seen = span(m, 1, start, kSplitKeys);
        return seen.first < seen.last ? seen : Visible{0, 0};
    }

    // What any of query rows [m, m + count) sees of the `keys` keys from `start` on, as offsets from `start`. Rows are
    // at consecutive positions, so it lies between the first one's first and the last one's last key.
    Visible span(std::int64_t m, std::int64_t count, std::int64_t start, std::int64_t keys) const {
        std::int64_t first = a_.window > 0 ? position_ + m / heads_ - a_.window + 1 : 0;
        std::int64_t last = position_ + (m + count - 1) / heads_ + 1;
        first = first > start ? first - start : 0;
        last = last - start < keys ? last - start : keys;
        return {first, last};
    }

    template <class U>
    void score_tile(std::int64_t start, std::int64_t at, const Tile<U>& tile,
                    const std::type_identity_t<Tile<U>>* ahead) const {
        for_row_blocks(rows_, [&](auto r, std::int64_t m) __attribute__((always_inline)) {
            const Visible seen = span(m, r, start + at, kTileKeys);
            if (seen.first < seen.last)
                score_blocks<r>(scratch_.q + m * dim_, dim_, tile, dim_, static_cast<int>(seen.first / kKeyLanes),
                                static_cast<int>((seen.last + kKeyLanes - 1) / kKeyLanes),
                                scratch_.scores + m * kSplitKeys + at, m == 0 ? ahead : nullptr);
        });
    }

    void softmax_rows(int count, std::int64_t m, std::int64_t start) const {
        const SplitRows& part = scratch_.part;
        const Visible seen = span(m, count, start, kSplitKeys);
        if (seen.first >= seen.last) {
            clear(part, m, count, padded_dim_);
            return;
        }
        const std::int64_t begin = seen.first / kKeyLanes * kKeyLanes, end = round_up(seen.last);
        const float cap = a_.softcap != 0.0f ? a_.softcap * kLog2E : 0.0f;
        for (std::int64_t r = m; r < m + count; ++r)
            part.maxima[r] = softmax_row(begin, end, span(r, 1, start, kSplitKeys), cap,
                                         scratch_.scores + r * kSplitKeys, part.sums + r * kKeyLanes);
    }

    template <class U>
    void weigh_tile(std::int64_t start, std::int64_t at, const Tile<U>& tile,
                    const std::type_identity_t<Tile<U>>* ahead) const {
        for_row_blocks(rows_, [&](auto r, std::int64_t m) __attribute__((always_inline)) {
            const Visible seen = span(m, r, start + at, kTileKeys);
            if (seen.first >= seen.last) return;
            const bool fresh = span(m, r, start, kSplitKeys).first >= at;  // no earlier tile of the split was seen
            weigh_dims<r>(scratch_.scores + m * kSplitKeys + at, tile, padded_dim_, seen, fresh,
                          scratch_.part.out + m * padded_dim_, m == 0 ? ahead : nullptr);
        });
    }

    // Whether a tile is worth widening to fp32 once for all rows.
    bool wide() const { return !std::is_same_v<T, float> && rows_ >= kWidenRows; }

    // Where sub-blocks [first, last) of a tile lie; the others, which nobody reads, point to one of these.
    Tile<T> locate(const AttentionGroup& group, std::int64_t start, std::int64_t first, std::int64_t last) const {
        const KvLayer& kv = a_.kv;
        const std::int32_t* table = a_.step->block_tables + group.sequence * a_.step->table_width;
        Tile<T> tile;
        for (std::int64_t b = 0; b < kTileBlocks; ++b) {
            const std::int64_t position = start + (b < first ? first : b >= last ? last - 1 : b) * kKeyLanes;
            const std::int64_t token = position % kv.block_tokens;
            const std::int64_t block = table[position / kv.block_tokens];
            const T* at = reinterpret_cast<const T*>(kv.data + (block * kv.kv_heads + group.kv_head) * kv.head_nbytes);
            tile.keys[b] = at + token * dim_;
            tile.values[b] = at + kv.block_tokens * dim_ + token * padded_dim_;
        }
        return tile;
    }

    Tile<T> locate_seen(const AttentionGroup& group, std::int64_t start, const Visible& seen) const {
        return locate(group, start, seen.first / kKeyLanes, (seen.last + kKeyLanes - 1) / kKeyLanes);
    }

    Tile<float> widen_keys(const Tile<T>& tile, std::int64_t first, std::int64_t last) const {
        Tile<float> wide{};
        for (std::int64_t b = first; b < last; ++b) {
            wide.keys[b] = scratch_.keys + b * kKeyLanes * dim_;
            widen_block(tile.keys[b], kKeyLanes * dim_, scratch_.keys + b * kKeyLanes * dim_);
        }
        return wide;
    }

    Tile<float> widen_values(const Tile<T>& tile, std::int64_t first, std::int64_t last) const {
        Tile<float> wide{};
        for (std::int64_t b = first; b < last; ++b) {
            wide.values[b] = scratch_.values + b * kKeyLanes * padded_dim_;
            widen_block(tile.values[b], kKeyLanes * padded_dim_, scratch_.values + b * kKeyLanes * padded_dim_);
        }
        return wide;
    }

    const AttentionArgs& a_;
    const AttentionGroup& group_;
    const AttentionGroup* next_;
    const std::int64_t heads_;  // query heads that share the kv head
    const std::int64_t rows_;   // query rows: rows of the step times those heads
    const std::int64_t dim_;
    const std::int64_t padded_dim_;
    const std::int64_t position_;  // of the first row
    const Scratch scratch_;
    Tiles tiles_;
};

template <class T, class Tiles>
void run_item(const AttentionArgs& a, std::int64_t index, std::byte* scratch) {
    const AttentionItem& work = a.work.items[index];
    AttentionGroup& group = a.work.groups[work.group];
    const bool last = index + 1 == a.work.item_count;
    Item<T, Tiles> item(a, group, last ? nullptr : &a.work.groups[a.work.items[index + 1].group], scratch);
    if (work.split < 0) {
        item.run_all();
        return;
    }
    item.run_partial(work.split);
    if (__atomic_sub_fetch(&group.pending, 1, __ATOMIC_ACQ_REL) == 0) {
        item.merge_partials();
        group.pending = group.splits;  // for the next layer, after the barrier
    }
}

template <class T, class Tiles>
void run_items(const AttentionArgs& args) {
    std::byte* scratch = args.thread_scratch + static_cast<std::size_t>(omp_get_thread_num()) * args.thread_nbytes;
    Tiles::configure();
    team_for_ranges(args.work.item_count, [&](std::int64_t i) { run_item<T, Tiles>(args, i, scratch); });
    Tiles::release();
}

void attention(const AttentionArgs& args) {
    if (args.kv.type == KvType::f32) return run_items<float, NoTiles>(args);
#if LEGATO_ISA_BF16
    if (args.exact) return run_items<Half, NoTiles>(args);
#endif
    run_items<Half, HalfTiles>(args);
}

}  // namespace

AttentionKernels attention_items_kernels() {
    return {.rope_kv = nullptr, .attention = attention, .thread_nbytes = thread_nbytes};
}

}  // namespace legato::LEGATO_ISA
