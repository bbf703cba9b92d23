// Running: checks a step, plans its attention, and replays the tape in one parallel region. Every kernel ends with the
// barrier of its work-sharing loop, so the next one sees its results.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "program.hpp"

namespace legato {

namespace {

void require(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string range(std::int64_t value, std::int64_t stop) {
    return std::to_string(value) + " is not in [0, " + std::to_string(stop) + ")";
}

// Refuses a second run at the same time.
class Running {
  public:
    explicit Running(std::atomic<bool>& flag) : flag_(flag) {
        if (flag_.exchange(true)) refuse("the program is running in another thread");
    }
    Running(const Running&) = delete;
    ~Running() { flag_ = false; }

  private:
    std::atomic<bool>& flag_;
};

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void Program::check(const StepInput& in, int threads) const {
    if (!sealed_) refuse("the program must be sealed before it runs");
    if (threads < 1 || threads > limits_.max_threads)
        refuse("threads: " + std::to_string(threads) +
               " is not in [1, max_threads = " + std::to_string(limits_.max_threads) + "]");
    if (in.rows < 1 || in.rows > limits_.max_rows)
        refuse(std::to_string(in.rows) + " rows, must be in [1, max_rows = " + std::to_string(limits_.max_rows) + "]");
    if (in.sequences < 1 || in.sequences > limits_.max_sequences)
        refuse(std::to_string(in.sequences) +
               " sequences, must be in [1, max_seqs = " + std::to_string(limits_.max_sequences) + "]");
    if (in.logit_count > limits_.max_logit_rows)
        refuse(std::to_string(in.logit_count) +
               " logit rows, at most max_logit_rows = " + std::to_string(limits_.max_logit_rows));
    for (std::int64_t i = 0; i < in.logit_count; ++i)
        if (in.logit_rows[i] < 0 || in.logit_rows[i] >= in.rows)
            refuse("logit row " + range(in.logit_rows[i], in.rows));
    if (vocabulary_ > 0)
        for (std::int64_t r = 0; r < in.rows; ++r)
            if (in.tokens[r] < 0 || in.tokens[r] >= vocabulary_) refuse("token id " + range(in.tokens[r], vocabulary_));

    require(in.row_starts[0] == 0 && in.row_starts[in.sequences] == in.rows,
            "seq_row_starts must begin with 0 and end with the number of rows");
    const KvShape& kv = kv_->shape();
    std::int64_t most = in.table_width * kv.block_tokens;
    if (max_positions_ > 0) most = std::min(most, max_positions_);
    for (std::int64_t s = 0; s < in.sequences; ++s) {
        const std::int64_t begin = in.row_starts[s], end = in.row_starts[s + 1];
        if (end <= begin || end > in.rows) refuse("sequence " + std::to_string(s) + " of the step has no rows");
        for (std::int64_t r = begin; r < end; ++r) {
            if (in.positions[r] < 0 || in.positions[r] >= most) refuse("position " + range(in.positions[r], most));
            if (r > begin && in.positions[r] != in.positions[r - 1] + 1)
                refuse("positions of sequence " + std::to_string(s) + " of the step are not consecutive");
        }
        const std::int64_t blocks = in.positions[end - 1] / kv.block_tokens + 1;
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::int32_t block = in.block_tables[s * in.table_width + b];
            if (block < 0 || block >= kv.blocks) refuse("KV block " + range(block, kv.blocks));
        }
    }
}

void Program::prepare(const StepInput& in, int threads) {
    if (arena_.data() == nullptr) arena_ = PageBuffer(scratch_nbytes());
    step_ = {.tokens = in.tokens,
             .positions = in.positions,
             .row_starts = in.row_starts,
             .block_tables = in.block_tables,
             .logit_rows = in.logit_rows,
             .row_sequence = row_sequence_.data(),
             .rows = in.rows,
             .sequences = in.sequences,
             .table_width = in.table_width,
             .logit_count = in.logit_count};
    for (std::int64_t s = 0; s < in.sequences; ++s)
        std::fill(row_sequence_.begin() + in.row_starts[s], row_sequence_.begin() + in.row_starts[s + 1],
                  static_cast<std::int32_t>(s));
    const KvShape& kv = kv_->shape();
    for (std::size_t i = 0; i < plans_.size(); ++i)
        plan_attention(step_,
                       {.heads = plan_keys_[i].heads,
                        .kv_heads = kv.kv_heads,
                        .head_dim = kv.head_dim,
                        .window = plan_keys_[i].window,
                        .partial_rows = partial_rows_,
                        .threads = threads},
                       plans_[i]);
}

Rows Program::rows_of(int index) const {
    const Slot& slot = slots_[static_cast<std::size_t>(index)];
    const Buffer& buffer = buffers_[static_cast<std::size_t>(slot.buffer)];
    float* data = reinterpret_cast<float*>(arena_.data() + buffer.offset);
    const std::int64_t rows = slot.logit_rows ? step_.logit_count : step_.rows;
    if (slot.only_quantised) return {data + omp_get_thread_num() * buffer.stride, 0, rows, slot.cols};
    return {data, buffer.stride, rows, slot.cols};
}

Quantised Program::coded(int index, std::int64_t rows) const {
    const Copy& copy = copies_[static_cast<std::size_t>(index)];
    return {arena_.data() + buffers_[static_cast<std::size_t>(copy.buffer)].offset, rows, copy.cols, copy.coding,
            copy.equaliser.get()};
}

// Called by every thread of the team.
void Program::execute(const Op& op) {
    std::byte* scratch = arena_.data() + buffers_nbytes_;
    const Rows x = op.x >= 0 ? rows_of(op.x) : Rows{};
    const Rows out = op.out >= 0 ? rows_of(op.out) : Rows{};
    const Quantised copy = op.copy >= 0 ? coded(op.copy, x.rows) : Quantised{};
    const Quantised* made = op.copy >= 0 ? &copy : nullptr;
    const ElementwiseKernels& elementwise = kernels_->elementwise;
    switch (op.kind) {
        case OpKind::embed:
            kernels_->linear.gather(*op.parts[0], step_.tokens, op.scale, out);
            break;
        case OpKind::rms_norm:
            elementwise.rms_norm(x, op.vector.data.get(), op.scale, out, made);
            break;
        case OpKind::quantise:
            kernels_->linear.quantise(x, copy);
            break;
        case OpKind::linear: {
            const Rows residual = op.y >= 0 ? rows_of(op.y) : Rows{};
            kernels_->linear.linear(op.parts.data(), static_cast<int>(op.parts.size()), x, made, out,
                                    op.vector.data.get(), op.y >= 0 ? &residual : nullptr, scratch);
            break;
        }
        case OpKind::gated_linear:
            kernels_->linear.gated_linear(*op.parts[0], *op.parts[1], op.gate, copy, coded(op.out_copy, x.rows),
                                          scratch);
            break;
        case OpKind::rope_kv:
            kernels_->attention.rope_kv({.kv = kv_->layer(op.layer),
                                         .step = &step_,
                                         .qkv = x.data,
                                         .qkv_stride = x.stride,
                                         .q = out.data,
                                         .q_stride = out.stride,
                                         .heads = op.heads,
                                         .cos = op.rope.cos.data.get(),
                                         .sin = op.rope.sin.data.get(),
                                         .rotary = 2 * op.rope.cos.cols,
                                         .interleaved = op.rope.interleaved,
                                         .q_norm = op.rope.q_norm.data.get(),
                                         .k_norm = op.rope.k_norm.data.get(),
                                         .eps = op.rope.eps});
            break;
        case OpKind::attention:
            kernels_->attention.attention(
                {.kv = kv_->layer(op.layer),
                 .step = &step_,
                 .work = plans_[static_cast<std::size_t>(op.plan)].work(),
                 .q = x.data,
                 .q_stride = x.stride,
                 .out = out.data,
                 .out_stride = out.stride,
                 .heads = op.heads,
                 .window = op.window,
                 .exact = limits_.activations == Activations::f32,
                 .scale = op.scale,
                 .softcap = op.softcap,
                 .thread_scratch = scratch,
                 .thread_nbytes = attention_thread_nbytes_,
                 .partials = reinterpret_cast<float*>(scratch + static_cast<std::size_t>(limits_.max_threads) *
                                                                    attention_thread_nbytes_)});
            break;
        case OpKind::gated:
            elementwise.gated(x, op.gate, out, made);
            break;
        case OpKind::add:
            elementwise.add(x, rows_of(op.y), out);
            break;
        case OpKind::softcap:
            elementwise.softcap(x, op.softcap, out);
            break;
        case OpKind::select:
            elementwise.select(x, step_.logit_rows, out);
            break;
    }
}

std::int64_t Program::output_cols() const {
    if (!sealed_) refuse("the program is not sealed");
    return slots_[static_cast<std::size_t>(output_)].cols;
}

float* Program::run(const StepInput& input, int threads) {
    const Running running(running_);
    check(input, threads);
    prepare(input, threads);
    replay(threads, nullptr);
    return rows_of(output_).data;
}

// `chosen`: if not null, shifts of every copy.
void Program::replay(int threads, Shifts* chosen) {
    const bool profiling = profiling_;
    Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        const TeamScope scope(team);
        const bool timed = profiling && omp_get_thread_num() == 0;
        double before = timed ? now_s() : 0.0;
        std::vector<bool> seen(chosen != nullptr ? copies_.size() : 0);
        for (const Op& op : ops_) {
            if (rows_of(op.out >= 0 ? op.out : op.x).rows == 0) continue;  // a chunk that ends before its prompt does
            const bool reads = op.kind == OpKind::linear || op.kind == OpKind::gated_linear;
            if (chosen != nullptr && reads && op.copy >= 0) {
                if (!seen[static_cast<std::size_t>(op.copy)]) choose(op, *chosen);
                seen[static_cast<std::size_t>(op.copy)] = true;
            }
            execute(op);
            if (timed) {
                const double after = now_s();
                seconds_[static_cast<std::size_t>(op.kind)] += after - before;
                before = after;
            }
        }
    }
}

Program::Shifts Program::choose_shifts(const StepInput& input, int threads) {
    const Running running(running_);
    check(input, threads);
    if (input.logit_count == 0) refuse("choosing shifts needs a logit row: without one the last layer is not computed");
    prepare(input, threads);
    Shifts chosen(copies_.size());
    replay(threads, &chosen);
    observed_ = {};
    std::erase_if(chosen, [](const auto& shifts) { return shifts.empty(); });
    return chosen;
}

// Called by every thread of the team, before the first linear that reads a copy.
void Program::choose(const Op& op, Shifts& chosen) {
    const Quantised x = coded(op.copy, rows_of(op.x).rows);
    if (x.equaliser == nullptr) return;
    std::vector<std::uint8_t>& shifts = chosen[static_cast<std::size_t>(op.copy)];
#pragma omp single
    {
        observed_.resize(static_cast<std::size_t>(x.rows * x.cols));
        shifts.resize(static_cast<std::size_t>(x.cols));
        kernels_->linear.decode(x, {observed_.data(), x.cols, x.rows, x.cols});
    }
#pragma omp for schedule(static)
    for (std::int64_t group = 0; group < x.cols / 32; ++group)
        Equaliser::choose(observed_.data(), x.rows, x.cols, group, copies_[static_cast<std::size_t>(op.copy)].limits,
                          shifts.data());
}

void Program::equalise(const Shifts& shifts) {
    const Running running(running_);
    std::vector<Copy*> equalised;
    for (Copy& copy : copies_)
        if (copy.equaliser) equalised.push_back(&copy);
    if (shifts.size() != equalised.size())
        refuse("shifts of " + std::to_string(shifts.size()) + " inputs, the program equalises " +
               std::to_string(equalised.size()));
    std::vector<std::unique_ptr<const Equaliser>> made;
    for (std::size_t i = 0; i < shifts.size(); ++i) {
        if (shifts[i].size() != static_cast<std::size_t>(equalised[i]->cols))
            refuse("shifts of input " + std::to_string(i) + ": " + std::to_string(shifts[i].size()) +
                   ", it has columns: " + std::to_string(equalised[i]->cols));
        made.push_back(std::make_unique<const Equaliser>(shifts[i], equalised[i]->limits));
    }
    for (std::size_t i = 0; i < made.size(); ++i) equalised[i]->equaliser = std::move(made[i]);
}

Program::Shifts Program::shifts() const {
    Shifts all;
    for (const Copy& copy : copies_)
        if (copy.equaliser) all.push_back(copy.equaliser->shifts());
    return all;
}

}  // namespace legato
