// Sealing: adds the quantisations, finds how long each value lives, and gives values that never live at the same time
// the same memory.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "linear.hpp"
#include "program.hpp"

namespace legato {

namespace {

constexpr std::size_t kAlignment = 64;
// Room for partial results of sequences cut at their splits; beyond it, they are not cut.
constexpr std::size_t kPartialNbytes = std::size_t{2} << 20;

std::size_t align(std::size_t nbytes) { return (nbytes + kAlignment - 1) / kAlignment * kAlignment; }

std::int64_t row_stride(std::int64_t cols) {
    const std::int64_t stride = (cols + 15) / 16 * 16;
    return stride % 1024 == 0 ? stride + 16 : stride;  // rows a multiple of 4 KiB apart would share few cache sets
}

bool reads_coded(const Op& op) {
    return std::any_of(op.parts.begin(), op.parts.end(), [](const Matrix* part) { return part->quantised(); });
}

}  // namespace

void Program::seal(int output) {
    require_recording();
    const bool selected = slot(output, "seal").logit_rows;
    output_ = selected ? output : select(output);
    sealed_ = true;
    kernels_ = &active_kernels();
    require_activations(kernels_->linear, limits_.activations);
    insert_quantise();
    find_only_quantised();
    fuse_gates();
    assign_buffers();
    place_buffers();
    size_kernel_scratch();
    plans_.resize(plan_keys_.size());
    row_sequence_.resize(static_cast<std::size_t>(limits_.max_rows));
}

// Each slot that a linear wants coded is so once: by the operation that makes it if that goes row by row, else by a
// `quantise` of its own before the first such linear.
void Program::insert_quantise() {
    std::vector<Op> ops;
    std::vector<int> copies(slots_.size(), -1);
    for (Op& op : ops_) {
        if (op.kind == OpKind::linear && limits_.activations != Activations::f32 && reads_coded(op)) {
            int& copy = copies[static_cast<std::size_t>(op.x)];
            if (copy < 0) {
                copy = add_copy(op.x);
                const auto maker =
                    std::find_if(ops.begin(), ops.end(), [&](const Op& earlier) { return earlier.out == op.x; });
                if (maker->kind == OpKind::rms_norm || maker->kind == OpKind::gated) {
                    maker->copy = copy;
                } else {
                    ops.push_back({.kind = OpKind::quantise, .x = op.x, .copy = copy});
                }
            }
            op.copy = copy;
        }
        ops.push_back(std::move(op));
    }
    ops_ = std::move(ops);
}

// Room for slot `x` in a coding that suits every linear reading it.
int Program::add_copy(int x) {
    std::vector<const Matrix*> readers;
    for (const Op& op : ops_)
        if (op.kind == OpKind::linear && op.x == x) readers.insert(readers.end(), op.parts.begin(), op.parts.end());
    const LinearKernels& kernels = kernels_->linear;
    const Coding coding = kernels.coding(readers.data(), static_cast<int>(readers.size()), limits_.activations);
    const Slot& slot = slots_[static_cast<std::size_t>(x)];
    const std::int64_t rows = slot.logit_rows ? limits_.max_logit_rows : limits_.max_rows;
    buffers_.push_back({align(kernels.quantised_nbytes(rows, slot.cols, coding)), 0, -1, 0});
    const bool equalised = coding == Coding::equalised;
    copies_.push_back({static_cast<int>(buffers_.size()) - 1, slot.cols, coding,
                       kernels.shift_limits(readers.data(), static_cast<int>(readers.size())),
                       equalised ? std::make_unique<const Equaliser>(slot.cols) : nullptr});
    return static_cast<int>(copies_.size()) - 1;
}

// Slots whose maker quantises them and whose every reader takes the copy.
void Program::find_only_quantised() {
    for (const Op& op : ops_)
        if (op.copy >= 0 && op.out >= 0 && op.kind != OpKind::linear)
            slots_[static_cast<std::size_t>(op.out)].only_quantised = op.out != output_;
    for (const Op& op : ops_) {
        const bool reads_copy =
            op.kind == OpKind::linear && op.copy >= 0 &&
            std::all_of(op.parts.begin(), op.parts.end(), [](const Matrix* part) { return part->quantised(); });
        if (op.x >= 0 && !reads_copy) slots_[static_cast<std::size_t>(op.x)].only_quantised = false;
        if (op.y >= 0) slots_[static_cast<std::size_t>(op.y)].only_quantised = false;
    }
}

// A gate and up layer whose product is wanted coded and nowhere else: one operation, if the kernels have it.
void Program::fuse_gates() {
    std::vector<int> readers(slots_.size(), 0);
    for (const Op& op : ops_)
        for (const int used : {op.x, op.y})
            if (used >= 0) ++readers[static_cast<std::size_t>(used)];
    std::vector<Op> ops;
    for (Op& op : ops_) {
        Op* made = ops.empty() ? nullptr : &ops.back();
        if (op.kind == OpKind::gated && op.copy >= 0 && slots_[static_cast<std::size_t>(op.out)].only_quantised &&
            made != nullptr && made->kind == OpKind::linear && made->out == op.x && made->copy >= 0 &&
            readers[static_cast<std::size_t>(op.x)] == 1 && made->parts.size() == 2 && !made->vector && made->y < 0 &&
            kernels_->linear.fuses_gate(*made->parts[0], *made->parts[1])) {
            made->kind = OpKind::gated_linear;
            made->gate = op.gate;
            made->out = -1;
            made->out_copy = op.copy;
        } else {
            ops.push_back(std::move(op));
        }
    }
    ops_ = std::move(ops);
}

// Gives each slot a buffer. An operation that reads its input elementwise or row by row writes over it if nobody needs
// it any more: a residual, a sum, a norm, a soft-cap.
void Program::assign_buffers() {
    const int count = static_cast<int>(ops_.size());
    std::vector<int> last_use(slots_.size(), 0);
    for (int i = 0; i < count; ++i) {
        const Op& op = ops_[static_cast<std::size_t>(i)];
        for (const int used : {op.x, op.y, op.out})
            if (used >= 0) last_use[static_cast<std::size_t>(used)] = i;
    }
    last_use[static_cast<std::size_t>(output_)] = count;

    for (int i = 0; i < count; ++i) {
        Op& op = ops_[static_cast<std::size_t>(i)];
        for (const int index : {op.copy, op.out_copy}) {
            if (index < 0) continue;
            Buffer& copy = buffers_[static_cast<std::size_t>(copies_[static_cast<std::size_t>(index)].buffer)];
            if (copy.first < 0) copy.first = i;
            copy.last = i;
        }
        if (op.out < 0) continue;
        const auto dies_here = [&](int used) { return used >= 0 && last_use[static_cast<std::size_t>(used)] == i; };
        int reused = -1;
        if (op.kind == OpKind::linear && op.y != op.x && dies_here(op.y)) reused = op.y;
        if (op.kind == OpKind::add && dies_here(op.y)) reused = op.y;
        if ((op.kind == OpKind::add || op.kind == OpKind::softcap || op.kind == OpKind::rms_norm) && dies_here(op.x))
            reused = op.x;
        Slot& out = slots_[static_cast<std::size_t>(op.out)];
        if (reused >= 0 && !out.only_quantised) {
            out.buffer = slots_[static_cast<std::size_t>(reused)].buffer;
        } else {
            out.buffer = static_cast<int>(buffers_.size());
            buffers_.push_back({0, row_stride(out.cols), i, i});
        }
        Buffer& buffer = buffers_[static_cast<std::size_t>(out.buffer)];
        buffer.last = std::max(buffer.last, last_use[static_cast<std::size_t>(op.out)]);
        // The result is handed out as it lies, so its rows are contiguous.
        if (op.out == output_) buffer.stride = out.cols;
        std::int64_t rows = out.logit_rows ? limits_.max_logit_rows : limits_.max_rows;
        if (out.only_quantised) rows = limits_.max_threads;
        // A vector's worth of slack: a kernel may read past the last row's end.
        buffer.nbytes = align(static_cast<std::size_t>(rows * buffer.stride + kKeyLanes) * sizeof(float));
    }
}

// Largest first, each at the lowest offset that is free for all of its life.
void Program::place_buffers() {
    std::vector<std::size_t> order(buffers_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return buffers_[a].nbytes > buffers_[b].nbytes; });
    std::vector<const Buffer*> placed;
    for (const std::size_t index : order) {
        Buffer& buffer = buffers_[index];
        std::vector<const Buffer*> rivals;
        for (const Buffer* other : placed)
            if (other->first <= buffer.last && buffer.first <= other->last) rivals.push_back(other);
        std::sort(rivals.begin(), rivals.end(), [](const Buffer* a, const Buffer* b) { return a->offset < b->offset; });
        for (const Buffer* rival : rivals) {
            if (buffer.offset + buffer.nbytes <= rival->offset) break;
            buffer.offset = std::max(buffer.offset, rival->offset + rival->nbytes);
        }
        placed.push_back(&buffer);
        buffers_nbytes_ = std::max(buffers_nbytes_, buffer.offset + buffer.nbytes);
    }
}

