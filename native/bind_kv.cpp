#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "bind.hpp"
#include "dispatch.hpp"
#include "kv.hpp"

namespace legato {

namespace {

using MutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

KvShape kv_shape(std::int64_t layers, std::int64_t blocks, std::int64_t block_tokens, std::int64_t kv_heads,
                 std::int64_t head_dim, const std::string& dtype) {
    if (dtype != "f16" && dtype != "f32")
        throw std::invalid_argument("dtype must be \"f16\" or \"f32\", got \"" + dtype + '"');
    const KvShape shape{layers, blocks, block_tokens, kv_heads, head_dim, dtype == "f16" ? KvType::f16 : KvType::f32};
    shape.check();
    return shape;
}

nb::tuple read(const KvCache& kv, std::int64_t layer, std::int64_t block) {
    const auto tokens = static_cast<std::size_t>(kv.shape().block_tokens);
    const auto heads = static_cast<std::size_t>(kv.shape().kv_heads);
    const auto dim = static_cast<std::size_t>(kv.shape().head_dim);
    auto k = numpy_empty<float>({tokens, heads, dim});
    auto v = numpy_empty<float>({tokens, heads, dim});
    kv.read(layer, block, k.data(), v.data());
    return nb::make_tuple(k, v);
}

void check_nbytes(const KvCache& kv, std::size_t nbytes) {
    if (nbytes != kv.shape().block_nbytes())
        throw std::invalid_argument("a block has " + std::to_string(kv.shape().block_nbytes()) + " bytes, got " +
                                    std::to_string(nbytes));
}

void copy_out(const KvCache& kv, std::int64_t block, const MutableBytes& into) {
    check_nbytes(kv, into.size());
    const nb::gil_scoped_release release;
    kv.copy_out(block, reinterpret_cast<std::byte*>(into.data()));
}

void copy_in(KvCache& kv, std::int64_t block, const Array<std::uint8_t, 1>& source) {
    check_nbytes(kv, source.size());
    const nb::gil_scoped_release release;
    kv.copy_in(block, reinterpret_cast<const std::byte*>(source.data()));
}

}  // namespace

void bind_dispatch(nb::module_& m) {
    m.def("isas", available_isas, "Instruction sets that were built and that this CPU has, plainest first.");
    m.def(
        "isa", [] { return active_kernels().isa; },
        "The instruction set of programs sealed from now on: $LEGATO_ISA, else the best available.");
    m.def("set_isa", set_active_isa, nb::arg("name"), "Chooses it. ValueError if it is not in isas().");
}

void bind_kv(nb::module_& m) {
    nb::class_<KvCache>(
        m, "KvCache",
        "Keys and values of every layer, in `blocks` blocks of `block_tokens` positions (a multiple of 16).\n\n"
        "Memory is taken from the system when it is first written. head_dim is a multiple of 8.")
        .def(
            "__init__",
            [](KvCache* self, std::int64_t layers, std::int64_t blocks, std::int64_t block_tokens,
               std::int64_t kv_heads, std::int64_t head_dim, const std::string& dtype) {
                new (self) KvCache(kv_shape(layers, blocks, block_tokens, kv_heads, head_dim, dtype));
            },
            nb::arg("layers"), nb::arg("blocks"), nb::arg("block_tokens"), nb::arg("kv_heads"), nb::arg("head_dim"),
            nb::arg("dtype") = "f16")
        .def_static(
            "predict_nbytes",
            [](std::int64_t layers, std::int64_t blocks, std::int64_t block_tokens, std::int64_t kv_heads,
               std::int64_t head_dim, const std::string& dtype) {
                return kv_shape(layers, blocks, block_tokens, kv_heads, head_dim, dtype).nbytes();
            },
            nb::arg("layers"), nb::arg("blocks"), nb::arg("block_tokens"), nb::arg("kv_heads"), nb::arg("head_dim"),
            nb::arg("dtype") = "f16", "Bytes such a cache would take; allocates nothing.")
        .def_prop_ro("nbytes", &KvCache::nbytes)
        .def_prop_ro(
            "block_nbytes", [](const KvCache& kv) { return kv.shape().block_nbytes(); },
            "Bytes of one block over all layers.")
        .def_prop_ro("blocks", [](const KvCache& kv) { return kv.shape().blocks; })
        .def_prop_ro("block_tokens", [](const KvCache& kv) { return kv.shape().block_tokens; })
        .def("touch", &KvCache::touch, nb::call_guard<nb::gil_scoped_release>(),
             "Takes all memory from the system now, so that no step waits for new pages. Before the first use.")
        .def("copy_out", copy_out, nb::arg("block"), nb::arg("into").noconvert(),
             "Copies the bytes of one block, as stored and layer after layer, into uint8 [block_nbytes].\n\n"
             "A memcpy a layer, without the interpreter's lock; no step may write the block meanwhile. ValueError for "
             "another size or a block that is not there.")
        .def("copy_in", copy_in, nb::arg("block"), nb::arg("source").noconvert(),
             "Makes a block what `copy_out` gave, in this cache or another of the same shape, whatever its `blocks`.")
        .def("read", read, nb::arg("layer"), nb::arg("block"),
             "(k, v) of one block, each fp32 [block_tokens, kv_heads, head_dim]. For tests.");
}

}  // namespace legato
