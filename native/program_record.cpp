// Recording: every operation checks the slots it is given and says what it makes of them.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "program.hpp"

namespace legato {

namespace {

void require(bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
}

void require_equal(std::int64_t got, std::int64_t wanted, const std::string& what) {
    require(got == wanted, what + " is " + std::to_string(got) + ", must be " + std::to_string(wanted));
}

}  // namespace

const char* op_name(OpKind kind) {
    static constexpr const char* kNames[kOpKinds] = {"embed",   "rms_norm",  "quantise", "linear",
                                                     "rope_kv", "attention", "gated",    "gated_linear",
                                                     "add",     "softcap",   "select"};
    return kNames[static_cast<std::size_t>(kind)];
}

Program::Program(std::shared_ptr<KvCache> kv, const ProgramLimits& limits) : kv_(std::move(kv)), limits_(limits) {
    constexpr std::int64_t kMost = 1 << 20;
    require(kv_ != nullptr, "a program needs a KV cache");
    require(limits.max_rows > 0 && limits.max_rows <= kMost, "max_rows must be in [1, 2^20]");
    require(limits.max_logit_rows > 0 && limits.max_logit_rows <= limits.max_rows,
            "max_logit_rows must be in [1, max_rows]");
    require(limits.max_sequences > 0 && limits.max_sequences <= limits.max_rows, "max_seqs must be in [1, max_rows]");
    require(limits.max_threads > 0 && limits.max_threads <= 1024, "max_threads must be in [1, 1024]");
}

void Program::require_recording() const { require(!sealed_, "the program is sealed: no operation can be added"); }

const Program::Slot& Program::slot(int index, const char* what) const {
    require(index >= 0 && static_cast<std::size_t>(index) < slots_.size(),
            std::string(what) + ": there is no slot " + std::to_string(index));
    return slots_[static_cast<std::size_t>(index)];
}

void Program::check_layer(std::int64_t layer) const {
    require(layer >= 0 && layer < kv_->shape().layers,
            "layer " + std::to_string(layer) + " is not in [0, " + std::to_string(kv_->shape().layers) + ")");
}

int Program::new_slot(std::int64_t cols, bool logit_rows) {
    slots_.push_back({cols, logit_rows});
    return static_cast<int>(slots_.size()) - 1;
}

int Program::record(Op op, std::int64_t cols, bool logit_rows) {
    op.out = new_slot(cols, logit_rows);
    ops_.push_back(std::move(op));
    return ops_.back().out;
}

int Program::embed(std::shared_ptr<const Matrix> weight, float scale) {
    require_recording();
    require(weight != nullptr, "embed: no weight");
    vocabulary_ = vocabulary_ == 0 ? weight->rows() : std::min(vocabulary_, weight->rows());
    const std::int64_t cols = weight->cols();
    Op op{.kind = OpKind::embed, .scale = scale};
    op.parts.push_back(weight.get());
    op.weights.push_back(std::move(weight));
    return record(std::move(op), cols, false);
}

int Program::rms_norm(int x, FloatArray weight, float eps) {
    require_recording();
    const Slot in = slot(x, "rms_norm");
    require_equal(weight.cols, in.cols, "rms_norm: length of the weight");
    require(eps >= 0.0f, "rms_norm: eps must not be negative");
    Op op{.kind = OpKind::rms_norm, .x = x, .scale = eps};
    op.vector = std::move(weight);
    return record(std::move(op), in.cols, in.logit_rows);
}

int Program::linear(int x, std::vector<std::shared_ptr<const Matrix>> weights, FloatArray bias, int residual) {
    require_recording();
    const Slot in = slot(x, "linear");
    require(!weights.empty(), "linear: no weights");
    std::int64_t cols = 0;
    Op op{.kind = OpKind::linear, .x = x, .y = residual};
    for (const auto& weight : weights) {
        require(weight != nullptr, "linear: a weight is None");
        require_equal(weight->cols(), in.cols, "linear: inputs of the weight");
        cols += weight->rows();
        op.parts.push_back(weight.get());
    }
    if (bias) require_equal(bias.cols, cols, "linear: length of the bias");
    if (residual != -1) {
        const Slot& added = slot(residual, "linear: residual");
        require_equal(added.cols, cols, "linear: columns of the residual");
        require(added.logit_rows == in.logit_rows, "linear: the residual has other rows than x");
    }
    op.weights = std::move(weights);
    op.vector = std::move(bias);
    return record(std::move(op), cols, in.logit_rows);
}

int Program::rope_kv(int qkv, std::int64_t layer, const Rope& rope, std::int64_t heads) {
    require_recording();
    const Slot in = slot(qkv, "rope_kv");
    const KvShape& kv = kv_->shape();
    check_layer(layer);
    require(!in.logit_rows, "rope_kv: needs all rows, not those that were selected");
    require(heads > 0 && heads % kv.kv_heads == 0,
            "rope_kv: heads must be a positive multiple of the cache's kv_heads");
    require_equal(in.cols, (heads + 2 * kv.kv_heads) * kv.head_dim, "rope_kv: columns");
    require(rope.cos && rope.sin && rope.cos.rows == rope.sin.rows && rope.cos.cols == rope.sin.cols,
            "rope_kv: cos and sin must have the same shape, [positions, rotated dimensions / 2]");
    require(rope.cos.rows > 0 && rope.cos.cols > 0 && 2 * rope.cos.cols <= kv.head_dim,
            "rope_kv: cos and sin must have at least one row and at most head_dim / 2 columns");
    if (rope.q_norm) require_equal(rope.q_norm.cols, kv.head_dim, "rope_kv: length of q_norm");
    if (rope.k_norm) require_equal(rope.k_norm.cols, kv.head_dim, "rope_kv: length of k_norm");
    max_positions_ = max_positions_ == 0 ? rope.cos.rows : std::min(max_positions_, rope.cos.rows);
    Op op{.kind = OpKind::rope_kv, .x = qkv, .layer = layer, .heads = heads};
    op.rope = rope;
    return record(std::move(op), heads * kv.head_dim, false);
}

int Program::attention(int q, std::int64_t layer, std::int64_t heads, float scale, std::int64_t window, float softcap) {
    require_recording();
    const Slot in = slot(q, "attention");
    const KvShape& kv = kv_->shape();
    check_layer(layer);
    require(!in.logit_rows, "attention: needs all rows, not those that were selected");
    require(heads > 0 && heads % kv.kv_heads == 0,
            "attention: heads must be a positive multiple of the cache's kv_heads");
    require_equal(in.cols, heads * kv.head_dim, "attention: columns");
    require(window >= 0, "attention: window must not be negative (0: none)");
    require(softcap >= 0.0f, "attention: softcap must not be negative (0: none)");
    const PlanKey key{heads, window};
    const auto known = std::find(plan_keys_.begin(), plan_keys_.end(), key);
    const int plan = static_cast<int>(known - plan_keys_.begin());
    if (known == plan_keys_.end()) plan_keys_.push_back(key);
    return record({.kind = OpKind::attention,
                   .x = q,
                   .layer = layer,
                   .heads = heads,
                   .window = window,
                   .plan = plan,
                   .scale = scale,
                   .softcap = softcap},
                  in.cols, false);
}

int Program::gated(int x, Gate gate) {
    require_recording();
    const Slot in = slot(x, "gated");
    require(in.cols % 2 == 0, "gated: columns must be even: a gate half and an up half");
    return record({.kind = OpKind::gated, .x = x, .gate = gate}, in.cols / 2, in.logit_rows);
}

int Program::add(int x, int y) {
    require_recording();
    const Slot a = slot(x, "add"), b = slot(y, "add");
    require(a.cols == b.cols && a.logit_rows == b.logit_rows, "add: the slots' shapes differ");
    return record({.kind = OpKind::add, .x = x, .y = y}, a.cols, a.logit_rows);
}

int Program::softcap(int x, float cap) {
    require_recording();
    const Slot in = slot(x, "softcap");
    require(cap > 0.0f, "softcap: cap must be positive");
    return record({.kind = OpKind::softcap, .x = x, .softcap = cap}, in.cols, in.logit_rows);
}

int Program::select(int x) {
    require_recording();
    const Slot in = slot(x, "select");
    require(!in.logit_rows, "select: the slot has been selected from already");
    return record({.kind = OpKind::select, .x = x}, in.cols, true);
}

}  // namespace legato
