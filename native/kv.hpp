// The paged KV cache: `blocks` blocks of `block_tokens` positions in each layer. Which block holds which positions of
// which sequence is the caller's block table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.hpp"
#include "memory.hpp"

namespace legato {

struct KvShape {
    std::int64_t layers;
    std::int64_t blocks;
    std::int64_t block_tokens;  // a multiple of 16
    std::int64_t kv_heads;
    std::int64_t head_dim;  // a multiple of 8
    KvType type;

    // Throws std::invalid_argument naming the field that is out of range.
    void check() const;
    std::size_t head_nbytes() const;
    std::size_t block_layer_nbytes() const { return static_cast<std::size_t>(kv_heads) * head_nbytes(); }
    std::size_t block_nbytes() const { return static_cast<std::size_t>(layers) * block_layer_nbytes(); }
    std::size_t layer_nbytes() const;
    std::size_t nbytes() const { return static_cast<std::size_t>(layers) * layer_nbytes(); }
};

class KvCache {
  public:
    explicit KvCache(const KvShape& shape);

    const KvShape& shape() const { return shape_; }
    std::size_t nbytes() const { return shape_.nbytes(); }
    // Takes all memory from the system now; a step that meets new blocks does not wait for it. Only when unused.
    void touch() { memory_.touch(); }
    KvLayer layer(std::int64_t index) const;
    // Writes K and V of one block as [block_tokens, kv_heads, head_dim].
    void read(std::int64_t layer, std::int64_t block, float* k, float* v) const;
    // One block's shape().block_nbytes() as they are stored, layer after layer: out of the cache, or into it. A layer
    // holds its part of a block in one piece, so this is a memcpy a layer.
    void copy_out(std::int64_t block, std::byte* into) const;
    void copy_in(std::int64_t block, const std::byte* source);

  private:
    void check_block(std::int64_t block) const;
    std::byte* at(std::int64_t layer, std::int64_t block) const;

    KvShape shape_;
    PageBuffer memory_;
};

}  // namespace legato
