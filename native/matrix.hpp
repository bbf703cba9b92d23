// A packed weight [rows = outputs, cols = inputs], immutable once packed.
//
// Outputs lie in panels of 16 (the last one padded with zeros), each panel one contiguous stream in order of k:
//   dense:  for each k: 16 values (f32, f16 or bf16).
//   8-bit:  for each group: group/4 vectors of 64 bytes, vector v holding for each output the 4 bytes k = 4v .. 4v+3
//           (the order of VNNI's dwords and of an AMX tile), then 16 scales, then 16 minima if there are any.
//   4-bit:  the same with groups of 32 and two quads of k in one vector: byte j of vector v (of 4) holds quad v in its
//   low
//           nibble and quad v + 4 in its high nibble.
// value = scale * (q - zero) + minimum. Scales and minima are fp16 if each of them is exactly representable, else fp32.
// Codes below 64 are stored as they come, larger ones with zero 0 or 128.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "slab.hpp"

namespace legato {

enum class WeightKind : std::uint8_t { f32, f16, bf16, q4, q8 };

constexpr std::int64_t panel_outputs = 16;

// What a kernel needs to walk a panel. Plain data: the kernels of several instruction sets read it.
struct PanelLayout {
    const std::byte* data;  // 64-byte aligned
    std::int64_t rows;      // outputs
    std::int64_t cols;      // inputs
    std::int64_t panels;
    std::int64_t panel_nbytes;
    std::int64_t group_nbytes;  // codes, scales and minima of one group of one panel; dense: of one k
    WeightKind kind;
    int group;  // 16 or 32; 1 for dense weights
    int zero;
    bool has_minimum;
    bool half_scales;  // scales and minima are fp16, else fp32
    bool five_bits;    // 8 (q - zero) fits a byte: signed, or unsigned if zero is 0
    int spare_bits;    // codes times 2^spare_bits fit an unsigned byte
};

class Matrix {
  public:
    // `q` [rows, cols], `scale` and `minimum` (or null) [rows, cols / group]. `bits` 4 or 8, `group` 16 or 32; 0 <=
    // zero < 2^bits. Throws std::invalid_argument for cols that are no multiple of 32, codes out of range and scales
    // that are not finite.
    static Matrix pack_grouped(const std::uint8_t* q, const float* scale, const float* minimum, std::int64_t rows,
                               std::int64_t cols, int zero, int bits, int group);
    // `values` [rows, cols] of `kind`: float, fp16 bits or bf16 bits.
    static Matrix pack_dense(const void* values, std::int64_t rows, std::int64_t cols, WeightKind kind);

    std::int64_t rows() const { return layout_.rows; }
    std::int64_t cols() const { return layout_.cols; }
    std::size_t nbytes() const { return static_cast<std::size_t>(layout_.panels * layout_.panel_nbytes); }
    bool quantised() const { return layout_.group > 1; }
    const PanelLayout& layout() const { return layout_; }
    // "f32", "f16", "bf16", or "w<bits>g<group><scale type>[m]", e.g. "w4g32f16m".
    std::string format() const;
    // Writes the fp32 values, [rows, cols] row-major.
    void unpack(float* out) const;

  private:
    Matrix(const PanelLayout& layout, SlabPiece data);
    // Memory for a matrix of this layout, whose panels are counted here.
    static Matrix allocate(PanelLayout layout);

    PanelLayout layout_;
    SlabPiece data_;
};

}  // namespace legato
