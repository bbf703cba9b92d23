// What the files of one instruction set offer to its table.
#pragma once

#include "dispatch.hpp"

namespace legato::LEGATO_ISA {

LinearKernels linear_kernels();
AttentionKernels attention_kernels();
ElementwiseKernels elementwise_kernels();

}  // namespace legato::LEGATO_ISA
