// Weights on their way to the integer kernels: nibbles to bytes, codes times an equaliser's powers.
#pragma once

#include "linear_int.hpp"

namespace legato::LEGATO_ISA {

#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX

LEGATO_INLINE __m512i splat_dword(const void* p) {
    std::int32_t dword;
    std::memcpy(&dword, p, sizeof dword);
    return _mm512_set1_epi32(dword);
}

// One quad of k times 2^shift: the even columns' factors and the odd ones', from memory. The products fit a byte.
LEGATO_INLINE __m512i scale_quad(__m512i codes, const std::uint32_t* factors) {
    const __m512i bytes = _mm512_set1_epi16(0x00ff);
    const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(codes, bytes), splat_dword(factors));
    return _mm512_or_si512(even, _mm512_mullo_epi16(_mm512_andnot_si512(bytes, codes), splat_dword(factors + 1)));
}

// Four quads of k in the low nibbles and four in the high ones, to bytes; times an equaliser's `factors` if not null.
LEGATO_INLINE void unpack_group(const std::byte* panel, const std::uint32_t* factors, std::byte* out) {
    const __m512i low = _mm512_set1_epi8(15);
    const auto put = [&](int quad, __m512i codes) __attribute__((always_inline)) {
        _mm512_store_si512(out + 64 * quad, factors != nullptr ? scale_quad(codes, factors + 2 * quad) : codes);
    };
    unroll<4>([&](auto v) __attribute__((always_inline)) {
        const __m512i packed = _mm512_loadu_si512(panel + 64 * v);
        put(v, _mm512_and_si512(packed, low));
        put(v + 4, _mm512_and_si512(_mm512_srli_epi16(packed, 4), low));
    });
}

// Bytes of a group times `factors`.
LEGATO_INLINE void scale_bytes(const std::byte* panel, const std::uint32_t* factors, int group, std::byte* out) {
    for (int quad = 0; quad < group / 4; ++quad)
        _mm512_store_si512(out + 64 * quad, scale_quad(_mm512_loadu_si512(panel + 64 * quad), factors + 2 * quad));
}

#elif LEGATO_ISA_AVX2

LEGATO_INLINE __m256i splat_dword(const void* p) {
    std::int32_t dword;
    std::memcpy(&dword, p, sizeof dword);
    return _mm256_set1_epi32(dword);
}

LEGATO_INLINE __m256i splat_qword(const void* p) {
    std::int64_t qword;
    std::memcpy(&qword, p, sizeof qword);
    return _mm256_set1_epi64x(qword);
}

LEGATO_INLINE __m256i low_nibbles(__m256i packed) { return _mm256_and_si256(packed, _mm256_set1_epi8(15)); }
LEGATO_INLINE __m256i high_nibbles(__m256i packed) { return low_nibbles(_mm256_srli_epi16(packed, 4)); }

// As above, for eight outputs.
LEGATO_INLINE __m256i scale_quad(__m256i codes, const std::uint32_t* factors) {
    const __m256i bytes = _mm256_set1_epi16(0x00ff);
    const __m256i even = _mm256_mullo_epi16(_mm256_and_si256(codes, bytes), splat_dword(factors));
    return _mm256_or_si256(even, _mm256_mullo_epi16(_mm256_andnot_si256(bytes, codes), splat_dword(factors + 1)));
}

LEGATO_INLINE void unpack_group(const std::byte* panel, const std::uint32_t* factors, std::byte* out) {
    const auto put = [&](int quad, int half, __m256i codes) __attribute__((always_inline)) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 64 * quad + 32 * half),
                           factors != nullptr ? scale_quad(codes, factors + 2 * quad) : codes);
    };
    for (int v = 0; v < 4; ++v)
        for (int half = 0; half < 2; ++half) {
            const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + 64 * v + 32 * half));
            put(v, half, low_nibbles(packed));
            put(v + 4, half, high_nibbles(packed));
        }
}

LEGATO_INLINE void scale_bytes(const std::byte* panel, const std::uint32_t* factors, int group, std::byte* out) {
    for (int j = 0; j < 16 * group; j += 32) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + j));
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + j), scale_quad(codes, factors + j / 64 * 2));
    }
}

#else

LEGATO_INLINE void scale_bytes(const std::byte* panel, const std::uint32_t* factors, int group, std::byte* out) {
    for (int j = 0; j < 16 * group; ++j)
        out[j] = static_cast<std::byte>(static_cast<unsigned>(panel[j]) *
                                        (factors[j / 64 * 2 + j % 2] >> (j % 4 / 2 * 16) & 0xffu));
}

LEGATO_INLINE void unpack_group(const std::byte* panel, const std::uint32_t* factors, std::byte* out) {
    for (int j = 0; j < 256; ++j) {
        out[j] = panel[j] & std::byte{15};
        out[j + 256] = panel[j] >> 4;
    }
    if (factors != nullptr) scale_bytes(out, factors, 32, out);
}

#endif

// For many rows a panel is first unpacked: nibbles to bytes, times an equaliser's powers if `factors` is not null, and
// scales in fp32.
inline PanelLayout unpack_panel(const PanelLayout& w, const std::byte* panel, const std::uint32_t* factors,
                                std::byte* out) {
    PanelLayout unpacked = w;
    unpacked.kind = WeightKind::q8;
    unpacked.half_scales = false;
    const std::int64_t codes = code_nbytes(w), factor = factor_nbytes(w), unpacked_codes = panel_outputs * w.group;
    unpacked.group_nbytes = unpacked_codes + 64 * (w.has_minimum ? 2 : 1);
    for (std::int64_t g = 0; g < w.cols / w.group; ++g, panel += w.group_nbytes, out += unpacked.group_nbytes) {
        fetch_ahead(panel, w.group_nbytes);
        if (w.kind == WeightKind::q4) {
            unpack_group(panel, factors, out);
        } else {
            scale_bytes(panel, factors, w.group, out);
        }
        if (factors != nullptr) factors += w.group / 2;
        load_factors(panel + codes, w.half_scales, reinterpret_cast<float*>(out + unpacked_codes));
        if (w.has_minimum)
            load_factors(panel + codes + factor, w.half_scales, reinterpret_cast<float*>(out + unpacked_codes + 64));
    }
    return unpacked;
}

}  // namespace legato::LEGATO_ISA
