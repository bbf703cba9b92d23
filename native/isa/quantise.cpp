// Loop order: row, group of 32, element. A group's numbers depend on its 32 values only, so rows are invariant. Maximum
// and integer sums are exact in any order and every other operation is correctly rounded: all instruction sets agree.
#include "quant.hpp"
#include "quantised.hpp"
#if LEGATO_ISA_AMX
#include "linear_bf16.hpp"
#endif

namespace legato::LEGATO_ISA {
namespace {

constexpr float least_maximum = 0x1p-100f;  // below it levels / max|x| could overflow; such a group is zero

struct GroupFactors {
    float scale, inverse;
};

LEGATO_INLINE GroupFactors group_factors(float maximum, float levels = quant_levels) {
    const bool nonzero = maximum > least_maximum;
    return {nonzero ? maximum / levels : 0.0f, nonzero ? levels / maximum : 0.0f};
}

#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX || LEGATO_ISA_AVX2

// The sums of the first and the last 16 bytes' worth of eight int32.
LEGATO_INLINE void add_halves(__m256i sums, std::int32_t* half_sums) {
    sums = _mm256_hadd_epi32(sums, sums);
    sums = _mm256_hadd_epi32(sums, sums);
    half_sums[0] = _mm256_cvtsi256_si32(sums);
    half_sums[1] = _mm256_extract_epi32(sums, 4);
}

#endif

#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX

LEGATO_INLINE __m256i to_bytes(const __m512i* x) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_maskz_cvtepi32_epi8(0xffff, x[0])),
                                   _mm512_maskz_cvtepi32_epi8(0xffff, x[1]), 1);
}

// One plane of codes of x * down; the sums are those of code * up.
LEGATO_INLINE float quantise_equalised(const float* x, const float* down, const std::uint8_t* up, std::int8_t* codes,
                                       std::int32_t* half_sums) {
    const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(down));
    const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(down + 16));
    const __m512 largest = _mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high));
    const GroupFactors factors = group_factors(_mm512_reduce_max_ps(largest), 127.0f);
    const __m512 inverse = _mm512_set1_ps(factors.inverse);
    const __m512i q[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)),
                          _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))};
    const __m256i plane = to_bytes(q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), plane);
    const __m256i factor = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(up));
    add_halves(_mm256_dpbusd_epi32(_mm256_setzero_si256(), factor, plane), half_sums);
    return factors.scale;
}

LEGATO_INLINE float quantise_group(const float* x, std::int8_t* codes, std::int32_t* half_sums) {
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const __m512 largest = _mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high));
    const GroupFactors factors = group_factors(_mm512_reduce_max_ps(largest));
    const __m512 inverse = _mm512_set1_ps(factors.inverse);
    const __m512i q[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)),
                          _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))};
    const __m512i half_step = _mm512_set1_epi32(quant_step / 2);
    __m512i h[2], l[2];
    unroll<2>([&](auto i) {
        h[i] = _mm512_srai_epi32(_mm512_add_epi32(q[i], half_step), 3);
        l[i] = _mm512_sub_epi32(q[i], _mm512_slli_epi32(h[i], 3));
    });
    const __m256i high_plane = to_bytes(h), low_plane = to_bytes(l), ones = _mm256_set1_epi8(1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), high_plane);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + quant_group), low_plane);
    __m256i sums = _mm256_slli_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, high_plane), 3);
    add_halves(_mm256_dpbusd_epi32(sums, ones, low_plane), half_sums);
    return factors.scale;
}

#elif LEGATO_ISA_AVX2

LEGATO_INLINE float largest_of(const __m256* v) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 largest = _mm256_max_ps(_mm256_max_ps(_mm256_andnot_ps(sign, v[0]), _mm256_andnot_ps(sign, v[1])),
                                         _mm256_max_ps(_mm256_andnot_ps(sign, v[2]), _mm256_andnot_ps(sign, v[3])));
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

