// Ragged paged attention: one loop over work items of all sequences, decode rows and prefill chunks alike.
//
// An item is a block of consecutive rows of one sequence against one kv head. The query heads that share the kv head
// are just more rows: row m of the block is position m / heads, head m % heads. Loop order: splits of 256 keys, tiles
// of 64 keys, rows by the register block. Within a split the softmax runs online; splits are merged in order (see
// attention.hpp).
#include "attention.hpp"

#include <omp.h>

#include "isa/attention_tile.hpp"
#include "isa/simd.hpp"
#include "isa/tables.hpp"
#include "isa/team_loop.hpp"

namespace legato::LEGATO_ISA {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
// From this many rows on, a tile of fp16 is widened once into scratch instead of in each register block.
constexpr std::int64_t kWidenRows = 2 * kRegisterRows + 1;

constexpr std::int64_t round_up(std::int64_t n) { return (n + kKeyLanes - 1) / kKeyLanes * kKeyLanes; }

std::int64_t block_rows(std::int64_t head_dim, std::int64_t group_heads) {
    const std::int64_t rows = attention_block_rows(head_dim);
    return rows > group_heads ? rows : group_heads;
}

// One thread's scratch, carved in this order; all parts are multiples of 16 floats.
struct Scratch {
    float* q;           // [rows, head_dim], scaled
    SoftmaxRows part;   // the split at hand
    SoftmaxRows total;  // the splits before it
    float* scores;      // [register rows, 64]
    float* keys;        // a widened tile
    float* values;

