// A decoder step as a tape: operations are recorded once, laid out in memory by seal(), and replayed by run(), all
// inside one parallel region. Recording and running check their arguments and throw std::invalid_argument; nothing
// throws inside.
//
// Values are slots: [rows, cols] of fp32, written by exactly one operation. Rows are the step's rows, or, after
// `select`, its logit rows.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention_plan.hpp"
#include "dispatch.hpp"
#include "equaliser.hpp"
#include "kv.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "team.hpp"

namespace legato {

enum class OpKind : std::uint8_t {
    embed,
    rms_norm,
    quantise,
    linear,
    rope_kv,
    attention,
    gated,
    gated_linear,
    add,
    softcap,
    select
};
constexpr std::size_t kOpKinds = 11;
const char* op_name(OpKind kind);

// Read-only fp32 values, kept alive by whoever made them.
struct FloatArray {
    std::shared_ptr<const float> data;
    std::int64_t rows = 0;
    std::int64_t cols = 0;

    explicit operator bool() const { return data != nullptr; }
};

struct Rope {
    FloatArray cos;  // [positions, rotary / 2]
    FloatArray sin;
    bool interleaved = false;
    FloatArray q_norm;
    FloatArray k_norm;
    float eps = 0.0f;
};

struct Op {
    OpKind kind;
    int x = -1;  // input slots
    int y = -1;
    int out = -1;
    // A coded copy: that of x, written by `quantise` and read by `linear`; that of out, written by `rms_norm` and
    // `gated` along with it.
    int copy = -1;
    int out_copy = -1;  // of `gated_linear`, which makes nothing else
    std::vector<std::shared_ptr<const Matrix>> weights = {};
    std::vector<const Matrix*> parts = {};
    FloatArray vector = {};  // norm weight or bias
    Rope rope = {};
    std::int64_t layer = 0;
    std::int64_t heads = 0;
    std::int64_t window = 0;
    int plan = -1;  // attention plan, shared by the layers that are alike
    float scale = 0.0f;
    float softcap = 0.0f;
    Gate gate = Gate::silu;
};

struct ProgramLimits {
    std::int64_t max_rows;
    std::int64_t max_logit_rows;
    std::int64_t max_sequences;
    int max_threads;
    Activations activations;
};

struct StepInput {
    const std::int32_t* tokens;
    const std::int32_t* positions;
    std::int64_t rows;
    const std::int32_t* row_starts;
    std::int64_t sequences;
    const std::int32_t* block_tables;
    std::int64_t table_width;
    const std::int32_t* logit_rows;
    std::int64_t logit_count;
};

class Program {
  public:
    Program(std::shared_ptr<KvCache> kv, const ProgramLimits& limits);

    int embed(std::shared_ptr<const Matrix> weight, float scale);
    int rms_norm(int x, FloatArray weight, float eps);
    int linear(int x, std::vector<std::shared_ptr<const Matrix>> weights, FloatArray bias, int residual);
    int rope_kv(int qkv, std::int64_t layer, const Rope& rope, std::int64_t heads);
    int attention(int q, std::int64_t layer, std::int64_t heads, float scale, std::int64_t window, float softcap);
    int gated(int x, Gate gate);
    int add(int x, int y);
    int softcap(int x, float cap);
    int select(int x);
    // Ends recording; `output` becomes the result of run(). Chooses the kernels. Allocates no scratch yet.
    void seal(int output);

    std::size_t scratch_nbytes() const;
    std::int64_t output_cols() const;
    // Runs one step with the kernels' threads; returns [logit_count, output_cols], valid until the next run.
    float* run(const StepInput& input, int threads);
    // For each input of linears that is equalised, in the order of the tape: exponents [cols].
    using Shifts = std::vector<std::vector<std::uint8_t>>;
    // Runs a step and returns the shifts that suit its activations best.
    Shifts choose_shifts(const StepInput& input, int threads);
    // Sets the shifts of runs to come; at first they are 0. Throws unless they fit this program's inputs.
    void equalise(const Shifts& shifts);
    Shifts shifts() const;

    // Switching it on begins from zero.
    void set_profile(bool on) {
        if (on && !profiling_) seconds_ = {};
        profiling_ = on;
    }
    const std::array<double, kOpKinds>& seconds() const { return seconds_; }
    const std::shared_ptr<KvCache>& kv() const { return kv_; }

  private:
    struct Slot {
        std::int64_t cols;
        bool logit_rows;
        bool only_quantised = false;  // nobody reads the fp32 values: each thread has one row to quantise from
        int buffer = -1;
    };
    // A stretch of the arena, in use from operation `first` to `last`.
    struct Buffer {
        std::size_t nbytes;
        std::int64_t stride;  // floats; of the slots in it
        int first;
        int last;
        std::size_t offset = 0;
    };
    // A slot in the coding that the linears reading it want.
    struct Copy {
        int buffer;
        std::int64_t cols;
        Coding coding;
        ShiftLimits limits;
        std::unique_ptr<const Equaliser> equaliser;  // null where the kernels have none
    };
    struct PlanKey {
        std::int64_t heads;
        std::int64_t window;
        bool operator==(const PlanKey&) const = default;
    };

    void require_recording() const;
    const Slot& slot(int index, const char* what) const;
    void check_layer(std::int64_t layer) const;
    int new_slot(std::int64_t cols, bool logit_rows);
    int record(Op op, std::int64_t cols, bool logit_rows);

    void insert_quantise();
    int add_copy(int x);
    void find_only_quantised();
    void fuse_gates();
    void assign_buffers();
    void place_buffers();
    void size_kernel_scratch();

    void check(const StepInput& input, int threads) const;
    void prepare(const StepInput& input, int threads);
    void replay(int threads, Shifts* chosen);
    void execute(const Op& op);
    void choose(const Op& op, Shifts& chosen);
    Rows rows_of(int slot_index) const;
    Quantised coded(int copy, std::int64_t rows) const;

    std::shared_ptr<KvCache> kv_;
    ProgramLimits limits_;
    std::vector<Op> ops_;
    std::vector<Slot> slots_;
    std::vector<Buffer> buffers_;
    std::vector<Copy> copies_;
    std::vector<PlanKey> plan_keys_;
    std::vector<AttentionPlan> plans_;
    std::int64_t vocabulary_ = 0;  // rows of the smallest embedding, 0 if there is none
    std::int64_t max_positions_ = 0;
    int output_ = -1;
    bool sealed_ = false;

    const Kernels* kernels_ = nullptr;
    std::size_t buffers_nbytes_ = 0;
    std::size_t kernel_scratch_nbytes_ = 0;
    std::size_t attention_thread_nbytes_ = 0;
    std::int64_t partial_rows_ = 0;

    PageBuffer arena_;
    Step step_{};
    std::vector<std::int32_t> row_sequence_;
    std::atomic<bool> running_{false};
    bool profiling_ = false;
    std::vector<float> observed_;  // [rows, cols], while shifts are chosen
    std::array<double, kOpKinds> seconds_{};
};

}  // namespace legato
