// One vector type for every instruction set: `Vec` holds `kLanes` floats (4 portable, 8 AVX2, 16 AVX-512 and AMX).
// All operations are elementwise and correctly rounded, so a lane's bits do not depend on which lane it is; a masked
// tail runs the same operations as a full vector. Include only from native/isa/: everything lives in the ISA's own
// namespace, because a function compiled with AVX-512 flags must never be the copy the linker keeps for all CPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if LEGATO_ISA_AVX2 || LEGATO_ISA_AVX512 || LEGATO_ISA_AMX
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own headers
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define LEGATO_INLINE inline __attribute__((always_inline))

namespace legato::LEGATO_ISA {

using Half = std::uint16_t;  // IEEE binary16 bits

#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX

using Vec = __m512;
constexpr int kLanes = 16;

LEGATO_INLINE __mmask16 lanes_below(std::int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
LEGATO_INLINE Vec zero() { return _mm512_setzero_ps(); }
LEGATO_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
LEGATO_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
LEGATO_INLINE Vec load_n(const float* p, std::int64_t n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
LEGATO_INLINE Vec load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LEGATO_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
LEGATO_INLINE void store_n(float* p, Vec x, std::int64_t n) { _mm512_mask_storeu_ps(p, lanes_below(n), x); }
LEGATO_INLINE void store(Half* p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LEGATO_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
LEGATO_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
LEGATO_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
LEGATO_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
LEGATO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
LEGATO_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
LEGATO_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
// x where a >= b, else y.
LEGATO_INLINE Vec where_ge(Vec a, Vec b, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), y, x);
}
// x * 2^n, where `magic` = n + 1.5 * 2^23 as a float and both x and the result are normal.
LEGATO_INLINE Vec scale_by_exponent(Vec x, Vec magic) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(magic), 23)));
}

#elif LEGATO_ISA_AVX2

using Vec = __m256;
constexpr int kLanes = 8;

LEGATO_INLINE __m256i lanes_below(std::int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
LEGATO_INLINE Vec zero() { return _mm256_setzero_ps(); }
LEGATO_INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
LEGATO_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
LEGATO_INLINE Vec load_n(const float* p, std::int64_t n) { return _mm256_maskload_ps(p, lanes_below(n)); }
LEGATO_INLINE Vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
LEGATO_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
LEGATO_INLINE void store_n(float* p, Vec x, std::int64_t n) { _mm256_maskstore_ps(p, lanes_below(n), x); }
LEGATO_INLINE void store(Half* p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
LEGATO_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
LEGATO_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
LEGATO_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
LEGATO_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
LEGATO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
LEGATO_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
LEGATO_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
LEGATO_INLINE Vec where_ge(Vec a, Vec b, Vec x, Vec y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
LEGATO_INLINE Vec scale_by_exponent(Vec x, Vec magic) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(magic), 23)));
}

#else

typedef float Vec __attribute__((vector_size(16)));
typedef std::int32_t IntVec __attribute__((vector_size(16)));
constexpr int kLanes = 4;