// `v` times `inverse`, rounded, in 16 bits: 0-3, 8-11, 4-7, 12-15 and the like from 16 on. Packing interleaves lanes.
LEGATO_INLINE void to_words(const __m256* v, float inverse, __m256i* words) {
    const __m256 factor = _mm256_set1_ps(inverse);
    __m256i q[4];
    unroll<4>([&](auto i) { q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], factor)); });
    words[0] = _mm256_packs_epi32(q[0], q[1]);
    words[1] = _mm256_packs_epi32(q[2], q[3]);
}

LEGATO_INLINE float quantise_group(const float* x, std::int8_t* codes, std::int32_t* half_sums) {
    __m256 v[4];
    unroll<4>([&](auto i) { v[i] = _mm256_loadu_ps(x + 8 * i); });
    const GroupFactors factors = group_factors(largest_of(v));
    __m256i words[2];
    to_words(v, factors.inverse, words);
    unroll<2>([&](auto half) {
        const __m256i ordered = _mm256_permute4x64_epi64(words[half], 0b11011000);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes) + half, ordered);
        std::int32_t quarters[2];
        add_halves(_mm256_madd_epi16(ordered, _mm256_set1_epi16(1)), quarters);
        half_sums[half] = quarters[0] + quarters[1];
    });
    return factors.scale;
}

// One plane of codes of x * down; the sums are those of code * up.
LEGATO_INLINE float quantise_equalised(const float* x, const float* down, const std::uint8_t* up, std::int8_t* codes,
                                       std::int32_t* half_sums) {
    __m256 v[4];
    unroll<4>([&](auto i) { v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_loadu_ps(down + 8 * i)); });
    const GroupFactors factors = group_factors(largest_of(v), 127.0f);
    __m256i words[2];
    to_words(v, factors.inverse, words);
    const __m256i packed = _mm256_packs_epi16(words[0], words[1]);
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), ordered);
    const __m256i factor = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(up));
    add_halves(_mm256_madd_epi16(_mm256_maddubs_epi16(factor, ordered), _mm256_set1_epi16(1)), half_sums);
    return factors.scale;
}

#else

// Over integers (the bits of |x| order like |x|), so that a compiler may vectorise.
LEGATO_INLINE float quantise_group(const float* x, std::int8_t* codes, std::int32_t* half_sums) {
    std::int32_t bits[quant_group];
    std::memcpy(bits, x, sizeof bits);
    std::int32_t largest = 0;
    for (std::int32_t b : bits) {
        const std::int32_t magnitude = b & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const GroupFactors factors = group_factors(bits_to_float(static_cast<std::uint32_t>(largest)));
    constexpr float rounding = 0x1.8p23f;  // x + rounding has the nearest integer, ties to even, in its low bits
    for (int k = 0; k < quant_group; ++k) {
        const std::uint32_t shifted = float_to_bits(x[k] * factors.inverse + rounding);
        bits[k] = static_cast<std::int32_t>(shifted) - 0x4b400000;
        const std::int32_t h = (bits[k] + quant_step / 2) >> 3;
        codes[k] = static_cast<std::int8_t>(h);
        codes[k + quant_group] = static_cast<std::int8_t>(bits[k] - quant_step * h);
    }
    half_sums[0] = half_sums[1] = 0;
    for (int k = 0; k < quant_group; ++k) half_sums[k / 16] += bits[k];
    return factors.scale;
}

#endif

// Code k of one row and group that is not equalised.
LEGATO_INLINE int plain_code(const std::int8_t* codes, std::int64_t k) {
#if LEGATO_ISA_AVX2
    std::int16_t code;
    std::memcpy(&code, codes + 2 * k, sizeof code);
    return code;
#else
    return quant_step * codes[k] + codes[k + quant_group];
#endif
}

void clear_row(const QuantisedRows& q) {
    for (std::int64_t g = 0; g < q.groups; ++g) {
        const std::int64_t at = g * q.stride;
        std::memset(q.codes + at * q.nbytes, 0, static_cast<std::size_t>(q.nbytes));
        q.scales[at] = q.scaled_sums[at] = 0.0f;
        q.minus_halves[2 * at] = q.minus_halves[2 * at + 1] = 0;
    }
}

// One group of one row.
LEGATO_INLINE void quantise_at(const float* x, const QuantisedRows& q, std::int64_t g) {
    const std::int64_t at = g * q.stride;
    std::int8_t* codes = q.codes + at * q.nbytes;
    std::int32_t half_sums[2];
    float scale;
#if LEGATO_ISA_AVX512 || LEGATO_ISA_AVX2
    if (q.equaliser != nullptr) {
        const std::int64_t k = g * quant_group;
        scale = quantise_equalised(x, q.equaliser->down() + k, q.equaliser->up() + k, codes, half_sums);
    } else
#endif
        scale = quantise_group(x, codes, half_sums);
    q.scales[at] = scale;
    q.scaled_sums[at] = scale * static_cast<float>(half_sums[0] + half_sums[1]);
    q.minus_halves[2 * at] = static_cast<std::int16_t>(-half_sums[0]);
    q.minus_halves[2 * at + 1] = static_cast<std::int16_t>(-half_sums[1]);
}

}  // namespace

