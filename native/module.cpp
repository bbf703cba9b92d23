// The Python module `legato._native`.
#include "bind.hpp"

NB_MODULE(_native, m) {
    m.doc() = "Legato's CPU kernels: packed weights, a paged KV cache, and programs replayed once a step.";
    legato::bind_dispatch(m);
    legato::bind_matrix(m);
    legato::bind_kv(m);
    legato::bind_program(m);
    legato::bind_bench(m);
}
