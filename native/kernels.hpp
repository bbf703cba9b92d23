// The seam between the ISA-specific kernels (native/isa, compiled once per instruction set) and the rest.
// Every function here, unless it says so, is called by ALL threads of one OpenMP parallel region and splits its work
// with a loop of isa/team_loop.hpp or an orphaned `#pragma omp for`, whose barrier ends it. Work is split over rows,
// panels and heads, never over a reduction: a row's bits do not depend on how many threads, rows or neighbours there
// are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace legato {

class Equaliser;  // equaliser.hpp
class Matrix;     // matrix.hpp: a packed weight

enum class Gate : std::uint8_t { silu, gelu_tanh };

// Rows of fp32 activations, `stride` floats apart.
struct Rows {
    float* data;
    std::int64_t stride;
    std::int64_t rows;
    std::int64_t cols;
};

// What the inputs of quantised weights are multiplied as: fp32; integers with a scale for each row and group of 32; or
// bf16, where the instruction set has tiles for it.
enum class Activations : std::uint8_t { f32, int8, bf16 };

// How the kernels code such inputs: integers of 127 levels, the columns divided by an equaliser's powers first;
// integers of 1,016 levels; or bf16.
enum class Coding : std::uint8_t { equalised, plain, bf16 };

// The shifts there is room for beside a weight's codes. `most` 0: none. `sum`, if not 0: what 2^shift may add up to
// over the eight columns whose products one sum of 16 bits holds.
struct ShiftLimits {
    int most = 0;
    int sum = 0;
};

// Activations as integers or bf16. Buffers live in the program's scratch. The layout inside `storage` belongs to the
// kernels of one ISA; `quantised_nbytes` says how large it must be.
struct Quantised {
    std::byte* storage;
    std::int64_t rows;
    std::int64_t cols;
    Coding coding;
    const Equaliser* equaliser = nullptr;  // of equalised integers
};

// The linear kernels of one instruction set; `legato::<isa>::linear_kernels()` (native/isa/linear.cpp) returns them.
struct LinearKernels {
    // How an input that all of `parts` read is coded.
    Coding (*coding)(const Matrix* const* parts, int part_count, Activations activations);
    // The shifts of an equalised one.
    ShiftLimits (*shift_limits)(const Matrix* const* parts, int part_count);
    std::size_t (*quantised_nbytes)(std::int64_t rows, std::int64_t cols, Coding coding);
    void (*quantise)(const Rows& x, const Quantised& out);
    // The same for rows [begin, end) in the calling thread, without work-sharing or barrier, to follow another
    // operation on the rows. Some call must have end == out.rows: it clears the padding. Blocks of 16 rows from a
    // multiple of 16 on keep threads from sharing cache lines.
    void (*quantise_rows)(const Rows& x, const Quantised& out, std::int64_t begin, std::int64_t end);
    // The values of coded integers, fp32; in the calling thread.
    void (*decode)(const Quantised& x, const Rows& out);
    // y[r, o] = sum_k x[r, k] * w[o, k] (+ bias[o]) (+ residual[r, o]), the outputs of `parts` (all with x.cols inputs)
    // side by side in y. `bias` and `residual` may be null; `y` and `residual` may be the same memory. `x_coded` is
    // used for the quantised parts if it is not null, else `x`. One work-sharing loop over the panels of all parts, one
    // barrier. `scratch` holds `linear_scratch_nbytes` bytes, shared by the team, 64-byte aligned.
    void (*linear)(const Matrix* const* parts, int part_count, const Rows& x, const Quantised* x_coded, const Rows& y,
                   const float* bias, const Rows* residual, std::byte* scratch);
    // Whether act(gate) * up of one coded input can be had without its parts, coded, and that: `out` has gate.rows()
    // columns. Scratch as for `linear` of these parts.
    bool (*fuses_gate)(const Matrix& gate, const Matrix& up);
    void (*gated_linear)(const Matrix& gate, const Matrix& up, Gate kind, const Quantised& x, const Quantised& out,
                         std::byte* scratch);
    std::size_t (*linear_scratch_nbytes)(const Matrix* const* parts, int part_count, int threads);
    // y[r, :] = scale * w[ids[r], :]; ids must be in range.
    void (*gather)(const Matrix& w, const std::int32_t* ids, float scale, const Rows& y);
    // Called by one thread: runs independent fused multiply-adds on registers for about `seconds`; returns flop/s.
    double (*fma_peak)(double seconds);
    // Called by one thread: bytes/s of reading [data, data + nbytes) once, with the widest loads.
    double (*read_bandwidth)(const std::byte* data, std::size_t nbytes);
    bool has_bf16;
};

}  // namespace legato