// fp16 <-> fp32 in integer arithmetic: exact one way, round to nearest even (subnormals too) the other.
LEGATO_INLINE float half_to_float(Half h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t magnitude = h & 0x7fffu;
    std::uint32_t bits;
    if (magnitude >= 0x7c00u) {  // infinity, NaN
        bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
    } else if (magnitude >= 0x400u) {
        bits = sign | ((magnitude << 13) + (112u << 23));
    } else {  // subnormal: the magnitude in units of 2^-24, exact in fp32
        const float value = static_cast<float>(magnitude) * 0x1p-24f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
LEGATO_INLINE Half float_to_half(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<Half>(sign | 0x7e00u);
    if (bits >= 0x47800000u) return static_cast<Half>(sign | 0x7c00u);  // 65536 and above
    if (bits < 0x38800000u) {                                           // result is subnormal: let the adder round
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        const float shifted = magnitude + 0.5f;  // ulp(0.5) = 2^-24, the unit of a subnormal half
        std::uint32_t rounded;
        std::memcpy(&rounded, &shifted, 4);
        return static_cast<Half>(sign | (rounded - 0x3f000000u));
    }
    bits += 0xfffu + (bits >> 13 & 1u);
    return static_cast<Half>(sign | ((bits - (112u << 23)) >> 13));
}

LEGATO_INLINE Vec zero() { return Vec{}; }
LEGATO_INLINE Vec splat(float x) { return Vec{x, x, x, x}; }
LEGATO_INLINE Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
LEGATO_INLINE Vec load_n(const float* p, std::int64_t n) {
    Vec x{};
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return x;
}
LEGATO_INLINE Vec load(const Half* p) {
    return Vec{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
LEGATO_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
LEGATO_INLINE void store_n(float* p, Vec x, std::int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
}
LEGATO_INLINE void store(Half* p, Vec x) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(x[i]);
}
LEGATO_INLINE Vec add(Vec a, Vec b) { return a + b; }
LEGATO_INLINE Vec sub(Vec a, Vec b) { return a - b; }
LEGATO_INLINE Vec mul(Vec a, Vec b) { return a * b; }
LEGATO_INLINE Vec div(Vec a, Vec b) { return a / b; }
// Two roundings here: a fused multiply-add in software would be a hundred times slower. One ISA is consistent in
// itself.
LEGATO_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
LEGATO_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
LEGATO_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
LEGATO_INLINE Vec where_ge(Vec a, Vec b, Vec x, Vec y) { return a >= b ? x : y; }
LEGATO_INLINE Vec scale_by_exponent(Vec x, Vec magic) {
    typedef std::uint32_t Bits __attribute__((vector_size(16)));
    Bits xb, mb;
    std::memcpy(&xb, &x, sizeof x);
    std::memcpy(&mb, &magic, sizeof magic);
    xb += mb << 23;
    std::memcpy(&x, &xb, sizeof x);
    return x;
}

#endif

// Calls f(integral_constant<int, 0>) ... f(integral_constant<int, N - 1>): indices are constants, so a small array of
// Vec stays in registers (a loop that the compiler unrolls late leaves it on the stack).
template <int N, class F>
LEGATO_INLINE void unroll(F&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

// Sum and maximum over the lanes, always in the same order.
LEGATO_INLINE float lane_sum(Vec x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}
LEGATO_INLINE float lane_max(Vec x) {
#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX
    return _mm512_reduce_max_ps(x);
#else
    float lanes[kLanes];
    store(lanes, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
#endif
}

// 2^f for f in [-0.5, 0.5]: minimax of degree 5 with 2^0 exactly 1, relative error 9.2e-8 before rounding.
LEGATO_INLINE Vec exp2_fraction(Vec f) {
    Vec q = splat(0x1.5bba12p-10f);
    q = fma(q, f, splat(0x1.3cea88p-7f));
    q = fma(q, f, splat(0x1.c6b752p-5f));
    q = fma(q, f, splat(0x1.ebf9bcp-3f));
    q = fma(q, f, splat(0x1.62e42ap-1f));
    return fma(q, f, splat(1.0f));
}

// 2^x for x <= 0, exactly 1 at 0 and exactly 0 below -80 (-infinity too). The cut keeps every product with a weight
// this small out of the subnormals, which are slow; against a softmax sum of at least 1 it is 2^-56 of an fp32
// rounding.
LEGATO_INLINE Vec exp2_weight(Vec x) {
    const Vec clamped = max(x, splat(-81.0f));
    const Vec magic = add(clamped, splat(0x1.8p23f));
    const Vec f = sub(clamped, sub(magic, splat(0x1.8p23f)));
    return where_ge(x, splat(-80.0f), scale_by_exponent(exp2_fraction(f), magic), zero());
}

// e^x, clamped to about [2^-125, 2^125]; relative error about 2e-7. n ln 2 is subtracted in two parts (Cody and Waite).
LEGATO_INLINE Vec exp(Vec x) {
    const Vec clamped = min(max(x, splat(-86.0f)), splat(86.0f));
    const Vec magic = fma(clamped, splat(0x1.715476p0f), splat(0x1.8p23f));
    const Vec n = sub(magic, splat(0x1.8p23f));
    Vec r = fma(n, splat(-0x1.62e4p-1f), clamped);
    r = fma(n, splat(-0x1.7f7d1cp-20f), r);
    return scale_by_exponent(exp2_fraction(mul(r, splat(0x1.715476p0f))), magic);
}

// 1 / (1 + e^-x)
LEGATO_INLINE Vec sigmoid(Vec x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(zero(), x)))); }

LEGATO_INLINE Vec tanh(Vec x) { return sub(mul(splat(2.0f), sigmoid(mul(splat(2.0f), x))), splat(1.0f)); }

}  // namespace legato::LEGATO_ISA
