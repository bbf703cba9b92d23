// Scalar conversions of 16-bit floats, exact, the same on every CPU. Vector code has its own in the kernels.
#pragma once

#include <cstdint>
#include <cstring>

namespace legato {

inline float bits_to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint32_t float_to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float bf16_to_float(std::uint16_t bits) { return bits_to_float(static_cast<std::uint32_t>(bits) << 16); }

// Branch-free: shifts the fields into place and rebiases by an exact product with 2^112, which also handles subnormals.
inline float half_to_float(std::uint16_t half) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t finite = float_to_bits(bits_to_float(magnitude) * 0x1p112f);
    const std::uint32_t special = magnitude | 0x7f800000u;  // infinity or NaN
    return bits_to_float(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// The fp16 with exactly this value. Returns false, leaving `half` alone, if there is none (or if it is not finite).
inline bool float_to_half_exact(float value, std::uint16_t& half) {
    const std::uint32_t bits = float_to_bits(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x47800000u) return false;  // 65536 and above
    std::uint32_t code;
    if (magnitude >= 0x38800000u) {  // normal in fp16
        code = (magnitude - 0x38000000u) >> 13;
    } else {
        code = static_cast<std::uint32_t>(bits_to_float(magnitude) * 0x1p24f);  // subnormal: a multiple of 2^-24
    }
    const auto candidate = static_cast<std::uint16_t>(code | ((bits >> 16) & 0x8000u));
    if (float_to_bits(half_to_float(candidate)) != bits) return false;
    half = candidate;
    return true;
}

}  // namespace legato
