// The linear layer: chooses a micro-kernel by the weight's format and the number of rows, and splits the work.
//
// One work-sharing loop over items of (chunk of panels of one part, chunk of rows). An item keeps a panel in L1 for all
// of its rows. No item splits k, and all micro-kernels of one arithmetic give the same bits, so neither the split nor
// the number of threads shows in the result. Bias and residual are added last: (sum + bias) + residual.
#include <omp.h>

#include "linear_expand.hpp"
#include "linear_f32.hpp"
#include "linear_gated.hpp"
#include "linear_items.hpp"
#if LEGATO_ISA_AMX
#include "linear_amx.hpp"
#include "linear_bf16.hpp"
#endif
#include "linear_peak.hpp"
#include "quantised.hpp"
#include "team_loop.hpp"

namespace legato::LEGATO_ISA {
namespace {

using std::int64_t;

constexpr int64_t f32_block = 256;  // k of one fp32 block: two panels of weights take 32 KiB of L1

struct ThreadScratch {
    alignas(64) float expanded[f32_panels * f32_block * panel_outputs];
    alignas(64) float sums[f32_row_chunk * f32_panels * panel_outputs];
#if LEGATO_ISA_AMX
    AmxScratch amx;
#endif
    // Followed by an unpacked panel.
};

#if LEGATO_ISA_AMX
constexpr int64_t amx_least_rows = 16;
constexpr int64_t amx_most_rest = 10;
LEGATO_INLINE bool use_amx(const PanelLayout& w, int64_t rows) { return rows >= amx_least_rows && amx_kernel_for(w); }
#endif

struct Call {
    const Rows* x;
    const Quantised* x_coded;
    const Rows* y;
    const float* bias;
    const Rows* residual;
};

// One part and where its outputs go.
struct Part {
    const PanelLayout* w;
    int64_t first_output;
    Item item;
    int64_t panel_chunks, items;
    bool coded;  // integers or bf16, as x_coded
};

template <bool Bias, bool Residual>
void finish_full(const Call& call, int64_t column, int64_t row, int64_t rows, const float* sums, int64_t sums_stride) {
    constexpr int vectors = panel_outputs / kLanes;
    Vec bias[vectors];
    if constexpr (Bias) unroll<vectors>([&](auto v) { bias[v] = load(call.bias + column + v * kLanes); });
    float* y = call.y->data + row * call.y->stride + column;
    const float* residual = Residual ? call.residual->data + row * call.residual->stride + column : nullptr;
    for (int64_t r = 0; r < rows; ++r, sums += sums_stride, y += call.y->stride) {
        unroll<vectors>([&](auto v) {
            Vec value = load(sums + v * kLanes);
            if constexpr (Bias) value = add(value, bias[v]);
            if constexpr (Residual) value = add(value, load(residual + v * kLanes));
            store(y + v * kLanes, value);
        });
        if constexpr (Residual) residual += call.residual->stride;
    }
}

// y of `rows` rows and up to 16 outputs of one panel from their sums.
void finish(const Call& call, const Part& part, int64_t panel, int64_t row, int64_t rows, const float* sums,
            int64_t sums_stride) {
    const int64_t output = panel * panel_outputs, column = part.first_output + output;
    const int64_t left = part.w->rows - output;
    if (left >= panel_outputs) {
        if (call.bias && call.residual) return finish_full<true, true>(call, column, row, rows, sums, sums_stride);
        if (call.bias) return finish_full<true, false>(call, column, row, rows, sums, sums_stride);
        if (call.residual) return finish_full<false, true>(call, column, row, rows, sums, sums_stride);
        return finish_full<false, false>(call, column, row, rows, sums, sums_stride);
    }
    for (int64_t r = row; r < row + rows; ++r, sums += sums_stride) {
        for (int64_t o = 0; o < left; ++o) {
            float value = sums[o];
            if (call.bias) value += call.bias[column + o];
            if (call.residual) value += call.residual->data[r * call.residual->stride + column + o];
            call.y->data[r * call.y->stride + column + o] = value;
        }
    }
}

// Rows of y lie far apart: without this, `finish` waits for memory.
void prefetch_outputs(const Call& call, const Part& part, int64_t panel, int64_t row, int64_t rows) {
    const int64_t column = part.first_output + panel * panel_outputs;
    for (int64_t r = row; r < row + rows; ++r) __builtin_prefetch(call.y->data + r * call.y->stride + column, 1);
}

void int_item(const Call& call, const Part& part, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
              int64_t row_end, std::byte* unpacked) {
    const bool few = row_end - row_begin < few_rows;
    const IntPanels panels(*part.w, panel_begin, panel_end, *call.x_coded, !few, unpacked);
    alignas(64) float sums[int_rows_most * panel_outputs];
    const auto multiply = [&](int64_t row, int64_t rows, int64_t panel) {
        if (rows > 1) prefetch_outputs(call, part, panel, row, rows);
        panels.multiply(panel, rows_from(*call.x_coded, row), rows, sums);
        finish(call, part, panel, row, rows, sums, panel_outputs);
    };
    if (few) {  // a panel comes from memory, once
        for (int64_t panel = panel_begin; panel < panel_end; ++panel)
            for_int_blocks(*call.x_coded, row_begin, row_end,
                           [&](int64_t row, int64_t rows) { multiply(row, rows, panel); });
    } else {
        for_int_blocks(*call.x_coded, row_begin, row_end, [&](int64_t row, int64_t rows) {
            for (int64_t panel = panel_begin; panel < panel_end; ++panel) multiply(row, rows, panel);
        });
    }
}

#if LEGATO_ISA_AMX
void amx_item(const Call& call, const Part& part, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
              int64_t row_end, AmxScratch& scratch, std::byte* unpacked) {
    const PanelLayout& w = *part.w;
    // A block of few rows costs as much as one of 16: VNNI does those.
    const int64_t rest = (row_end - row_begin) % 16;
    if (rest > 0 && rest <= amx_most_rest) {
        int_item(call, part, panel_begin, panel_end, row_end - rest, row_end, unpacked);
        row_end -= rest;
        if (row_end == row_begin) return;
    }
    const int64_t groups = w.cols / w.group, pairs = (panel_end - panel_begin + 1) / 2;
    auto* weights = reinterpret_cast<AmxGroup*>(unpacked);
    const auto packed = [&](int64_t pair) { return w.data + (panel_begin + 2 * pair) * w.panel_nbytes; };
    const auto unpack = [&](int64_t pair) {
        const bool odd = panel_begin + 2 * pair + 1 == panel_end;
        unpack_pair(w, packed(pair), packed(pair) + (odd ? 0 : w.panel_nbytes), weights + pair * groups);
    };
    // In the first block of rows, a pair is unpacked a pair ahead, when it has been fetched for two.
    unpack(0);
    const AmxKernel kernel = amx_kernel_for(w);
    int parity = 0;
    AmxBlock block{weights, rows_from(*call.x_coded, row_begin), nullptr, 2 * w.group_nbytes};
    for (int64_t row = row_begin, pair = 0; row < row_end;) {
        const bool new_row = pair + 1 == pairs;
        const int64_t next_row = new_row ? row + 16 : row, next_pair = new_row ? 0 : pair + 1;
        if (row == row_begin && pair + 1 < pairs) unpack(pair + 1);
        block.fetch = row == row_begin ? packed(pair + 2) : nullptr;
        AmxBlock next = block;
        next.weights = weights + next_pair * groups;
        if (new_row && next_row < row_end) next.x = rows_from(*call.x_coded, next_row);
        const int64_t rows = row_end - row < 16 ? row_end - row : 16;
        for (int64_t p = panel_begin + 2 * pair; p < panel_end && p < panel_begin + 2 * pair + 2; ++p) {
            prefetch_outputs(call, part, p, row, rows);
        }
        kernel(block, groups, next_row < row_end ? &next : nullptr, row == row_begin && pair == 0, parity, scratch);
        for (int64_t p = 0; p < 2 && panel_begin + 2 * pair + p < panel_end; ++p) {
            finish(call, part, panel_begin + 2 * pair + p, row, rows, scratch.sums[0][p], 2 * panel_outputs);
        }
        row = next_row;
        pair = next_pair;
        block = next;
    }
}
#endif

#if LEGATO_ISA_AMX
void bf16_item(const Call& call, const Part& part, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
               int64_t row_end, float* sums, std::byte* unpacked) {
    const PanelLayout& w = *part.w;
    const int64_t groups = w.cols / quant_group, nbytes = groups * bf16_tile_nbytes,
                  pairs = (panel_end - panel_begin + 1) / 2;
    const auto panel_at = [&](int64_t pair, int64_t p) {
        return panel_begin + 2 * pair + p < panel_end ? unpacked + (2 * pair + p) * nbytes
                                                      : unpacked + 2 * pair * nbytes;
    };
    for (int64_t row = row_begin; row < row_end;) {
        const int64_t rows = row_end - row < 2 * bf16_rows ? row_end - row : 2 * bf16_rows;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t first = panel_begin + 2 * pair, last = first + 2 < panel_end ? first + 2 : panel_end;
            if (row == row_begin)
                for (int64_t p = first; p < last; ++p)
                    expand_bf16_panel(w, w.data + p * w.panel_nbytes, unpacked + (p - panel_begin) * nbytes);
            for (int64_t p = first; p < last && rows > 1; ++p) prefetch_outputs(call, part, p, row, rows);
            const std::byte* x = bf16_block(*call.x_coded, row);
            if (rows > bf16_rows) {
                bf16_products<2>(x, nbytes, panel_at(pair, 0), panel_at(pair, 1), groups, sums);
            } else {
                bf16_products<1>(x, nbytes, panel_at(pair, 0), panel_at(pair, 1), groups, sums);
            }
            for (int64_t p = first; p < last; ++p)
                finish(call, part, p, row, rows, sums + (p - first) * panel_outputs, 2 * panel_outputs);
        }
        row += rows;
    }
}
#endif

void f32_item(const Call& call, const Part& part, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
              int64_t row_end, ThreadScratch& scratch) {
    const PanelLayout& w = *part.w;
    constexpr int64_t width = f32_panels * panel_outputs;
    const int64_t unit = w.group;
    const int64_t block = (even_block(w.cols, f32_block) + unit - 1) / unit * unit;
    for (int64_t panel = panel_begin; panel < panel_end; panel += f32_panels) {
        const int64_t count = panel_end - panel < f32_panels ? panel_end - panel : f32_panels;
        for (int64_t k = 0; k < w.cols; k += block) {
            const int64_t k_end = k + block < w.cols ? k + block : w.cols;
            const float* panels[f32_panels];
            for (int64_t p = 0; p < f32_panels; ++p) {
                if (p >= count) {
                    panels[p] = panels[0];  // an odd panel is done twice
                    continue;
                }
                const std::byte* at = w.data + (panel + p) * w.panel_nbytes;
                if (w.kind == WeightKind::f32) {
                    panels[p] = reinterpret_cast<const float*>(at) + k * panel_outputs;
                } else {
                    float* expanded = scratch.expanded + p * f32_block * panel_outputs;
                    expand_panel(w, at, k, k_end, expanded);
                    panels[p] = expanded;
                }
            }
            // While these rows are computed, what comes next is fetched: a slice of the next panels for each block of
            // rows.
            const std::byte* next = w.data + (panel + f32_panels) * w.panel_nbytes;
            const std::byte* next_end = next + (panel + f32_panels < panel_end ? f32_panels * w.panel_nbytes : 0);
            const int64_t slice = f32_panels * w.panel_nbytes * f32_rows / (row_end - row_begin);
            for (int64_t row = row_begin; row < row_end;) {
                const int64_t rows = even_block(row_end - row, f32_rows);
                if (k_end == w.cols && rows > 1) {
                    for (int64_t p = 0; p < count; ++p) prefetch_outputs(call, part, panel + p, row, rows);
                    for (const std::byte* end = next + slice; next < end && next < next_end; next += 64) {
                        __builtin_prefetch(next, 0, 2);
                    }
                }
                f32_kernels[static_cast<std::size_t>(rows - 1)](panels, call.x->data + row * call.x->stride + k,
                                                                call.x->stride, k_end - k, k == 0,
                                                                scratch.sums + (row - row_begin) * width);
                row += rows;
            }
        }
        for (int64_t p = 0; p < count; ++p) {
            finish(call, part, panel + p, row_begin, row_end - row_begin, scratch.sums + p * panel_outputs, width);
        }
    }
}

std::size_t thread_scratch_nbytes(const Matrix* const* parts, int part_count) {
    int64_t unpacked = 0;
    for (int p = 0; p < part_count; ++p) {
        if (!parts[p]->quantised()) continue;
        const PanelLayout& w = parts[p]->layout();
        // AMX unpacks the items of few rows too.
        const int64_t few = item_of(w, 1, true).panels, many = item_of(w, int64_t{1} << 20, true).panels;
        const int64_t nbytes = (few > many ? few : many) * unpacked_nbytes(w);
        if (nbytes > unpacked) unpacked = nbytes;
        if (part_count == 2 && static_cast<int64_t>(gated_scratch_nbytes(w)) > unpacked)
            unpacked = static_cast<int64_t>(gated_scratch_nbytes(w));
    }
    return sizeof(ThreadScratch) + static_cast<std::size_t>((unpacked + 63) / 64 * 64);
}

void linear(const Matrix* const* parts, int part_count, const Rows& x, const Quantised* x_coded, const Rows& y,
            const float* bias, const Rows* residual, std::byte* scratch_bytes) {
    const Call call{&x, x_coded, &y, bias, residual};
    scratch_bytes += thread_scratch_nbytes(parts, part_count) * static_cast<std::size_t>(omp_get_thread_num());
    auto& scratch = *reinterpret_cast<ThreadScratch*>(scratch_bytes);
    std::byte* unpacked = scratch_bytes + sizeof(ThreadScratch);
    const auto part_at = [&](int index, int64_t first_output) {
        const PanelLayout& w = parts[index]->layout();
        const bool coded = x_coded && parts[index]->quantised();
        const Item item = item_of(w, x.rows, coded);
        const int64_t chunks = (w.panels + item.panels - 1) / item.panels;
        return Part{&w, first_output, item, chunks, chunks * ((x.rows + item.rows - 1) / item.rows), coded};
    };
    int64_t items = 0;
    for (int p = 0; p < part_count; ++p) items += part_at(p, 0).items;
#if LEGATO_ISA_AMX
    const bool bf16 = x_coded && x_coded->coding == Coding::bf16;
    const bool tiles = bf16 || (x_coded && x.rows >= amx_least_rows);
    if (bf16) {
        configure_bf16_tiles(x.rows);
    } else if (tiles) {
        configure_tiles();
    }
#endif
    team_for_ranges(items, [&](int64_t i) {
        int index = 0;
        int64_t left = i;
        Part part = part_at(0, 0);
        while (left >= part.items) {
            left -= part.items;
            const int64_t first_output = part.first_output + part.w->rows;
            part = part_at(++index, first_output);
        }
        const int64_t panel = left % part.panel_chunks * part.item.panels,
                      row = left / part.panel_chunks * part.item.rows;
        const int64_t panel_end = panel + part.item.panels < part.w->panels ? panel + part.item.panels : part.w->panels;
        const int64_t row_end = row + part.item.rows < x.rows ? row + part.item.rows : x.rows;
        if (!part.coded) {
            f32_item(call, part, panel, panel_end, row, row_end, scratch);
#if LEGATO_ISA_AMX
        } else if (bf16) {
            bf16_item(call, part, panel, panel_end, row, row_end, scratch.sums, unpacked);
        } else if (use_amx(*part.w, x.rows)) {
            amx_item(call, part, panel, panel_end, row, row_end, scratch.amx, unpacked);
#endif
        } else {
            int_item(call, part, panel, panel_end, row, row_end, unpacked);
        }
    });
#if LEGATO_ISA_AMX
    if (tiles) _tile_release();
#endif
}

ShiftLimits shift_limits(const Matrix* const* parts, int part_count) {
    ShiftLimits limits{.most = quant_shifts.most};
    bool nibbles = false;
    for (int p = 0; p < part_count; ++p) {
        const PanelLayout& w = parts[p]->layout();
        if (!parts[p]->quantised()) continue;
        if (w.spare_bits < limits.most) limits.most = w.spare_bits;
        nibbles = nibbles || w.kind == WeightKind::q4;
    }
    if (nibbles) limits.sum = quant_shifts.sum;  // 8-bit codes are multiplied as two nibbles
    return nibbles || quant_equalises_bytes ? limits : ShiftLimits{};
}

Coding coding(const Matrix* const* parts, int part_count, Activations activations) {
    if (activations == Activations::bf16) return Coding::bf16;
    return shift_limits(parts, part_count).most > 0 ? Coding::equalised : Coding::plain;
}

std::size_t linear_scratch_nbytes(const Matrix* const* parts, int part_count, int threads) {
    return thread_scratch_nbytes(parts, part_count) * static_cast<std::size_t>(threads);
}

}  // namespace

void gather(const Matrix& w, const std::int32_t* ids, float scale, const Rows& y);

LinearKernels linear_kernels() {
#if LEGATO_ISA_AMX
    constexpr bool has_bf16 = true;
#else
    constexpr bool has_bf16 = false;
#endif
    return {.coding = coding,
            .shift_limits = shift_limits,
            .quantised_nbytes = quantised_nbytes,
            .quantise = quantise,
            .quantise_rows = quantise_rows,
            .decode = decode,
            .linear = linear,
            .fuses_gate = fuses_gate,
            .gated_linear = gated_linear,
            .linear_scratch_nbytes = linear_scratch_nbytes,
            .gather = gather,
            .fma_peak = fma_peak,
            .read_bandwidth = read_bandwidth,
            .has_bf16 = has_bf16};
}

}  // namespace legato::LEGATO_ISA
