#include "equaliser.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

namespace legato {
namespace {

constexpr std::int64_t group = 32;

using Group = std::array<float, group>;

// What one choice of shifts costs: the step of the codes, which the largest value sets, goes into every column as often
// as it was divided. Geometric mean over the rows, so that a few rows of giants (a model's first token) do not decide.
double error_of(const std::vector<Group>& magnitudes, const std::array<std::uint8_t, group>& shifts) {
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

Equaliser::Equaliser(std::int64_t cols) : Equaliser(std::vector<std::uint8_t>(static_cast<std::size_t>(cols))) {}

Equaliser::Equaliser(const std::vector<std::uint8_t>& shifts)
    : down_(shifts.size()), up_(shifts.size()), counts_(shifts.size() / 2) {
    for (std::size_t k = 0; k < shifts.size(); ++k) {
        if (shifts[k] > most_shift) throw std::invalid_argument("a shift of an equaliser must be at most 4");
        down_[k] = std::ldexp(1.0f, -shifts[k]);
        up_[k] = static_cast<std::uint8_t>(1u << shifts[k]);
        counts_[k / 4 * 2 + k % 2] |= static_cast<std::uint32_t>(shifts[k]) << (k % 4 / 2 * 16);
    }
}

std::vector<std::uint8_t> Equaliser::shifts() const {
    std::vector<std::uint8_t> shifts(up_.size());
    for (std::size_t k = 0; k < up_.size(); ++k) shifts[k] = static_cast<std::uint8_t>(std::ilogb(up_[k]));
    return shifts;
}

// Candidates: every column is brought down to at most a threshold, in half octaves below the largest column.
void Equaliser::choose(const float* rows, std::int64_t count, std::int64_t cols, std::int64_t begin, std::int64_t end,
                       std::uint8_t* shifts) {
    constexpr int thresholds = 13;
    constexpr double least_gain = 0.001;  // of log2: a shift for nothing is none
    std::vector<Group> magnitudes(static_cast<std::size_t>(count));
    for (std::int64_t g = begin; g < end; ++g) {
        Group sizes{};  // root mean square of each column, each row taken relative to its own
        for (std::int64_t r = 0; r < count; ++r) {
            Group& row = magnitudes[static_cast<std::size_t>(r)];
            const float* from = rows + r * cols + g * group;
            float sum = 0x1p-60f;
            for (std::size_t k = 0; k < group; ++k) {
                row[k] = std::fabs(from[k]);
                sum += row[k] * row[k];
            }
            for (std::size_t k = 0; k < group; ++k) sizes[k] += row[k] * row[k] / sum;
        }
        float largest = 0x1p-60f;
        for (float& size : sizes) largest = std::max(largest, size = std::sqrt(size));
        std::array<std::uint8_t, group> best{};
        double least = error_of(magnitudes, best);
        for (int i = 1; i < thresholds; ++i) {
            const float threshold = largest * std::exp2(-0.5f * static_cast<float>(i));
            std::array<std::uint8_t, group> candidate;
            for (std::size_t k = 0; k < group; ++k) {
                const float octaves = std::ceil(std::log2(std::max(sizes[k], 0x1p-60f) / threshold));
                candidate[k] = static_cast<std::uint8_t>(std::clamp(octaves, 0.0f, static_cast<float>(most_shift)));
            }
            const double error = error_of(magnitudes, candidate);
            if (error < least - least_gain) {
                least = error;
                best = candidate;
            }
        }
        std::copy(best.begin(), best.end(), shifts + g * group);
    }
}

}  // namespace legato
