// What this machine can do at most, for the benchmarks: fused multiply-adds on registers, and reading memory.
#pragma once

#include <chrono>

#include "simd.hpp"

namespace legato::LEGATO_ISA {

// Called by one thread: flop/s of independent multiply-add chains.
inline double fma_peak(double seconds) {
    using Clock = std::chrono::steady_clock;
    constexpr int chains = 12, rounds = 4096;
    Vec acc[chains];
    unroll<chains>([&](auto i) { acc[i] = splat(static_cast<float>(i)); });
    Vec factor = splat(0.999f), term = splat(0.001f);
    double best = 0.0;
    const Clock::time_point begin = Clock::now();
    for (double elapsed = 0.0; elapsed < seconds;) {
        const Clock::time_point start = Clock::now();
        for (int j = 0; j < rounds; ++j) {
            unroll<chains>([&](auto i) { acc[i] = fma(acc[i], factor, term); });
        }
        const Clock::time_point stop = Clock::now();
        const double flops = 2.0 * kLanes * chains * rounds / std::chrono::duration<double>(stop - start).count();
        best = flops > best ? flops : best;
        elapsed = std::chrono::duration<double>(stop - begin).count();
    }
    volatile float keep = 0.0f;
    unroll<chains>([&](auto i) { keep = keep + lane_sum(acc[i]); });
    return best;
}

// Called by one thread: bytes/s of reading `nbytes` (a multiple of 256) once.
inline double read_bandwidth(const std::byte* data, std::size_t nbytes) {
    using Clock = std::chrono::steady_clock;
    const auto* values = reinterpret_cast<const float*>(data);
    constexpr int vectors = 64 / kLanes;
    Vec acc[vectors];
    unroll<vectors>([&](auto i) { acc[i] = zero(); });
    const Clock::time_point start = Clock::now();
    for (std::size_t at = 0; at + 256 <= nbytes; at += 256, values += 64) {
        unroll<vectors>([&](auto i) { acc[i] = max(acc[i], load(values + i * kLanes)); });
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    volatile float keep = 0.0f;
    unroll<vectors>([&](auto i) { keep = keep + lane_sum(acc[i]); });
    return static_cast<double>(nbytes) / seconds;
}

}  // namespace legato::LEGATO_ISA
