// Powers of two by which the columns of an activation are divided before they are coded in 8 bits. Weights of up to 6
// bits are multiplied by the same powers when they are unpacked to bytes, which loses nothing: see ShiftLimits. So a
// column that is large for every token does not rob the other 31 of its group of their precision, at no cost in
// products. The powers come from a few rows of real activations (`choose`) and then stay, whatever is computed.
//
// The idea of moving scale from activations to weights is SmoothQuant's (Xiao et al., 2022); powers of two make it
// exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace legato {

class Equaliser {
  public:
    // Divides by 1.
    explicit Equaliser(std::int64_t cols);
    // Divides column k by 2^shifts[k]. Throws std::invalid_argument for shifts beyond `limits`.
    Equaliser(const std::vector<std::uint8_t>& shifts, const ShiftLimits& limits);
    // For group `group` of 32 columns, the shifts with the least error over `count` rows [count, cols], into `shifts`
    // [cols].
    static void choose(const float* rows, std::int64_t count, std::int64_t cols, std::int64_t group,
                       const ShiftLimits& limits, std::uint8_t* shifts);

    std::vector<std::uint8_t> shifts() const;
    const float* down() const { return down_.data(); }     // [cols]: 2^-shift
    const std::uint8_t* up() const { return up_.data(); }  // [cols]: 2^shift
    // [cols / 4][2]: for a quad of columns, 2^shift of the even ones and of the odd ones, in 16 bits each.
    const std::uint32_t* factors() const { return factors_.data(); }

  private:
    std::vector<float> down_;
    std::vector<std::uint8_t> up_;
    std::vector<std::uint32_t> factors_;
};

}  // namespace legato
