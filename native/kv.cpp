#include "kv.hpp"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "quant.hpp"

namespace legato {

namespace {

std::int64_t padded(std::int64_t head_dim) { return (head_dim + kKeyLanes - 1) / kKeyLanes * kKeyLanes; }

std::int64_t element_nbytes(KvType type) { return type == KvType::f16 ? 2 : 4; }

}  // namespace

void KvShape::check() const {
    const auto require = [](bool ok, const std::string& what) {
        if (!ok) throw std::invalid_argument(what);
    };
    require(layers > 0, "layers must be positive, got " + std::to_string(layers));
    require(blocks > 0 && blocks <= std::numeric_limits<std::int32_t>::max(),
            "blocks must be in [1, 2^31), got " + std::to_string(blocks));
    require(block_tokens > 0 && block_tokens % kKeyLanes == 0 && block_tokens <= 4096,
            "block_tokens must be a multiple of 16 up to 4096, got " + std::to_string(block_tokens));
    require(kv_heads > 0 && kv_heads <= 1024, "kv_heads must be in [1, 1024], got " + std::to_string(kv_heads));
    require(head_dim > 0 && head_dim % 8 == 0 && head_dim <= 1024,
            "head_dim must be a multiple of 8 up to 1024, got " + std::to_string(head_dim));
    require(static_cast<double>(layers) * static_cast<double>(blocks) * static_cast<double>(head_nbytes()) *
                    static_cast<double>(kv_heads) <
                0x1p62,
            "the cache would be larger than the address space");
}

std::size_t KvShape::head_nbytes() const {
    return static_cast<std::size_t>(block_tokens * (head_dim + padded(head_dim)) * element_nbytes(type));
}

std::size_t KvShape::layer_nbytes() const { return static_cast<std::size_t>(blocks) * block_layer_nbytes(); }

KvCache::KvCache(const KvShape& shape) : shape_((shape.check(), shape)), memory_(shape.nbytes()) {}

KvLayer KvCache::layer(std::int64_t index) const {
    return KvLayer{
        .data = memory_.data() + static_cast<std::size_t>(index) * shape_.layer_nbytes(),
        .type = shape_.type,
        .block_tokens = shape_.block_tokens,
        .kv_heads = shape_.kv_heads,
        .head_dim = shape_.head_dim,
        .padded_dim = padded(shape_.head_dim),
        .head_nbytes = static_cast<std::int64_t>(shape_.head_nbytes()),
    };
}

void KvCache::check_block(std::int64_t block) const {
    if (block < 0 || block >= shape_.blocks)
        throw std::invalid_argument("block " + std::to_string(block) + " is not in [0, " +
                                    std::to_string(shape_.blocks) + ")");
}

std::byte* KvCache::at(std::int64_t layer, std::int64_t block) const {
    return memory_.data() + static_cast<std::size_t>(layer) * shape_.layer_nbytes() +
           static_cast<std::size_t>(block) * shape_.block_layer_nbytes();
}

void KvCache::copy_out(std::int64_t block, std::byte* into) const {
    check_block(block);
    const std::size_t nbytes = shape_.block_layer_nbytes();
    for (std::int64_t layer = 0; layer < shape_.layers; ++layer, into += nbytes)
        std::memcpy(into, at(layer, block), nbytes);
}

void KvCache::copy_in(std::int64_t block, const std::byte* source) {
    check_block(block);
    const std::size_t nbytes = shape_.block_layer_nbytes();
    for (std::int64_t layer = 0; layer < shape_.layers; ++layer, source += nbytes)
        std::memcpy(at(layer, block), source, nbytes);
}

void KvCache::read(std::int64_t layer_index, std::int64_t block, float* k, float* v) const {
    if (layer_index < 0 || layer_index >= shape_.layers)
        throw std::invalid_argument("layer " + std::to_string(layer_index) + " is not in [0, " +
                                    std::to_string(shape_.layers) + ")");
    check_block(block);
    const KvLayer kv = layer(layer_index);
    const std::int64_t tokens = kv.block_tokens, dim = kv.head_dim, heads = kv.kv_heads;
    const std::int64_t elements = tokens * (dim + kv.padded_dim);
    std::vector<float> values(static_cast<std::size_t>(elements));
    for (std::int64_t head = 0; head < heads; ++head) {
        const std::byte* at = kv.data + (block * heads + head) * kv.head_nbytes;
        if (kv.type == KvType::f16) {
            const auto* from = reinterpret_cast<const std::uint16_t*>(at);
            for (std::int64_t i = 0; i < elements; ++i) values[static_cast<std::size_t>(i)] = half_to_float(from[i]);
        } else {
            const float* from = reinterpret_cast<const float*>(at);
            values.assign(from, from + elements);
        }
        const float* v_values = values.data() + tokens * dim;
        for (std::int64_t token = 0; token < tokens; ++token) {
            const float* k_values = values.data() + token / kKeyLanes * kKeyLanes * dim + token % kKeyLanes;
            for (std::int64_t d = 0; d < dim; ++d) {
                k[(token * heads + head) * dim + d] = k_values[d * kKeyLanes];
                v[(token * heads + head) * dim + d] = v_values[token * kv.padded_dim + d];
            }
        }
    }
}

}  // namespace legato
