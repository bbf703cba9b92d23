// The instruction set's integer micro-kernels, one for each number of rows.
#include <array>

#include "linear_items.hpp"
#if LEGATO_ISA_AVX512 || LEGATO_ISA_AMX
#include "linear_int_avx512.hpp"
#elif LEGATO_ISA_AVX2
#include "linear_int_avx2.hpp"
#else
#include "linear_int_portable.hpp"
#endif

namespace legato::LEGATO_ISA {
namespace {

template <IntWeights W, bool Equalised, int... I>
constexpr std::array<IntKernel, sizeof...(I)> int_kernel_table(std::integer_sequence<int, I...>) {
    return {int_kernel<W, I + 1, Equalised>...};
}

// int_kernels<W>[r - 1] does r rows.
template <IntWeights W, bool Equalised = false>
constexpr auto int_kernels = int_kernel_table<W, Equalised>(std::make_integer_sequence<int, int_rows>{});

static_assert(int_rows <= int_rows_most);

}  // namespace

std::int64_t int_kernel_rows() { return int_rows; }

const IntKernel* int_kernels_for(IntWeights weights, bool equalised) {
    const auto choose = [&]<IntWeights W>() {
        if constexpr (quant_equalises)
            if (equalised) return int_kernels<W, true>.data();
        return int_kernels<W>.data();
    };
    switch (weights) {
        case IntWeights::q4:
            return choose.operator()<IntWeights::q4>();
        case IntWeights::q4_bytes:
            return choose.operator()<IntWeights::q4_bytes>();
        case IntWeights::q8_group32:
            return choose.operator()<IntWeights::q8_group32>();
        case IntWeights::q8_group16:
            return choose.operator()<IntWeights::q8_group16>();
        default:
            break;
    }
    if constexpr (quant_equalises)
        return weights == IntWeights::q8_group32_scaled ? int_kernels<IntWeights::q8_group32_scaled, true>.data()
                                                        : int_kernels<IntWeights::q8_group16_scaled, true>.data();
    return nullptr;
}

}  // namespace legato::LEGATO_ISA
