// Embedding rows: y[r, :] = scale * w[ids[r], :], the values of Matrix::unpack. Loop order: row, k. A row is on its
// own.
#include "kernels.hpp"
#include "linear_expand.hpp"

namespace legato::LEGATO_ISA {
namespace {

float factor(const std::byte* at, std::int64_t output, bool half) {
    if (half) {
        std::uint16_t bits;
        std::memcpy(&bits, at + 2 * output, sizeof bits);
        return legato::half_to_float(bits);
    }
    float value;
    std::memcpy(&value, at + 4 * output, sizeof value);
    return value;
}

void gather_dense(const PanelLayout& w, const std::byte* panel, std::int64_t output, float scale, float* y) {
    if (w.kind == WeightKind::f32) {
        const auto* values = reinterpret_cast<const float*>(panel) + output;
        for (std::int64_t k = 0; k < w.cols; ++k) y[k] = scale * values[k * panel_outputs];
        return;
    }
    const auto* bits = reinterpret_cast<const std::uint16_t*>(panel) + output;
    const bool half = w.kind == WeightKind::f16;
    for (std::int64_t k = 0; k < w.cols; ++k) {
        const std::uint16_t b = bits[k * panel_outputs];
        y[k] = scale * (half ? legato::half_to_float(b) : bf16_to_float(b));
    }
}

void gather_grouped(const PanelLayout& w, const std::byte* at, std::int64_t output, float scale, float* y) {
    const std::int64_t codes = code_nbytes(w), factors = factor_nbytes(w);
    const bool nibbles = w.kind == WeightKind::q4;
    for (std::int64_t k = 0; k < w.cols; k += w.group, at += w.group_nbytes, y += w.group) {
        const float group_scale = factor(at + codes, output, w.half_scales);
        const float minimum = w.has_minimum ? factor(at + codes + factors, output, w.half_scales) : 0.0f;
        for (int j = 0; j < w.group; ++j) {
            const int vector = nibbles ? j / 4 % 4 : j / 4;
            int code = static_cast<int>(at[vector * 64 + output * 4 + j % 4]);
            if (nibbles) code = j < 16 ? code & 15 : code >> 4;
            const float value = group_scale * static_cast<float>(code - w.zero);
            y[j] = scale * (w.has_minimum ? value + minimum : value);
        }
    }
}

}  // namespace

void gather(const Matrix& w, const std::int32_t* ids, float scale, const Rows& y) {
    const PanelLayout& layout = w.layout();
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t r = 0; r < y.rows; ++r) {
        const std::int64_t id = ids[r];
        const std::byte* panel = layout.data + id / panel_outputs * layout.panel_nbytes;
        float* row = y.data + r * y.stride;
        if (layout.group > 1) {
            gather_grouped(layout, panel, id % panel_outputs, scale, row);
        } else {
            gather_dense(layout, panel, id % panel_outputs, scale, row);
        }
    }
}

}  // namespace legato::LEGATO_ISA