std::size_t quantised_nbytes(std::int64_t rows, std::int64_t cols, Coding coding) {
#if LEGATO_ISA_AMX
    if (coding == Coding::bf16) return bf16_nbytes(rows, cols);
#endif
    return static_cast<std::size_t>(padded_rows(rows) * (cols / quant_group) * (coded_nbytes(coding) + 12));
}

void quantise_rows(const Rows& x, const Quantised& out, std::int64_t begin, std::int64_t end) {
#if LEGATO_ISA_AMX
    if (out.coding == Coding::bf16) return bf16_convert_rows(x, out, begin, end);
#endif
    for (std::int64_t r = begin; r < end; ++r) {
        const QuantisedRows q = rows_from(out, r);
        const float* row = x.data + r * x.stride;
        for (std::int64_t g = 0; g < q.groups; ++g) quantise_at(row + g * quant_group, q, g);
    }
    // The rows that fill up the last block are zero: a tile may multiply them, and no stray NaN or subnormal slows it
    // down.
    if (end == out.rows) {
        for (std::int64_t r = end; r < padded_rows(end); ++r) clear_row(rows_from(out, r));
    }
}

void quantise_columns(const float* values, const Quantised& out, std::int64_t group, std::int64_t begin,
                      std::int64_t rows) {
    for (std::int64_t r = 0; r < rows; ++r) quantise_at(values + r * quant_group, rows_from(out, begin + r), group);
}

void quantise(const Rows& x, const Quantised& out) {
    // A whole block of rows: rows of one block share cache lines, which two threads should not.
    const std::int64_t chunk = block_rows(x.rows) < 8 ? 1 : block_rows(x.rows);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t first = 0; first < x.rows; first += chunk) {
        quantise_rows(x, out, first, first + chunk < x.rows ? first + chunk : x.rows);
    }
}

void decode(const Quantised& x, const Rows& out) {
    for (std::int64_t r = 0; r < x.rows; ++r) {
        const QuantisedRows q = rows_from(x, r);
        for (std::int64_t k = 0; k < x.cols; ++k) {
            const std::int64_t at = k / quant_group * q.stride;
            const std::int8_t* codes = q.codes + at * q.nbytes;
            const std::int64_t in_group = k % quant_group;
            const int code = q.nbytes == quant_nbytes ? plain_code(codes, in_group) : codes[in_group];
            const float factor = x.equaliser != nullptr ? static_cast<float>(x.equaliser->up()[k]) : 1.0f;
            out.data[r * out.stride + k] = q.scales[at] * static_cast<float>(code) * factor;
        }
    }
}

}  // namespace legato::LEGATO_ISA
