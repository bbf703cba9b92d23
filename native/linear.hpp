// One linear layer on its own, for tests and benchmarks: its own parallel region and buffers.
#pragma once

#include <cstdint>
#include <string>

#include "equaliser.hpp"
#include "kernels.hpp"
#include "matrix.hpp"

namespace legato {

// "f32", "int8" or "bf16"; throws std::invalid_argument for anything else.
Activations parse_activations(const std::string& name);
// Throws std::invalid_argument if these kernels have no such activations.
void require_activations(const LinearKernels& kernels, Activations activations);

// y [rows, w.rows()] = x [rows, w.cols()] * w^T; `activations` are for a quantised `w`, and `equaliser` for one whose
// inputs the kernels equalise (null: one that divides by 1).
void linear_once(const LinearKernels& kernels, const Matrix& w, const float* x, std::int64_t rows, float* y,
                 Activations activations, const Equaliser* equaliser, int threads);

// Shortest times of one layer in a running team: of quantising the activations (0 if they stay fp32) and of the layer.
struct LinearSeconds {
    double quantise, linear;
};

// Repeats for about `seconds`, on buffers of its own that are touched before.
LinearSeconds time_linear(const LinearKernels& kernels, const Matrix& w, std::int64_t rows, Activations activations,
                          int threads, double seconds);

// fp32 flop/s of `threads` threads at once, on registers.
double fma_peak(const LinearKernels& kernels, int threads, double seconds);

// y [count, w.cols()] = scale * w[ids]. Throws std::invalid_argument for an id that is out of range.
void gather_once(const LinearKernels& kernels, const Matrix& w, const std::int32_t* ids, std::int64_t count,
                 float scale, float* y, int threads);

}  // namespace legato