    Scratch(std::byte* data, std::int64_t rows, std::int64_t dim, std::int64_t padded_dim) {
        float* at = reinterpret_cast<float*>(data);
        const auto take = [&](std::int64_t n) {
            float* taken = at;
            at += round_up(n);
            return taken;
        };
        q = take(rows * dim);
        for (SoftmaxRows* state : {&part, &total}) {
            state->out = take(rows * padded_dim);
            state->sums = take(rows * kKeyLanes);
            state->maxima = take(rows);
        }
        scores = take(kRegisterRows * kTileKeys);
        keys = take(kTileKeys * dim);
        values = take(kTileKeys * padded_dim);
        nbytes = static_cast<std::size_t>(reinterpret_cast<std::byte*>(at) - data);
    }
    std::size_t nbytes;
};

std::size_t thread_nbytes(std::int64_t head_dim, std::int64_t group_heads) {
    return Scratch(nullptr, block_rows(head_dim, group_heads), head_dim, round_up(head_dim)).nbytes;
}

void clear(const SoftmaxRows& state, std::int64_t rows, std::int64_t padded_dim) {
    std::memset(state.out, 0, static_cast<std::size_t>(rows * padded_dim) * 4);
    std::memset(state.sums, 0, static_cast<std::size_t>(rows * kKeyLanes) * 4);
    for (std::int64_t r = 0; r < rows; ++r) state.maxima[r] = kEmptyMax;
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

void finish_row(const float* sums_out, const float* sums, std::int64_t dim, float* out) {
    const Vec factor = splat(1.0f / lane_sum(load(sums)));
    std::int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(out + d, mul(load(sums_out + d), factor));
    if (d < dim) store_n(out + d, mul(load(sums_out + d), factor), dim - d);
}

LEGATO_INLINE void widen_block(const Half* from, std::int64_t n, float* to) {  // n: a multiple of 64
    for (std::int64_t i = 0; i < n; i += 4 * kKeyLanes)
        unroll<4 * kKeyVecs>(
            [&](auto j) __attribute__((always_inline)) { store(to + i + j * kLanes, load(from + i + j * kLanes)); });
}

template <class T>
class Item {
  public:
    Item(const AttentionArgs& args, const AttentionGroup& group, std::byte* scratch)
        : a_(args),
          group_(group),
          heads_(args.heads / args.kv.kv_heads),
          rows_(group.rows * heads_),
          dim_(args.kv.head_dim),
          padded_dim_(args.kv.padded_dim),
          position_(args.step->positions[group.row]),
          scratch_(scratch, block_rows(dim_, heads_), dim_, padded_dim_) {}

    // All splits, in order, into the output.
    void run_all() {
        load_queries();
        clear(scratch_.total, rows_, padded_dim_);
        for (std::int64_t split = 0; split < group_.splits; ++split) {
            run_split(group_.first_split + split);
            const SoftmaxRows &total = scratch_.total, &part = scratch_.part;
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
        const SoftmaxRows& part = scratch_.part;
        for (std::int64_t m = 0; m < rows_; ++m) {
            float* to = partial(split, m);
            std::memcpy(to, part.out + m * padded_dim_, static_cast<std::size_t>(padded_dim_) * 4);
            std::memcpy(to + padded_dim_, part.sums + m * kKeyLanes, kKeyLanes * 4);
            to[padded_dim_ + kKeyLanes] = part.maxima[m];
        }
    }

    // The splits that others left in `partials`, in order, into the output.
    void merge_partials() {
        clear(scratch_.total, rows_, padded_dim_);
        const SoftmaxRows& total = scratch_.total;
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

    // Keys of [start, stop) that query row m sees, as offsets from `start`; empty as {0, 0}.
    Visible visible(std::int64_t m, std::int64_t start, std::int64_t stop) const {
        const std::int64_t position = position_ + m / heads_;
        std::int64_t first = a_.window > 0 ? position - a_.window + 1 : 0;
        std::int64_t last = position + 1;
        first = first > start ? first : start;
        last = last < stop ? last : stop;
        return first < last ? Visible{first - start, last - start} : Visible{0, 0};
    }

    void run_split(std::int64_t split) {
        clear(scratch_.part, rows_, padded_dim_);
        const std::int64_t start = split * kSplitKeys;
        for (std::int64_t tile = start; tile < start + kSplitKeys; tile += kTileKeys) {
            // Rows are at consecutive positions, so what any of them sees lies between the first's first and the last's
            // last.
            const Visible seen = span(0, rows_, tile);
            if (seen.first < seen.last) run_tile(tile, seen);
        }
    }

    Visible span(std::int64_t m, std::int64_t count, std::int64_t tile) const {
        std::int64_t first = a_.window > 0 ? position_ + m / heads_ - a_.window + 1 : 0;
        std::int64_t last = position_ + (m + count - 1) / heads_ + 1;
        first = first > tile ? first - tile : 0;
        last = last - tile < kTileKeys ? last - tile : kTileKeys;
        return {first, last};
    }

    void run_tile(std::int64_t start, const Visible& seen) {
        const std::int64_t first = seen.first / kKeyLanes, last = (seen.last + kKeyLanes - 1) / kKeyLanes;
        const Tile<T> tile = locate(start, first, last);
        if constexpr (!std::is_same_v<T, float>) {
            if (rows_ >= kWidenRows) {
                prefetch(start + kTileKeys);
                run_rows(start, widen(tile, first, last));
                return;
            }
        }
        run_rows(start, tile);
    }

    // Where sub-blocks [first, last) of a tile lie; the others, which nobody reads, point to one of these.
    Tile<T> locate(std::int64_t start, std::int64_t first, std::int64_t last) const {
        const KvLayer& kv = a_.kv;
        const std::int32_t* table = a_.step->block_tables + group_.sequence * a_.step->table_width;
        Tile<T> tile;
        for (std::int64_t b = 0; b < kTileBlocks; ++b) {
            const std::int64_t position = start + (b < first ? first : b >= last ? last - 1 : b) * kKeyLanes;
            const std::int64_t token = position % kv.block_tokens;
            const std::int64_t block = table[position / kv.block_tokens];
            const T* at = reinterpret_cast<const T*>(kv.data + (block * kv.kv_heads + group_.kv_head) * kv.head_nbytes);
            tile.keys[b] = at + token * dim_;
            tile.values[b] = at + kv.block_tokens * dim_ + token * padded_dim_;
        }
        return tile;
    }

    // Fetches a tile while the one before it is computed on.
    void prefetch(std::int64_t start) const {
        const std::int64_t keys = position_ + group_.rows - start;
        if (keys <= 0) return;
        const std::int64_t last = keys < kTileKeys ? (keys + kKeyLanes - 1) / kKeyLanes : kTileBlocks;
        const Tile<T> tile = locate(start, 0, last);
        constexpr std::int64_t kLine = 64 / sizeof(T);
        for (std::int64_t b = 0; b < last; ++b) {
            for (std::int64_t i = 0; i < kKeyLanes * dim_; i += kLine) __builtin_prefetch(tile.keys[b] + i, 0, 2);
            for (std::int64_t i = 0; i < kKeyLanes * padded_dim_; i += kLine)
                __builtin_prefetch(tile.values[b] + i, 0, 2);
        }
    }

    Tile<float> widen(const Tile<T>& tile, std::int64_t first, std::int64_t last) const {
        Tile<float> wide;
        for (std::int64_t b = 0; b < kTileBlocks; ++b) {
            float* keys = scratch_.keys + b * kKeyLanes * dim_;
            float* values = scratch_.values + b * kKeyLanes * padded_dim_;
            wide.keys[b] = keys;
            wide.values[b] = values;
            if (b < first || b >= last) continue;
            widen_block(tile.keys[b], kKeyLanes * dim_, keys);
            widen_block(tile.values[b], kKeyLanes * padded_dim_, values);
        }
        return wide;
    }

    template <class U>
    void run_rows(std::int64_t start, const Tile<U>& tile) const {
        std::int64_t m = 0;
        for (; m + kRegisterRows <= rows_; m += kRegisterRows) run_register_rows<kRegisterRows>(m, start, tile);
        unroll<kRegisterRows - 1>([&](auto r) __attribute__((always_inline)) {
            if (rows_ - m == r + 1) run_register_rows<r + 1>(m, start, tile);
        });
    }

    template <int R, class U>
    __attribute__((noinline)) void run_register_rows(std::int64_t m, std::int64_t start, const Tile<U>& tile) const {
        const Visible seen = span(m, R, start);
        if (seen.first >= seen.last) return;
        SoftmaxShape shape{R, static_cast<int>(seen.first / kKeyLanes),
                           static_cast<int>((seen.last + kKeyLanes - 1) / kKeyLanes), 0.0f};
        if (a_.softcap != 0.0f) shape.cap = a_.softcap * kLog2E;
        Visible rows[R];
        for (int r = 0; r < R; ++r) rows[r] = visible(m + r, start, start + kTileKeys);
        alignas(64) float decay[kKeyLanes];
        const SoftmaxRows& part = scratch_.part;
        score_blocks<R>(scratch_.q + m * dim_, dim_, tile, dim_, shape.first_block, shape.last_block, scratch_.scores);
        softmax(shape, rows, scratch_.scores, part.maxima + m, part.sums + m * kKeyLanes, decay);
        weigh_dims<R>(scratch_.scores, decay, tile, padded_dim_, seen.first, seen.last, part.out + m * padded_dim_);
    }

    const AttentionArgs& a_;
    const AttentionGroup& group_;
    const std::int64_t heads_;  // query heads that share the kv head
    const std::int64_t rows_;   // query rows: rows of the step times those heads
    const std::int64_t dim_;
    const std::int64_t padded_dim_;
    const std::int64_t position_;  // of the first row
    const Scratch scratch_;
};

template <class T>
void run_item(const AttentionArgs& a, const AttentionItem& work, std::byte* scratch) {
    AttentionGroup& group = a.work.groups[work.group];
    Item<T> item(a, group, scratch);
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

void attention(const AttentionArgs& args) {
    std::byte* scratch = args.thread_scratch + static_cast<std::size_t>(omp_get_thread_num()) * args.thread_nbytes;
    team_for(args.work.item_count, [&](std::int64_t i) {
        if (args.kv.type == KvType::f16) {
            run_item<Half>(args, args.work.items[i], scratch);
        } else {
            run_item<float>(args, args.work.items[i], scratch);
        }
    });
}

}  // namespace

AttentionKernels attention_items_kernels() {
    return {.rope_kv = nullptr, .attention = attention, .thread_nbytes = thread_nbytes};
}

}  // namespace legato::LEGATO_ISA
