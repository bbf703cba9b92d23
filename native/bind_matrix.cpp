#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>

#include "bind.hpp"
#include "dispatch.hpp"
#include "linear.hpp"
#include "matrix.hpp"

namespace legato {

namespace {

void require(bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
}

std::shared_ptr<Matrix> pack_grouped(Array<std::uint8_t, 2> q, Array<float, 2> scale,
                                     std::optional<Array<float, 2>> minimum, int zero, int bits, int group) {
    require(group == 16 || group == 32, "group must be 16 or 32, got " + std::to_string(group));
    const std::size_t rows = q.shape(0), cols = q.shape(1);
    const std::size_t groups = cols / static_cast<std::size_t>(group);
    require(groups * static_cast<std::size_t>(group) == cols,
            std::to_string(cols) + " columns are no multiple of the group, " + std::to_string(group));
    require(scale.shape(0) == rows && scale.shape(1) == groups, "scale must be [rows, columns / group] of q");
    require(!minimum || (minimum->shape(0) == rows && minimum->shape(1) == groups),
            "minimum must be [rows, columns / group] of q");
    nb::gil_scoped_release released;
    return std::make_shared<Matrix>(Matrix::pack_grouped(q.data(), scale.data(), minimum ? minimum->data() : nullptr,
                                                         static_cast<std::int64_t>(rows),
                                                         static_cast<std::int64_t>(cols), zero, bits, group));
}

using AnyArray = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Matrix> pack_dense(AnyArray values, const std::string& dtype) {
    WeightKind kind;
    nb::dlpack::dtype wanted = nb::dtype<float>();
    if (dtype == "f32") {
        kind = WeightKind::f32;
    } else if (dtype == "f16") {
        kind = WeightKind::f16;
        wanted = nb::dlpack::dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    } else if (dtype == "bf16") {
        kind = WeightKind::bf16;
        wanted = nb::dtype<std::uint16_t>();
    } else {
        throw std::invalid_argument("dtype must be \"f32\", \"f16\" or \"bf16\", got \"" + dtype + '"');
    }
    require(values.dtype() == wanted,
            "values do not have the dtype that \"" + dtype + "\" needs: float32, float16, or uint16 with bf16 bits");
    nb::gil_scoped_release released;
    return std::make_shared<Matrix>(Matrix::pack_dense(values.data(), static_cast<std::int64_t>(values.shape(0)),
                                                       static_cast<std::int64_t>(values.shape(1)), kind));
}

nb::ndarray<nb::numpy, float> unpack(const Matrix& w) {
    auto out = numpy_empty<float>({static_cast<std::size_t>(w.rows()), static_cast<std::size_t>(w.cols())});
    nb::gil_scoped_release released;
    w.unpack(out.data());
    return out;
}

nb::ndarray<nb::numpy, float> linear(const Matrix& w, Array<float, 2> x, const std::string& activations,
                                     const std::optional<Array<std::uint8_t, 1>>& shifts, int threads) {
    const Activations kind = parse_activations(activations);
    require(static_cast<std::int64_t>(x.shape(1)) == w.cols(),
            "x has " + std::to_string(x.shape(1)) + " columns, the weight " + std::to_string(w.cols()));
    require(threads > 0 && threads <= 1024, "threads must be in [1, 1024], got " + std::to_string(threads));
    auto y = numpy_empty<float>({x.shape(0), static_cast<std::size_t>(w.rows())});
    const LinearKernels& kernels = active_kernels().linear;
    std::optional<Equaliser> equaliser;
    if (shifts) {
        require(static_cast<std::int64_t>(shifts->shape(0)) == w.cols(), "shifts must be one a column of the weight");
        const Matrix* parts[] = {&w};
        if (const ShiftLimits limits = kernels.shift_limits(parts, 1); limits.most > 0)
            equaliser.emplace(std::vector<std::uint8_t>(shifts->data(), shifts->data() + shifts->shape(0)), limits);
    }
    nb::gil_scoped_release released;
    linear_once(kernels, w, x.data(), static_cast<std::int64_t>(x.shape(0)), y.data(), kind,
                equaliser ? &*equaliser : nullptr, threads);
    return y;
}

nb::ndarray<nb::numpy, float> gather(const Matrix& w, Array<std::int32_t, 1> ids, float scale, int threads) {
    require(threads > 0 && threads <= 1024, "threads must be in [1, 1024], got " + std::to_string(threads));
    auto y = numpy_empty<float>({ids.shape(0), static_cast<std::size_t>(w.cols())});
    const LinearKernels& kernels = active_kernels().linear;
    nb::gil_scoped_release released;
    gather_once(kernels, w, ids.data(), static_cast<std::int64_t>(ids.shape(0)), scale, y.data(), threads);
    return y;
}

}  // namespace

void bind_matrix(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix", "A packed weight [rows = outputs, cols = inputs], immutable.")
        .def_static(
            "pack_grouped", pack_grouped, nb::arg("q").noconvert(), nb::arg("scale").noconvert(),
            nb::arg("minimum").noconvert().none(), nb::kw_only(), nb::arg("zero"), nb::arg("bits"), nb::arg("group"),
            "value = scale * (q - zero) + minimum.\n\nq uint8 [rows, cols]; scale and minimum (or None) fp32 [rows, "
            "cols / group]; bits 4 or 8; group 16 or 32. Scales and minima are kept as fp16 if each is exactly "
            "representable, else as fp32.")
        .def_static("pack_dense", pack_dense, nb::arg("values").noconvert(), nb::kw_only(), nb::arg("dtype"),
                    "From float32 (\"f32\"), float16 (\"f16\") or bf16 bits as uint16 (\"bf16\"), [rows, cols].")
        .def_prop_ro("rows", &Matrix::rows)
        .def_prop_ro("cols", &Matrix::cols)
        .def_prop_ro("nbytes", &Matrix::nbytes)
        .def_prop_ro("format", &Matrix::format)
        .def("unpack", unpack, "The values, fp32 [rows, cols].")
        .def("linear", linear, nb::arg("x").noconvert(), nb::kw_only(), nb::arg("activations") = "int8",
             nb::arg("shifts").noconvert() = nb::none(), nb::arg("threads") = 1,
             "x W^T, fp32 [x rows, rows]. `shifts`, uint8 [cols]: where int8 inputs are equalised, column k "
             "is coded as x 2^-shift. For tests and benchmarks.")
        .def("gather", gather, nb::arg("ids").noconvert(), nb::kw_only(), nb::arg("scale") = 1.0f,
             nb::arg("threads") = 1, "scale * W[ids], fp32 [ids, cols]. For tests.");
    m.def(
        "fma_peak", [](double seconds) { return active_kernels().linear.fma_peak(seconds); }, nb::arg("seconds") = 0.1,
        nb::call_guard<nb::gil_scoped_release>(),
        "fp32 flop/s of one thread on multiply-adds between registers, measured for about `seconds`.");
    m.def(
        "read_bandwidth",
        [](nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data) {
            return active_kernels().linear.read_bandwidth(reinterpret_cast<const std::byte*>(data.data()),
                                                          data.nbytes());
        },
        nb::arg("data").noconvert(), nb::call_guard<nb::gil_scoped_release>(),
        "bytes/s of one thread reading `data` (uint8) once.");
}

}  // namespace legato
