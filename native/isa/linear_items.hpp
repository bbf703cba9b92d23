// How a linear layer is cut into items of work, and what integer items have in common.
#pragma once

#include "linear_int.hpp"
#include "linear_unpack.hpp"
#include "quantised.hpp"

namespace legato::LEGATO_ISA {

constexpr std::int64_t f32_row_chunk = 256;  // rows of one fp32 item: their block of k stays in L2
constexpr std::int64_t int_row_chunk = 192;  // rows of one integer item
#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX || LEGATO_ISA_AVX2
constexpr bool int_unpacks = true;
#else
constexpr bool int_unpacks = false;
#endif
#if LEGATO_ISA_AVX2
constexpr std::int64_t few_rows = 5;  // below, items are chunks of weight, read once, and unpacked on the way: decode
#else
constexpr std::int64_t few_rows = 13;
#endif
constexpr std::int64_t item_nbytes = 12 << 10;     // of weight, for few rows
constexpr std::int64_t unpacked_most = 512 << 10;  // of an item's unpacked weights, which stay in L2

// Rows of the next block of at most `most`, so that `left` rows are split evenly.
LEGATO_INLINE std::int64_t even_block(std::int64_t left, std::int64_t most) {
    const std::int64_t blocks = (left + most - 1) / most;
    return (left + blocks - 1) / blocks;
}

// Micro-kernels for these weights: the [r - 1]-th does r rows, up to int_kernel_rows().
const IntKernel* int_kernels_for(IntWeights weights, bool equalised);
std::int64_t int_kernel_rows();
constexpr std::int64_t int_rows_most = 12;  // of any instruction set

// How a part is cut into items. For few rows: chunks of weight that are read once. For many: a rectangle of panels,
// unpacked once into L2, and rows, such that the pieces of y are a few cache lines wide and there are enough items for
// the threads.
struct Item {
    std::int64_t panels, rows;
};

inline Item item_of(const PanelLayout& w, std::int64_t rows, bool coded) {
    if (rows < few_rows) {
        const std::int64_t pairs = item_nbytes / (2 * w.panel_nbytes);
        return {pairs < 1 ? 2 : 2 * pairs, rows};
    }
    if (!coded) return {4, even_block(rows, f32_row_chunk)};
    const std::int64_t fit = unpacked_most / unpacked_nbytes(w);  // panels
    const std::int64_t wide = w.panels >= 64 ? 8 : 4;
    const std::int64_t panels = wide <= fit ? wide : fit < 2 ? 2 : fit / 2 * 2;
    const std::int64_t block = block_rows(rows), blocks = (rows + block - 1) / block;
    return {panels, even_block(blocks, int_row_chunk / block) * block};
}

LEGATO_INLINE IntWeights unpacked_weights(const PanelLayout& w) {
    if (w.kind == WeightKind::q4) return IntWeights::q4_bytes;
    return w.group == 32 ? IntWeights::q8_group32_scaled : IntWeights::q8_group16_scaled;
}

// Panels [begin, end) of a weight, ready to be multiplied with integers.
class IntPanels {
  public:
    // `many`: rows enough to unpack codes once for all of them, into `unpacked`, unpacked_nbytes() a panel.
    IntPanels(const PanelLayout& w, std::int64_t begin, std::int64_t end, const Quantised& x, bool many,
              std::byte* unpacked)
        : layout_(w), panels_(w.data + begin * w.panel_nbytes), begin_(begin) {
        const bool equalised = x.equaliser != nullptr;
        const bool unpack = int_unpacks && many && (w.kind == WeightKind::q4 || equalised);
        kernels_ = int_kernels_for(unpack ? unpacked_weights(w) : int_weights(w), equalised);
        if (!unpack) return;
        const std::uint32_t* factors = equalised ? x.equaliser->factors() : nullptr;
        for (std::int64_t p = 0; p < end - begin; ++p)
            layout_ = unpack_panel(w, panels_ + p * w.panel_nbytes, factors, unpacked + p * unpacked_nbytes(w));
        layout_.panel_nbytes = unpacked_nbytes(w);
        panels_ = unpacked;
    }

    // sums [rows, 16] of one panel; `x` begins with the first row.
    void multiply(std::int64_t panel, const QuantisedRows& x, std::int64_t rows, float* sums) const {
        kernels_[rows - 1](layout_, panels_ + (panel - begin_) * layout_.panel_nbytes, x, sums);
    }

  private:
    PanelLayout layout_;
    const std::byte* panels_;
    std::int64_t begin_;
    const IntKernel* kernels_;
};

// Calls f(row, rows) for rows [begin, end) of `x`, as many at a time as a micro-kernel does; all of one block.
template <class F>
LEGATO_INLINE void for_int_blocks(const Quantised& x, std::int64_t begin, std::int64_t end, F&& f) {
    const std::int64_t block = block_rows(x.rows);
    for (std::int64_t row = begin; row < end;) {
        const std::int64_t block_end = row - row % block + block;
        const std::int64_t rows = even_block((block_end < end ? block_end : end) - row, int_kernel_rows());
        f(row, rows);
        row += rows;
    }
}

}  // namespace legato::LEGATO_ISA
