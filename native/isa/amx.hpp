// AMX tiles by number. Inline assembly, since GCC 12's intrinsics do not tell the compiler of the memory they touch and
// want literal tile numbers; put `order_memory` where tile loads and stores meet ordinary ones, but not where sums are
// held in registers: it forces them to the stack.
#pragma once

#include "isa/bf16.hpp"

namespace legato::LEGATO_ISA {

// Every tile is 16 rows of 64 bytes, but the first `low_tiles`, which are `rows` high. A thread configures its tiles
// before and releases them after.
inline void configure_tiles(int low_tiles = 0, std::int64_t rows = 16) {
    struct alignas(64) {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_nbytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int tile = 0; tile < low_tiles; ++tile) config.rows[tile] = static_cast<std::uint8_t>(rows);
    _tile_loadconfig(&config);
}

LEGATO_INLINE void order_memory() { asm volatile("" ::: "memory"); }

template <int Tile>
LEGATO_INLINE void tile_load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile));
}

template <int Tile>
LEGATO_INLINE void tile_store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile));
}

template <int Tile>
LEGATO_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// sums[16 rows][16] += a[16 rows][16 pairs] times b[16 pairs][16], pairs of bf16, in ascending order of pairs.
template <int Sums, int A, int B>
LEGATO_INLINE void tile_product_bf16() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(Sums));
}

}  // namespace legato::LEGATO_ISA
