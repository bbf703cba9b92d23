// Rotary position embedding of q and k, and the write of k and v into the paged cache. Rows are independent.
#include "attention.hpp"
#include "isa/elementwise_rows.hpp"
#include "isa/simd.hpp"
#include "isa/tables.hpp"
#include "isa/team_loop.hpp"

namespace legato::LEGATO_ISA {

AttentionKernels attention_items_kernels();

namespace {

constexpr std::int64_t kMaxHeadDim = 1024;

// out[2i], out[2i + 1] = the pair x[2i], x[2i + 1] rotated, for a vector of pairs at a time as far as they go.
LEGATO_INLINE std::int64_t rotate_pair_vectors(const float* x, const float* cos, const float* sin, std::int64_t half,
                                               float* out) {
    std::int64_t i = 0;
#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (; i + 8 <= half; i += 8) {
        const Vec c = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(cos + i)));
        const Vec s = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(sin + i)));
        const Vec pairs = load(x + 2 * i);
        store(out + 2 * i, _mm512_fmaddsub_ps(pairs, c, mul(_mm512_permute_ps(pairs, 0xb1), s)));
    }
#elif LEGATO_ISA_AVX2
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    for (; i + 4 <= half; i += 4) {
        const Vec c = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(cos + i)), twice);
        const Vec s = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(sin + i)), twice);
        const Vec pairs = load(x + 2 * i);
        store(out + 2 * i, _mm256_fmaddsub_ps(pairs, c, mul(_mm256_permute_ps(pairs, 0xb1), s)));
    }
#else
    (void)x, (void)cos, (void)sin, (void)half, (void)out;
#endif
    return i;
}

// A dimension is always rotated by the same code, whatever row it is in.
LEGATO_INLINE void rotate(const RopeArgs& a, std::int64_t position, const float* x, float* out) {
    const std::int64_t half = a.rotary / 2;
    const float* cos = a.cos + position * half;
    const float* sin = a.sin + position * half;
    if (a.interleaved) {
        for (std::int64_t i = rotate_pair_vectors(x, cos, sin, half, out); i < half; ++i) {
            const float first = x[2 * i], second = x[2 * i + 1];
            out[2 * i] = first * cos[i] - second * sin[i];
            out[2 * i + 1] = second * cos[i] + first * sin[i];
        }
    } else {
        for (std::int64_t i = 0; i < half; i += kLanes) {
            const std::int64_t n = half - i < kLanes ? half - i : kLanes;
            const bool whole = n == kLanes;
            const Vec first = whole ? load(x + i) : load_n(x + i, n);
            const Vec second = whole ? load(x + half + i) : load_n(x + half + i, n);
            const Vec c = whole ? load(cos + i) : load_n(cos + i, n);
            const Vec s = whole ? load(sin + i) : load_n(sin + i, n);
            const Vec low = sub(mul(first, c), mul(second, s)), high = add(mul(second, c), mul(first, s));
            if (whole) {
                store(out + i, low);
                store(out + half + i, high);
            } else {
                store_n(out + i, low, n);
                store_n(out + half + i, high, n);
            }
        }
    }
    if (a.rotary < a.kv.head_dim)
        std::memcpy(out + a.rotary, x + a.rotary, static_cast<std::size_t>(a.kv.head_dim - a.rotary) * 4);
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
    team_for(chunks, [&](std::int64_t chunk) __attribute__((always_inline)) {
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
    });
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
