// The plain integer kernel (see linear_int.hpp), written so that a compiler can vectorise over the 16 outputs.
#pragma once

#include "linear_unpack.hpp"

namespace legato::LEGATO_ISA {

constexpr int int_rows = 4;

template <IntWeights W, int R, bool>
void int_kernel(const PanelLayout& w, const std::byte* panel, const QuantisedRows& x, float* sums) {
    constexpr bool halves = groups_of_16(W);
    constexpr int group = halves ? 16 : 32;
    const std::int64_t factors = factor_nbytes(w), codes = code_nbytes(w);
    for (int i = 0; i < R * panel_outputs; ++i) sums[i] = 0.0f;
    std::int16_t weights[group][panel_outputs];
    for (std::int64_t g = 0; g < w.cols / group; ++g, panel += w.group_nbytes) {
        for (int k = 0; k < group; ++k) {
            const int at = k / 4 * 64 + k % 4;
            for (int o = 0; o < panel_outputs; ++o) {
                const int j = at + 4 * o;
                int code;
                if constexpr (W == IntWeights::q4) {
                    code = k < 16 ? static_cast<int>(panel[j]) & 15 : static_cast<int>(panel[j - 256]) >> 4;
                } else {
                    code = static_cast<int>(panel[j]);
                }
                weights[k][o] = static_cast<std::int16_t>(code - w.zero);
            }
        }
        float scale[panel_outputs], minimum[panel_outputs] = {};
        load_factors(panel + codes, w.half_scales, scale);
        if (w.has_minimum) load_factors(panel + codes + factors, w.half_scales, minimum);
        for (int r = 0; r < R; ++r) {
            const std::int64_t at = (halves ? g / 2 : g) * x.stride + r;
            const std::int8_t* codes_a = x.codes + at * quant_nbytes + (halves ? g % 2 * 16 : 0);
            std::int16_t a[group];
            for (int k = 0; k < group; ++k) {
                a[k] = static_cast<std::int16_t>(quant_step * codes_a[k] + codes_a[k + quant_group]);
            }
            std::int32_t dot[panel_outputs] = {};
            for (int k = 0; k < group; ++k) {
                for (int o = 0; o < panel_outputs; ++o) dot[o] += a[k] * weights[k][o];
            }
            const float scale_a = x.scales[at];
            const float sum_a = scaled_sum<halves>(x, r, g);
            for (int o = 0; o < panel_outputs; ++o) {
                float sum = sums[r * panel_outputs + o];
                sum += scale[o] * static_cast<float>(dot[o]) * scale_a;
                if (w.has_minimum) sum += minimum[o] * sum_a;
                sums[r * panel_outputs + o] = sum;
            }
        }
    }
}

}  // namespace legato::LEGATO_ISA
