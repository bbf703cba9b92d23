// The seam between the ISA-specific kernels (native/isa, compiled once per instruction set) and the rest.
// Every function here is called by ALL threads of one OpenMP parallel region and splits its work with an orphaned
// `#pragma omp for schedule(dynamic, 1)`, whose implied barrier ends it. Work is split over rows, panels and heads, never
// over a reduction: a row's bits do not depend on how many threads, rows or neighbours there are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace legato {

class Matrix;  // matrix.hpp: a packed weight

// Rows of fp32 activations, `stride` floats apart.
struct Rows {
    float* data;
    std::int64_t stride;
    std::int64_t rows;
    std::int64_t cols;
};

// Activations quantised per row and group of 32 to int8: value = scale * q. Buffers live in the program's scratch.
// The layout inside `storage` belongs to the kernels of one ISA; `quantised_nbytes` says how large it must be.
struct Quantised {
    std::byte* storage;
    std::int64_t rows;
    std::int64_t cols;
};

// Table of one instruction set's kernels. One more struct per area may be added; members are filled in native/isa/.
struct LinearKernels {
    std::size_t (*quantised_nbytes)(std::int64_t rows, std::int64_t cols);
    void (*quantise)(const Rows& x, const Quantised& out);
    // y[r, o] = sum_k x[r, k] * w[o, k] (+ bias[o]) (+ residual[r, o]); `bias` and `residual` may be null; `y` and
    // `residual` may be the same memory. `x_int8` is used when the weight is 4- or 8-bit and `x_int8` is not null, else `x`.
    // `scratch` holds `linear_scratch_nbytes(threads)` bytes, shared by the team.
    void (*linear)(const Matrix& w, const Rows& x, const Quantised* x_int8, const Rows& y, const float* bias,
                   const Rows* residual, std::byte* scratch);
    std::size_t (*linear_scratch_nbytes)(const Matrix& w, int threads, bool int8);
    // y[r, :] = scale * w[ids[r], :]
    void (*gather)(const Matrix& w, const std::int32_t* ids, float scale, const Rows& y);
};

}  // namespace legato
