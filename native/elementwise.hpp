// Row-wise operations. Called by every thread of a team; see kernels.hpp.
#pragma once

#include "kernels.hpp"

namespace legato {

struct ElementwiseKernels {
    // out[r, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight; `out` and `x` may be the same memory. If `copy` is
    // not null, each row is quantised into it while it is at hand; then `out` may be a single row of the calling thread
    // (stride 0).
    void (*rms_norm)(const Rows& x, const float* weight, float eps, const Rows& out, const Quantised* copy);
    // out[r, i] = act(x[r, i]) * x[r, cols + i], where cols = out.cols. `copy` as above.
    void (*gated)(const Rows& x, Gate gate, const Rows& out, const Quantised* copy);
    // out = x + y; `out` may be either.
    void (*add)(const Rows& x, const Rows& y, const Rows& out);
    // out = cap * tanh(x / cap); `out` may be x.
    void (*softcap)(const Rows& x, float cap, const Rows& out);
    // out[i, :] = x[rows[i], :]
    void (*select)(const Rows& x, const std::int32_t* rows, const Rows& out);
};

}  // namespace legato
