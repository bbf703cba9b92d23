#include "isa/tables.hpp"

namespace legato::LEGATO_ISA {

#define LEGATO_NAME_(isa) #isa
#define LEGATO_NAME(isa) LEGATO_NAME_(isa)

const Kernels& kernels() {
    static constinit Kernels table{};
    if (table.isa == nullptr) {  // only reached with the interpreter's lock held
        table.linear = linear_kernels();
        table.attention = attention_kernels();
        table.elementwise = elementwise_kernels();
        table.isa = LEGATO_NAME(LEGATO_ISA);
    }
    return table;
}

}  // namespace legato::LEGATO_ISA
