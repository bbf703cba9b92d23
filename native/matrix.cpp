#include "matrix.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "quant.hpp"

namespace legato {
namespace {

using std::int64_t;

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

bool exact_in_half(const float* values, int64_t count) {
    std::uint16_t half;
    for (int64_t i = 0; i < count; ++i) {
        if (!float_to_half_exact(values[i], half)) return false;
    }
    return true;
}

void check_grouped(const std::uint8_t* q, const float* scale, const float* minimum, int64_t rows, int64_t cols,
                   int zero, int bits, int group) {
    require(rows > 0 && cols > 0, "a matrix needs at least one row and one column");
    require(bits == 4 || bits == 8, "bits must be 4 or 8");
    require(group == 16 || group == 32, "group must be 16 or 32");
    require(cols % 32 == 0, "columns of a quantised matrix must be a multiple of 32");
    require(zero >= 0 && zero < (1 << bits), "zero must be a code: 0 <= zero < 2^bits");
    const int64_t groups = rows * (cols / group);
    bool finite = true;
    for (int64_t i = 0; i < groups; ++i) finite &= std::isfinite(scale[i]);
    for (int64_t i = 0; minimum && i < groups; ++i) finite &= std::isfinite(minimum[i]);
    require(finite, "scales and minima must be finite");
    const auto [low, high] = std::minmax_element(q, q + rows * cols);
    require(bits == 8 || *high < 16, "4-bit codes must be below 16");
    // Kernels multiply signed bytes: codes minus zero must fit, unless zero is 0 and they are taken as unsigned.
    require(zero == 0 || (*high - zero <= 127 && *low - zero >= -128), "codes minus zero must fit in a signed byte");
}

// Copies up to 16 outputs of one panel; the rest stays zero.
struct PanelSource {
    int64_t first, count, cols, groups;
};

void store_factors(std::byte* at, const float* factors, const PanelSource& panel, int64_t g, bool half) {
    for (int64_t o = 0; o < panel.count; ++o) {
        const float value = factors[(panel.first + o) * panel.groups + g];
        if (half) {
            std::uint16_t bits = 0;
            float_to_half_exact(value, bits);
            std::memcpy(at + 2 * o, &bits, 2);
        } else {
            std::memcpy(at + 4 * o, &value, 4);
        }
    }
}

// `codes` has 16 outputs * group bytes in VNNI order; stores two quads of k in each byte.
void store_nibbles(std::byte* at, const std::uint8_t* codes) {
    for (int j = 0; j < 256; ++j) at[j] = static_cast<std::byte>(codes[j] | (codes[j + 256] << 4));
}

float load_factor(const std::byte* at, int64_t o, bool half) {
    if (half) {
        std::uint16_t bits;
        std::memcpy(&bits, at + 2 * o, 2);
        return half_to_float(bits);
    }
    float value;
    std::memcpy(&value, at + 4 * o, 4);
    return value;
}

int load_code(const PanelLayout& w, const std::byte* group, int64_t o, int k) {
    const int at = static_cast<int>((k / 4) * 64 + o * 4 + k % 4);
    if (w.kind == WeightKind::q8) return static_cast<int>(group[at]);
    return at < 256 ? static_cast<int>(group[at]) & 15 : static_cast<int>(group[at - 256]) >> 4;
}

}  // namespace

Matrix::Matrix(const PanelLayout& layout, SlabPiece data) : layout_(layout), data_(std::move(data)) {}

Matrix Matrix::allocate(PanelLayout layout) {
    layout.panels = (layout.rows + panel_outputs - 1) / panel_outputs;
    SlabPiece data = SlabPiece::allocate(static_cast<std::size_t>(layout.panels * layout.panel_nbytes));
    layout.data = data.data();
    return Matrix(layout, std::move(data));
}

Matrix Matrix::pack_grouped(const std::uint8_t* q, const float* scale, const float* minimum, int64_t rows, int64_t cols,
                            int zero, int bits, int group) {
    check_grouped(q, scale, minimum, rows, cols, zero, bits, group);
    const int64_t groups = cols / group;
    const bool half = exact_in_half(scale, rows * groups) && (!minimum || exact_in_half(minimum, rows * groups));
    const bool nibbles = bits == 4 && group == 32;  // 4-bit codes in groups of 16 take a byte each
    const auto [low, high] = std::minmax_element(q, q + rows * cols);
    const int moved_zero = zero == 0 || *high < 64 ? zero : 128;
    const int64_t factor_nbytes = panel_outputs * (half ? 2 : 4);

    PanelLayout layout{};
    layout.rows = rows;
    layout.cols = cols;
    layout.kind = nibbles ? WeightKind::q4 : WeightKind::q8;
    layout.group = group;
    layout.zero = moved_zero;
    layout.has_minimum = minimum != nullptr;
    layout.half_scales = half;
    layout.spare_bits = *high < 16 ? 4 : *high < 32 ? 3 : *high < 64 ? 2 : 0;
    layout.five_bits = zero == 0 ? *high < 32 : *high - zero < 16 && *low - zero >= -16;
    const int64_t code_nbytes = panel_outputs * group / (nibbles ? 2 : 1);
    layout.group_nbytes = code_nbytes + factor_nbytes * (minimum ? 2 : 1);
    layout.panel_nbytes = layout.group_nbytes * groups;
    Matrix matrix = allocate(layout);

    alignas(64) std::uint8_t codes[panel_outputs * 32];
    std::byte* at = matrix.data_.data();
    for (int64_t first = 0; first < rows; first += panel_outputs) {
        const PanelSource panel{first, std::min(panel_outputs, rows - first), cols, groups};
        for (int64_t g = 0; g < groups; ++g, at += layout.group_nbytes) {
            std::memset(codes, moved_zero, sizeof codes);
            for (int64_t o = 0; o < panel.count; ++o) {
                const std::uint8_t* from = q + (first + o) * cols + g * group;
                for (int quad = 0; quad < group / 4; ++quad) std::memcpy(codes + quad * 64 + o * 4, from + quad * 4, 4);
            }
            if (nibbles) {
                store_nibbles(at, codes);
            } else {
                const auto shift = static_cast<std::uint8_t>(moved_zero - zero);
                for (int64_t j = 0; j < code_nbytes; ++j) at[j] = static_cast<std::byte>(codes[j]);
                for (int64_t j = 0; shift && j < code_nbytes; ++j) {
                    if ((j / 4) % panel_outputs < panel.count) at[j] = static_cast<std::byte>(codes[j] + shift);
                }
            }
            std::memset(at + code_nbytes, 0, static_cast<std::size_t>(layout.group_nbytes - code_nbytes));
            store_factors(at + code_nbytes, scale, panel, g, half);
            if (minimum) store_factors(at + code_nbytes + factor_nbytes, minimum, panel, g, half);
        }
    }
    return matrix;
}

Matrix Matrix::pack_dense(const void* values, int64_t rows, int64_t cols, WeightKind kind) {
    require(rows > 0 && cols > 0, "a matrix needs at least one row and one column");
    require(kind == WeightKind::f32 || kind == WeightKind::f16 || kind == WeightKind::bf16,
            "a dense matrix is f32, f16 or bf16");
    const int64_t size = kind == WeightKind::f32 ? 4 : 2;
    PanelLayout layout{};
    layout.rows = rows;
    layout.cols = cols;
    layout.kind = kind;
    layout.group = 1;
    layout.group_nbytes = panel_outputs * size;
    layout.panel_nbytes = layout.group_nbytes * cols;
    Matrix matrix = allocate(layout);

    const auto transpose = [&]<class Value>(const Value* from) {
        auto* at = reinterpret_cast<Value*>(matrix.data_.data());
        for (int64_t first = 0; first < rows; first += panel_outputs) {
            const int64_t count = std::min(panel_outputs, rows - first);
            for (int64_t k = 0; k < cols; ++k, at += panel_outputs) {
                for (int64_t o = 0; o < count; ++o) at[o] = from[(first + o) * cols + k];
                for (int64_t o = count; o < panel_outputs; ++o) at[o] = 0;
            }
        }
    };
    if (kind == WeightKind::f32) {
        transpose(static_cast<const float*>(values));
    } else {
        transpose(static_cast<const std::uint16_t*>(values));
    }
    return matrix;
}

std::string Matrix::format() const {
    switch (layout_.kind) {
        case WeightKind::f32:
            return "f32";
        case WeightKind::f16:
            return "f16";
        case WeightKind::bf16:
            return "bf16";
        default:
            return std::string(layout_.kind == WeightKind::q4 ? "w4" : "w8") + "g" + std::to_string(layout_.group) +
                   (layout_.half_scales ? "f16" : "f32") + (layout_.has_minimum ? "m" : "");
    }
}

void Matrix::unpack(float* out) const {
    const PanelLayout& w = layout_;
    const int64_t factor_nbytes = panel_outputs * (w.half_scales ? 2 : 4);
    const int64_t code_nbytes = w.group_nbytes - factor_nbytes * (w.has_minimum ? 2 : 1);
    for (int64_t row = 0; row < w.rows; ++row) {
        const int64_t o = row % panel_outputs;
        const std::byte* panel = w.data + (row / panel_outputs) * w.panel_nbytes;
        for (int64_t k = 0; k < w.cols; ++k) {
            const std::byte* group = panel + (k / w.group) * w.group_nbytes;
            float value;
            if (w.kind == WeightKind::f32) {
                std::memcpy(&value, group + 4 * o, 4);
            } else if (w.kind == WeightKind::f16 || w.kind == WeightKind::bf16) {
                std::uint16_t bits;
                std::memcpy(&bits, group + 2 * o, 2);
                value = w.kind == WeightKind::f16 ? half_to_float(bits) : bf16_to_float(bits);
            } else {
                const std::byte* factors = group + code_nbytes;
                const int code = load_code(w, group, o, static_cast<int>(k % w.group)) - w.zero;
                value = load_factor(factors, o, w.half_scales) * static_cast<float>(code);
                if (w.has_minimum) value += load_factor(factors + factor_nbytes, o, w.half_scales);
            }
            out[row * w.cols + k] = value;
        }
    }
}

}  // namespace legato
