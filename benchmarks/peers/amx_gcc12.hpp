// Included before every C++ file of llama.cpp when GCC is older than 13 builds it (see setup.sh).
//
// GCC 12's AMX intrinsics tell the compiler that ldtilecfg reads 8 bytes and that tileloadd reads no memory, so it
// drops the stores that fill the rest of the tile configuration, and ldtilecfg faults. These say what is read.
#pragma once
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])(config)) : "memory")

#undef _tile_loadd_internal
#define _tile_loadd_internal(dst, base, stride)                                                                        \
    __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm" #dst ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")

#undef _tile_stream_loadd_internal
#define _tile_stream_loadd_internal(dst, base, stride)                                                                 \
    __asm__ volatile("tileloaddt1\t(%0,%1,1), %%tmm" #dst ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")
#endif
