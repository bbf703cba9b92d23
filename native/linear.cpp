#include "linear.hpp"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "memory.hpp"

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

Activations parse_activations(const std::string& name) {
    if (name == "f32") return Activations::f32;
    if (name == "int8") return Activations::int8;
    if (name == "bf16") return Activations::bf16;
    throw std::invalid_argument("activations must be \"int8\", \"bf16\" or \"f32\", got \"" + name + '"');
}

void require_activations(const LinearKernels& kernels, Activations activations) {
    if (activations == Activations::bf16 && !kernels.has_bf16)
        throw std::invalid_argument("bf16 activations need the instruction set \"amx\"");
}

void linear_once(const LinearKernels& kernels, const Matrix& w, const float* x, std::int64_t rows, float* y,
                 Activations activations, const Equaliser* equaliser, int threads) {
    require_activations(kernels, activations);
    if (rows == 0) return;
    const Matrix* parts[] = {&w};
    const Rows input{const_cast<float*>(x), w.cols(), rows, w.cols()};
    const Rows output{y, w.rows(), rows, w.rows()};
    const bool coded = activations != Activations::f32 && w.quantised();
    const Buffer scratch = allocate(kernels.linear_scratch_nbytes(parts, 1, threads));
    const Coding coding = kernels.coding(parts, 1, activations);
    const Buffer codes = allocate(coded ? kernels.quantised_nbytes(rows, w.cols(), coding) : 0);
    const Equaliser none(w.cols());
    const bool equalised = coding == Coding::equalised;
    const Quantised quantised{codes.get(), rows, w.cols(), coding,
                              !equalised             ? nullptr
                              : equaliser != nullptr ? equaliser
                                                     : &none};
#pragma omp parallel num_threads(threads)
    {
        if (coded) kernels.quantise(input, quantised);
        kernels.linear(parts, 1, input, coded ? &quantised : nullptr, output, nullptr, nullptr, scratch.get());
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

LinearSeconds time_linear(const LinearKernels& kernels, const Matrix& w, std::int64_t rows, Activations activations,
                          int threads, double seconds) {
    require_activations(kernels, activations);
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    const bool coded = activations != Activations::f32 && w.quantised();
    const Matrix* parts[] = {&w};
    const PageBuffer x_buffer(static_cast<std::size_t>(rows * w.cols()) * sizeof(float));
    const PageBuffer y_buffer(static_cast<std::size_t>(rows * w.rows()) * sizeof(float));
    const PageBuffer scratch(kernels.linear_scratch_nbytes(parts, 1, threads));
    const Coding coding = kernels.coding(parts, 1, activations);
    const Equaliser none(w.cols());
    const PageBuffer codes(coded ? kernels.quantised_nbytes(rows, w.cols(), coding) : 0);
    const Rows x{reinterpret_cast<float*>(x_buffer.data()), w.cols(), rows, w.cols()};
    const Rows y{reinterpret_cast<float*>(y_buffer.data()), w.rows(), rows, w.rows()};
    for (std::int64_t i = 0; i < rows * w.cols(); ++i)
        x.data[i] = static_cast<float>((i * 7919) % 2001 - 1000) * 0.001f;
    const Quantised quantised{codes.data(), rows, w.cols(), coding, coding == Coding::equalised ? &none : nullptr};
    LinearSeconds best{1e9, 1e9};
    bool more = true;
    const Clock::time_point begin = Clock::now();
    Clock::time_point start, middle;
#pragma omp parallel num_threads(threads)
    while (more) {
        // One thread reads the clock for all: a thread that was held up must not shorten the time.
#pragma omp single
        start = Clock::now();
        if (coded) kernels.quantise(x, quantised);
#pragma omp single
        middle = Clock::now();
        kernels.linear(parts, 1, x, coded ? &quantised : nullptr, y, nullptr, nullptr, scratch.data());
#pragma omp single
        {
            best.linear = std::min(best.linear, since(middle));
            best.quantise = std::min(best.quantise, std::chrono::duration<double>(middle - start).count());
            more = since(begin) < seconds;
        }
    }
    if (!coded) best.quantise = 0.0;
    return best;
}

double fma_peak(const LinearKernels& kernels, int threads, double seconds) {
    std::vector<double> flops(static_cast<std::size_t>(threads));
#pragma omp parallel num_threads(threads)
    flops[static_cast<std::size_t>(omp_get_thread_num())] = kernels.fma_peak(seconds);
    double total = 0.0;
    for (const double f : flops) total += f;
    return total;
}

}  // namespace legato