// Scratch that lives only during one operation: the largest of all.
void Program::size_kernel_scratch() {
    const KvLayer kv = kv_->layer(0);
    for (const Op& op : ops_) {
        if (op.kind == OpKind::linear || op.kind == OpKind::gated_linear) {
            const std::size_t nbytes = kernels_->linear.linear_scratch_nbytes(
                op.parts.data(), static_cast<int>(op.parts.size()), limits_.max_threads);
            kernel_scratch_nbytes_ = std::max(kernel_scratch_nbytes_, align(nbytes));
        } else if (op.kind == OpKind::attention) {
            const std::size_t nbytes = kernels_->attention.thread_nbytes(kv.head_dim, op.heads / kv.kv_heads);
            attention_thread_nbytes_ = std::max(attention_thread_nbytes_, align(nbytes));
        }
    }
    if (attention_thread_nbytes_ > 0) {
        const auto row_nbytes = static_cast<std::size_t>(attention_partial_floats(kv.padded_dim)) * sizeof(float);
        partial_rows_ = static_cast<std::int64_t>(kPartialNbytes / row_nbytes);
        kernel_scratch_nbytes_ =
            std::max(kernel_scratch_nbytes_, static_cast<std::size_t>(limits_.max_threads) * attention_thread_nbytes_ +
                                                 align(static_cast<std::size_t>(partial_rows_) * row_nbytes));
    }
}

std::size_t Program::scratch_nbytes() const {
    if (!sealed_) throw std::invalid_argument("scratch_nbytes is known once the program is sealed");
    return buffers_nbytes_ + kernel_scratch_nbytes_;
}

}  // namespace legato
