#include "equaliser.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

namespace legato {
namespace {

constexpr std::size_t group = 32;

using Group = std::array<float, group>;
using Shifts = std::array<std::uint8_t, group>;

// Columns of a group whose products fall into one sum of 16 bits: pairs of bytes, in the lower or the upper nibbles.
std::size_t lane_of(std::size_t k) { return k / 16 * 2 + k % 4 / 2; }
constexpr std::size_t lanes = 4;

std::array<int, lanes> lane_sums(const std::uint8_t* shifts) {
    std::array<int, lanes> sums{};
    for (std::size_t k = 0; k < group; ++k) sums[lane_of(k)] += 1 << shifts[k];
    return sums;
}

// Takes shifts back, where that costs least, until no lane's sum is over its limit.
void constrain(const Group& sizes, int limit, Shifts& shifts) {
    for (std::size_t lane = 0; lane < lanes; ++lane)
        while (lane_sums(shifts.data())[lane] > limit) {
            std::size_t least = group;
            float size = 0.0f;
            for (std::size_t k = 0; k < group; ++k) {
                if (lane_of(k) != lane || shifts[k] == 0) continue;
                const float after = std::ldexp(sizes[k], 1 - shifts[k]);
                if (least == group || after < size) {
                    least = k;
                    size = after;
                }
            }
            --shifts[least];
        }
}

// What one choice of shifts costs: the step of the codes, which the largest value sets, goes into every column as often
// as it was divided. Geometric mean over the rows, so that a few rows of giants (a model's first token) do not decide.
double error_of(const std::vector<Group>& magnitudes, const Shifts& shifts) {
    Group down;
    double gain = 0.0;
    for (std::size_t k = 0; k < group; ++k) {
        down[k] = std::ldexp(1.0f, -shifts[k]);
        gain += std::ldexp(1.0, 2 * shifts[k]);
    }
    double log_largest = 0.0;
    for (const Group& row : magnitudes) {
        float largest = 0x1p-60f;
        for (std::size_t k = 0; k < group; ++k) largest = std::max(largest, row[k] * down[k]);
        log_largest += std::log2(largest);
    }
    return 2.0 * log_largest / static_cast<double>(magnitudes.size()) + std::log2(gain);
}

}  // namespace

Equaliser::Equaliser(std::int64_t cols) : Equaliser(std::vector<std::uint8_t>(static_cast<std::size_t>(cols)), {}) {}

Equaliser::Equaliser(const std::vector<std::uint8_t>& shifts, const ShiftLimits& limits)
    : down_(shifts.size()), up_(shifts.size()), factors_(shifts.size() / 2) {
    for (std::size_t k = 0; k < shifts.size(); ++k) {
        if (shifts[k] > limits.most)
            throw std::invalid_argument("a shift is over " + std::to_string(limits.most) +
                                        ", the most there is room for");
        down_[k] = std::ldexp(1.0f, -shifts[k]);
        up_[k] = static_cast<std::uint8_t>(1u << shifts[k]);
        factors_[k / 4 * 2 + k % 2] |= std::uint32_t{up_[k]} << (k % 4 / 2 * 16);
    }
    for (std::size_t k = 0; limits.sum > 0 && k + group <= shifts.size(); k += group)
        for (const int sum : lane_sums(shifts.data() + k))
            if (sum > limits.sum) throw std::invalid_argument("shifts of a group overflow sums of 16 bits");
}

std::vector<std::uint8_t> Equaliser::shifts() const {
    std::vector<std::uint8_t> shifts(up_.size());
    for (std::size_t k = 0; k < up_.size(); ++k) shifts[k] = static_cast<std::uint8_t>(std::ilogb(up_[k]));
    return shifts;
}

// Candidates: every column is brought down to at most a threshold, in half octaves below the largest column.
void Equaliser::choose(const float* rows, std::int64_t count, std::int64_t cols, std::int64_t group_index,
                       const ShiftLimits& limits, std::uint8_t* shifts) {
    constexpr int thresholds = 13;
    constexpr double least_gain = 0.001;  // of log2: a shift for nothing is none
    std::vector<Group> magnitudes(static_cast<std::size_t>(count));
    Group sizes{};  // root mean square of each column, each row taken relative to its own
    for (std::int64_t r = 0; r < count; ++r) {
        Group& row = magnitudes[static_cast<std::size_t>(r)];
        const float* from = rows + r * cols + group_index * static_cast<std::int64_t>(group);
        float sum = 0x1p-60f;
        for (std::size_t k = 0; k < group; ++k) {
            row[k] = std::fabs(from[k]);
            sum += row[k] * row[k];
        }
        for (std::size_t k = 0; k < group; ++k) sizes[k] += row[k] * row[k] / sum;
    }
    float largest = 0x1p-60f;
    for (float& size : sizes) largest = std::max(largest, size = std::sqrt(size));
    Shifts best{};
    double least = error_of(magnitudes, best);
    for (int i = 1; i < thresholds; ++i) {
        const float threshold = largest * std::exp2(-0.5f * static_cast<float>(i));
        Shifts candidate;
        for (std::size_t k = 0; k < group; ++k) {
            const float octaves = std::ceil(std::log2(std::max(sizes[k], 0x1p-60f) / threshold));
            candidate[k] = static_cast<std::uint8_t>(std::clamp(octaves, 0.0f, static_cast<float>(limits.most)));
        }
        if (limits.sum > 0) constrain(sizes, limits.sum, candidate);
        const double error = error_of(magnitudes, candidate);
        if (error < least - least_gain) {
            least = error;
            best = candidate;
        }
    }
    std::copy(best.begin(), best.end(), shifts + group_index * static_cast<std::int64_t>(group));
}

}  // namespace legato
