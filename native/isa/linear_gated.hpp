#pragma once

#include "elementwise.hpp"
#include "matrix.hpp"

namespace legato::LEGATO_ISA {

// See LinearKernels.
bool fuses_gate(const Matrix& gate, const Matrix& up);
void gated_linear(const Matrix& gate, const Matrix& up, Gate kind, const Quantised& x, const Quantised& out,
                  std::byte* scratch);
std::size_t gated_scratch_nbytes(const PanelLayout& w);  // of one thread

}  // namespace legato::LEGATO_ISA
