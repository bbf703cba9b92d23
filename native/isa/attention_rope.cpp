// Rotary position embedding of q and k, and the write of k and v into the paged cache. Rows are independent.
#include "attention.hpp"
#include "isa/elementwise_rows.hpp"
#include "isa/simd.hpp"
#include "isa/tables.hpp"

namespace legato::LEGATO_ISA {

AttentionKernels attention_items_kernels();

namespace {

constexpr std::int64_t kMaxHeadDim = 1024;

// Each product and each sum is rounded on its own, so it does not matter how the compiler vectorises these loops.
void rotate(const RopeArgs& a, std::int64_t position, const float* __restrict x, float* __restrict out) {
    const std::int64_t half = a.rotary / 2;
    const float* __restrict cos = a.cos + position * half;
    const float* __restrict sin = a.sin + position * half;
    if (a.interleaved) {
        for (std::int64_t i = 0; i < half; ++i) {
            out[2 * i] = x[2 * i] * cos[i] - x[2 * i + 1] * sin[i];
            out[2 * i + 1] = x[2 * i + 1] * cos[i] + x[2 * i] * sin[i];
        }
    } else {
        for (std::int64_t i = 0; i < half; ++i) {
            out[i] = x[i] * cos[i] - x[i + half] * sin[i];
            out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
        }
    }
    for (std::int64_t i = a.rotary; i < a.kv.head_dim; ++i) out[i] = x[i];
}

// One head of one row, normalised first if there is a norm.
LEGATO_INLINE void rotate_head(const RopeArgs& a, std::int64_t position, const float* x, const float* norm,
                               float* out) {
    alignas(64) float normed[kMaxHeadDim];
    if (norm != nullptr) {
        rms_norm_row(x, norm, a.eps, a.kv.head_dim, normed);
        x = normed;
    }
    rotate(a, position, x, out);
}

LEGATO_INLINE void convert(const float* x, std::int64_t n, Half* out) {  // n: a multiple of 16
    for (std::int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i));
}
LEGATO_INLINE void convert(const float* x, std::int64_t n, float* out) {
    for (std::int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i));
}

template <class T>
void rope_rows(const RopeArgs& a) {
    const KvLayer& kv = a.kv;
    const std::int64_t dim = kv.head_dim;
    // K is written as columns: consecutive rows of one sequence share cache lines, hence several rows an item.
    constexpr std::int64_t kRows = 16;
    const std::int64_t chunks = (a.step->rows + kRows - 1) / kRows;
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        alignas(64) float row[kMaxHeadDim];
        alignas(64) T stored[kMaxHeadDim];
        const std::int64_t stop = chunk * kRows + kRows < a.step->rows ? chunk * kRows + kRows : a.step->rows;
        for (std::int64_t r = chunk * kRows; r < stop; ++r) {
            const std::int64_t position = a.step->positions[r];
            const float* x = a.qkv + r * a.qkv_stride;
            for (std::int64_t h = 0; h < a.heads; ++h)
                rotate_head(a, position, x + h * dim, a.q_norm, a.q + r * a.q_stride + h * dim);

            const std::int32_t* table = a.step->block_tables + a.step->row_sequence[r] * a.step->table_width;
            const std::int64_t block = table[position / kv.block_tokens];
            const std::int64_t token = position % kv.block_tokens;
            for (std::int64_t h = 0; h < kv.kv_heads; ++h) {
                T* keys = reinterpret_cast<T*>(kv.data + (block * kv.kv_heads + h) * kv.head_nbytes);
                for (std::int64_t d = dim; d < kv.padded_dim; ++d) row[d] = 0.0f;
                rotate_head(a, position, x + (a.heads + h) * dim, a.k_norm, row);
                convert(row, kv.padded_dim, stored);
                T* column = keys + token / kKeyLanes * kKeyLanes * dim + token % kKeyLanes;
                for (std::int64_t d = 0; d < dim; ++d) column[d * kKeyLanes] = stored[d];

                std::memcpy(row, x + (a.heads + kv.kv_heads + h) * dim, static_cast<std::size_t>(dim) * 4);
                convert(row, kv.padded_dim, keys + kv.block_tokens * dim + token * kv.padded_dim);
            }
        }
    }
}

void rope_kv(const RopeArgs& args) {
    if (args.kv.type == KvType::f16) {
        rope_rows<Half>(args);
    } else {
        rope_rows<float>(args);
    }
}

}  // namespace

AttentionKernels attention_kernels() {
    AttentionKernels kernels = attention_items_kernels();
    kernels.rope_kv = rope_kv;
    return kernels;
}

}  // namespace legato::LEGATO_ISA
