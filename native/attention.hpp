// What the attention kernels read and write: a paged KV cache and a list of work items.
#pragma once

#include <cstddef>
#include <cstdint>

namespace legato {

// A row's keys are taken in splits of 256 absolute positions: one softmax a split, then the splits are merged in order.
// The boundaries are the same for every row, so a row's bits depend on neither the chunk it came in nor on which thread
// did which split. Within a split, tiles of 64 positions are worked on at a time.
constexpr std::int64_t kTileKeys = 64;
constexpr std::int64_t kSplitKeys = 256;
// Keys of one sub-block of K, and the padding of a V row: the widest vector.
constexpr std::int64_t kKeyLanes = 16;

enum class KvType : std::uint8_t { f32, f16 };

// One layer of the cache. A (block, head) holds K as [block_tokens / 16][head_dim][16 keys], so scores vectorise over
// keys, then V as [block_tokens][padded_dim], so outputs vectorise over dimensions.
struct KvLayer {
    std::byte* data;
    KvType type;
    std::int64_t block_tokens;
    std::int64_t kv_heads;
    std::int64_t head_dim;
    std::int64_t padded_dim;   // head_dim rounded up to 16; the padding is zero
    std::int64_t head_nbytes;  // K and V of one (block, head)
};

// Rows of one step. Sequence s owns rows [row_starts[s], row_starts[s + 1]), at consecutive positions.
struct Step {
    const std::int32_t* tokens;
    const std::int32_t* positions;
    const std::int32_t* row_starts;
    const std::int32_t* block_tables;  // [sequences, table_width]
    const std::int32_t* logit_rows;
    const std::int32_t* row_sequence;  // [rows]: the sequence each row belongs to
    std::int64_t rows;
    std::int64_t sequences;
    std::int64_t table_width;
    std::int64_t logit_count;
};

// A block of consecutive rows of one sequence against one kv head. Its splits are either done in order by one item, or
// one item each; then the item that finishes last merges the partial results, in order, whoever it is.
struct AttentionGroup {
    std::int32_t sequence;
    std::int32_t row;  // first row, in the step
    std::int32_t rows;
    std::int32_t kv_head;
    std::int32_t first_split;
    std::int32_t splits;
    std::int32_t partial;  // first partial row in scratch, or -1 if one item does all splits
    std::int32_t pending;  // items not finished; back at `splits` after each layer
};

struct AttentionItem {
    std::int32_t group;
    std::int32_t split;  // -1: all of the group's
};

struct AttentionWork {
    AttentionGroup* groups;
    const AttentionItem* items;  // longest first
    std::int64_t item_count;
};

struct AttentionArgs {
    KvLayer kv;
    const Step* step;
    AttentionWork work;
    const float* q;  // [rows, heads * head_dim], rows q_stride floats apart
    std::int64_t q_stride;
    float* out;  // as q
    std::int64_t out_stride;
    std::int64_t heads;
    std::int64_t window;  // position p sees (p - window, p]; 0: everything up to p
    bool exact;           // fp32 products: no rounding of queries, keys, weights and values to bf16
    float scale;
    float softcap;              // scores become softcap * tanh(score / softcap); 0: none
    std::byte* thread_scratch;  // `attention_thread_nbytes` for each thread
    std::size_t thread_nbytes;
    float* partials;
};

// Query rows (rows times heads of a group) one item handles at most, unless a single row has more heads than that. Many
// rows share the cost of fetching and widening a tile; the arrays of rows must stay in the second-level cache.
constexpr std::int64_t attention_block_rows(std::int64_t head_dim) { return head_dim <= 128 ? 96 : 48; }
// Floats of one partial row: the accumulator, a vector of sums, the maximum.
constexpr std::int64_t attention_partial_floats(std::int64_t padded_dim) { return padded_dim + 2 * kKeyLanes; }

struct RopeArgs {
    KvLayer kv;
    const Step* step;
    const float* qkv;  // [rows, (heads + 2 kv_heads) * head_dim]
    std::int64_t qkv_stride;
    float* q;  // [rows, heads * head_dim]
    std::int64_t q_stride;
    std::int64_t heads;
    const float* cos;  // [positions, rotary / 2]
    const float* sin;
    std::int64_t rotary;  // leading dimensions that are rotated
    bool interleaved;     // pairs (2i, 2i + 1), else (i, i + rotary / 2)
    const float* q_norm;  // [head_dim], or null: no per-head RMS norm
    const float* k_norm;
    float eps;
};

// Called by every thread of a team; see kernels.hpp.
struct AttentionKernels {
    void (*rope_kv)(const RopeArgs& args);
    void (*attention)(const AttentionArgs& args);
    // Bytes of scratch for one thread.
    std::size_t (*thread_nbytes)(std::int64_t head_dim, std::int64_t group_heads);
};

}  // namespace legato
