#include "linear.hpp"

#include <omp.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

namespace legato {
namespace {

struct Free {
    void operator()(std::byte* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte, Free>;

Buffer allocate(std::size_t nbytes) {
    Buffer buffer(static_cast<std::byte*>(std::aligned_alloc(64, (nbytes + 64) / 64 * 64)));
    if (!buffer) throw std::bad_alloc();
    return buffer;
}

}  // namespace

void linear_once(const LinearKernels& kernels, const Matrix& w, const float* x, std::int64_t rows, float* y, bool int8,
                 int threads) {
    if (rows == 0) return;
    const Matrix* parts[] = {&w};
    const Rows input{const_cast<float*>(x), w.cols(), rows, w.cols()};
    const Rows output{y, w.rows(), rows, w.rows()};
    int8 = int8 && w.quantised();
    const Buffer scratch = allocate(kernels.linear_scratch_nbytes(parts, 1, threads, int8));
    const Buffer codes = allocate(int8 ? kernels.quantised_nbytes(rows, w.cols()) : 0);
    const Quantised quantised{codes.get(), rows, w.cols()};
#pragma omp parallel num_threads(threads)
    {
        if (int8) kernels.quantise(input, quantised);
        kernels.linear(parts, 1, input, int8 ? &quantised : nullptr, output, nullptr, nullptr, scratch.get());
    }
}

void gather_once(const LinearKernels& kernels, const Matrix& w, const std::int32_t* ids, std::int64_t count,
                 float scale, float* y, int threads) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= w.rows()) throw std::invalid_argument("row id out of range");
    }
    const Rows output{y, w.cols(), count, w.cols()};
#pragma omp parallel num_threads(threads)
    kernels.gather(w, ids, scale, output);
}

}  // namespace legato
