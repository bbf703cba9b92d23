// Pairs of bf16 in AVX-512 registers.
#pragma once

#include "isa/simd.hpp"

namespace legato::LEGATO_ISA {

// Pairs of bf16 from the upper halves of two fp32 patterns: `first` below `second`.
LEGATO_INLINE __m512i join_bf16(__m512i first, __m512i second) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(first, 16), second);
}

// Half a unit of bf16 added: the upper half is then x rounded to nearest, halves up.
LEGATO_INLINE __m512i bf16_bits(Vec x) { return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)); }

}  // namespace legato::LEGATO_ISA
