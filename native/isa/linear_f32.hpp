// fp32 micro-kernel: R rows by P panels. Loop order: k, panel, row. Each output is one chain acc = fma(x, w, acc) over
// ascending k that starts at 0, whatever R, P and the instruction set are, and a block of k continues the stored sum:
// so a row's bits do not depend on the rows beside it.
#pragma once

#include <array>
#include <utility>

#include "matrix.hpp"
#include "simd.hpp"

namespace legato::LEGATO_ISA {

#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX
constexpr int f32_rows = 12, f32_panels = 2;  // 24 sums, 2 weights and broadcasts in 32 registers
#elif LEGATO_ISA_AVX2
constexpr int f32_rows = 6, f32_panels = 1;  // 12 sums, 2 weights and broadcasts in 16 registers
#else
constexpr int f32_rows = 3, f32_panels = 1;
#endif

// w[p]: [k_count, 16] of panel p. sums: [rows, P, 16], read unless `first` is set.
using F32Kernel = void (*)(const float* const* w, const float* x, std::int64_t x_stride, std::int64_t k_count,
                           bool first, float* sums);

template <int R>
[[gnu::flatten]] void f32_kernel(const float* const* w, const float* x, std::int64_t x_stride, std::int64_t k_count,
                                 bool first, float* sums) {
    constexpr int vectors = panel_outputs / kLanes;  // of one panel
    constexpr int width = f32_panels * vectors;
    Vec acc[R][width];
    unroll<R>([&](auto r) {
        unroll<width>([&](auto v) { acc[r][v] = first ? zero() : load(sums + (r * width + v) * kLanes); });
    });
    const float* panels[f32_panels];
    for (int p = 0; p < f32_panels; ++p) panels[p] = w[p];
    // Three rows a pointer: row = base + {0, 1, 2} * stride is one addressing mode, and the pointers stay in registers.
    const float* bases[(R + 2) / 3];
    for (int b = 0; b < (R + 2) / 3; ++b) bases[b] = x + 3 * b * x_stride;
    const auto multiply = [&](std::int64_t k, auto ahead) __attribute__((always_inline)) {
        Vec weights[width];
        unroll<width>([&](auto v) {
            weights[v] = load(panels[v / vectors] + (k + ahead) * panel_outputs + (v % vectors) * kLanes);
        });
        unroll<R>([&](auto r) {
            const Vec broadcast = splat(bases[r / 3][r % 3 * x_stride + ahead]);
            unroll<width>([&](auto v) { acc[r][v] = fma(broadcast, weights[v], acc[r][v]); });
        });
    };
    // Four k a round: additions of pointers run on the ports of the multiply-adds.
    std::int64_t k = 0;
    for (; k + 4 <= k_count; k += 4) {
        unroll<4>([&](auto ahead) __attribute__((always_inline)) { multiply(k, ahead); });
        for (int b = 0; b < (R + 2) / 3; ++b) bases[b] += 4;
    }
    for (; k < k_count; ++k) {
        multiply(k, std::integral_constant<int, 0>{});
        for (int b = 0; b < (R + 2) / 3; ++b) ++bases[b];
    }
    unroll<R>([&](auto r) { unroll<width>([&](auto v) { store(sums + (r * width + v) * kLanes, acc[r][v]); }); });
}

template <int... I>
constexpr std::array<F32Kernel, sizeof...(I)> f32_kernel_table(std::integer_sequence<int, I...>) {
    return {f32_kernel<I + 1>...};
}

// f32_kernels[r - 1] does r rows.
constexpr auto f32_kernels = f32_kernel_table(std::make_integer_sequence<int, f32_rows>{});

}  // namespace legato::LEGATO_ISA
