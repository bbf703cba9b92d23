// Which instruction sets were built, which of them this CPU has, and which one is in use.
#pragma once

#include <string>
#include <vector>

#include "attention.hpp"
#include "elementwise.hpp"
#include "kernels.hpp"

namespace legato {

struct Kernels {
    const char* isa;
    LinearKernels linear;
    AttentionKernels attention;
    ElementwiseKernels elementwise;
};

// Built and supported by this CPU and operating system, plainest first.
std::vector<std::string> available_isas();
// The kernels in use: LEGATO_ISA's at start if that is set, else the best available. Throws std::invalid_argument if
// LEGATO_ISA names something not available.
const Kernels& active_kernels();
// Chooses the kernels of programs sealed from now on. Throws std::invalid_argument if `name` is not available.
void set_active_isa(const std::string& name);

}  // namespace legato
