// act(x gate^T) * (x up^T), coded for the next layer: neither the two products nor their combination go to memory.
//
// Items are chunks of columns and of rows, as in linear.cpp. An item computes the same two panels of gate and of up, 32
// columns, for a block of rows; applies the activation; and codes the columns, which are one group. A row's bits are
// those of the layer, the activation and the coding one after the other.
#include "linear_gated.hpp"

#include <omp.h>

#include "elementwise.hpp"
#include "isa/elementwise_rows.hpp"
#include "linear_items.hpp"
#include "team_loop.hpp"

namespace legato::LEGATO_ISA {
namespace {

using std::int64_t;

constexpr int64_t pair = 2;  // panels of a group of columns
static_assert(pair * panel_outputs == quant_group);

Item gated_item_of(const PanelLayout& w, int64_t rows) {
    const Item item = item_of(w, rows, true);
    return {item.panels / 2 < pair ? pair : item.panels / 2 / pair * pair, item.rows};
}

// gate[r][p][16], up likewise -> values[r][32].
template <Gate kind>
void combine(const float* gate, const float* up, int64_t rows, float* values) {
    for (int64_t i = 0; i < rows * quant_group; i += kLanes)
        store(values + i, mul(activate<kind>(load(gate + i)), load(up + i)));
}

struct Sums {
    alignas(64) float panel[int_rows_most * panel_outputs];
    alignas(64) float gate[int_rows_most * quant_group];
    alignas(64) float up[int_rows_most * quant_group];
};

void multiply_pair(const IntPanels& panels, int64_t first, const QuantisedRows& x, int64_t rows, Sums& sums,
                   float* out) {
    for (int64_t p = 0; p < pair; ++p) {
        panels.multiply(first + p, x, rows, sums.panel);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(out + r * quant_group + p * panel_outputs, sums.panel + r * panel_outputs,
                        panel_outputs * sizeof(float));
    }
}

}  // namespace

std::size_t gated_scratch_nbytes(const PanelLayout& w) {
    const int64_t few = gated_item_of(w, 1).panels, many = gated_item_of(w, int64_t{1} << 20).panels;
    return static_cast<std::size_t>(2 * (few > many ? few : many) * unpacked_nbytes(w) + 63) / 64 * 64;
}

void gated_linear(const Matrix& gate, const Matrix& up, Gate kind, const Quantised& x, const Quantised& out,
                  std::byte* scratch) {
    const PanelLayout &g = gate.layout(), &u = up.layout();
    const Item item = gated_item_of(g, x.rows);
    std::byte* unpacked = scratch + gated_scratch_nbytes(g) * static_cast<std::size_t>(omp_get_thread_num());
    const int64_t panels = g.rows / panel_outputs, chunks = (panels + item.panels - 1) / item.panels;
    team_for_ranges(chunks * ((x.rows + item.rows - 1) / item.rows), [&](int64_t i) {
        const int64_t begin = i % chunks * item.panels, row_begin = i / chunks * item.rows;
        const int64_t end = begin + item.panels < panels ? begin + item.panels : panels;
        const int64_t row_end = row_begin + item.rows < x.rows ? row_begin + item.rows : x.rows;
        const bool many = row_end - row_begin >= few_rows;
        Sums sums;
        const auto block = [&](const IntPanels& gates, const IntPanels& ups, int64_t first, int64_t row, int64_t rows) {
            const QuantisedRows from = rows_from(x, row);
            multiply_pair(gates, first, from, rows, sums, sums.gate);
            multiply_pair(ups, first, from, rows, sums, sums.up);
            if (kind == Gate::silu) {
                combine<Gate::silu>(sums.gate, sums.up, rows, sums.gate);
            } else {
                combine<Gate::gelu_tanh>(sums.gate, sums.up, rows, sums.gate);
            }
            quantise_columns(sums.gate, out, first / pair, row, rows);
        };
        const IntPanels gates(g, begin, end, x, many, unpacked);
        const IntPanels ups(u, begin, end, x, many, unpacked + (end - begin) * unpacked_nbytes(g));
        if (many) {
            for_int_blocks(x, row_begin, row_end, [&](int64_t row, int64_t rows) {
                for (int64_t p = begin; p < end; p += pair) block(gates, ups, p, row, rows);
            });
        } else {  // a panel comes from memory, once
            for (int64_t p = begin; p < end; p += pair)
                for_int_blocks(x, row_begin, row_end,
                               [&](int64_t row, int64_t rows) { block(gates, ups, p, row, rows); });
        }
    });
}

bool fuses_gate(const Matrix& gate, const Matrix& up) {
#if LEGATO_ISA_AMX
    static_cast<void>(gate), static_cast<void>(up);
    return false;  // tiles have items of their own
#else
    return gate.quantised() && gate.layout().kind == up.layout().kind && gate.layout().group == up.layout().group &&
           gate.rows() == up.rows() && gate.rows() % quant_group == 0;
#endif
}

}  // namespace legato::LEGATO_ISA
