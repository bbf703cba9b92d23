#include <nanobind/stl/string.h>

#include <stdexcept>

#include "bind.hpp"
#include "dispatch.hpp"
#include "linear.hpp"

namespace legato {
namespace {

nb::tuple time_linear_of(const Matrix& w, std::int64_t rows, const std::string& activations, int threads,
                         double seconds) {
    const Activations kind = parse_activations(activations);
    if (rows < 1 || threads < 1) throw std::invalid_argument("rows and threads must be at least 1");
    LinearSeconds best;
    {
        nb::gil_scoped_release released;
        best = time_linear(active_kernels().linear, w, rows, kind, threads, seconds);
    }
    return nb::make_tuple(best.quantise, best.linear);
}

}  // namespace

void bind_bench(nb::module_& m) {
    m.def("time_linear", time_linear_of, nb::arg("weight"), nb::arg("rows"), nb::kw_only(),
          nb::arg("activations") = "int8", nb::arg("threads") = 1, nb::arg("seconds") = 0.1,
          "Shortest (quantise, linear) seconds of one layer in a running team, repeated for about `seconds`.");
    m.def(
        "team_fma_peak",
        [](int threads, double seconds) {
            if (threads < 1) throw std::invalid_argument("threads must be at least 1");
            nb::gil_scoped_release released;
            return fma_peak(active_kernels().linear, threads, seconds);
        },
        nb::arg("threads"), nb::arg("seconds") = 0.1, "fp32 flop/s of `threads` threads at once, on registers.");
}

}  // namespace legato
