#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "bind.hpp"
#include "linear.hpp"
#include "program.hpp"

namespace legato {

namespace {

using Vector = Array<float, 1>;
using Table = Array<float, 2>;

// The values stay in the NumPy array, which lives as long as the program: one rotary table serves all layers.
template <std::size_t Dims>
FloatArray float_array(const Array<float, Dims>& values) {
    FloatArray array;
    array.rows = Dims == 2 ? static_cast<std::int64_t>(values.shape(0)) : 1;
    array.cols = static_cast<std::int64_t>(values.shape(Dims - 1));
    array.data = std::shared_ptr<const float>(std::make_shared<Array<float, Dims>>(values), values.data());
    return array;
}

FloatArray optional_array(const std::optional<Vector>& values) {
    return values ? float_array<1>(*values) : FloatArray{};
}

void construct(Program* self, std::shared_ptr<KvCache> kv, std::int64_t max_rows, std::int64_t max_logit_rows,
               std::int64_t max_seqs, const std::string& activations, int max_threads) {
    new (self) Program(std::move(kv), ProgramLimits{max_rows, max_logit_rows, max_seqs,
                                                    max_threads == 0 ? omp_get_num_procs() : max_threads,
                                                    parse_activations(activations)});
}

int linear(Program& program, int x, std::vector<std::shared_ptr<Matrix>> weights, const std::optional<Vector>& bias,
           int residual) {
    std::vector<std::shared_ptr<const Matrix>> parts(weights.begin(), weights.end());
    return program.linear(x, std::move(parts), optional_array(bias), residual);
}

int rope_kv(Program& program, int qkv, std::int64_t layer, const Table& cos, const Table& sin, bool interleaved,
            std::int64_t heads, const std::optional<Vector>& q_norm, const std::optional<Vector>& k_norm, float eps) {
    return program.rope_kv(
        qkv, layer,
        {float_array<2>(cos), float_array<2>(sin), interleaved, optional_array(q_norm), optional_array(k_norm), eps},
        heads);
}

int gated(Program& program, int x, const std::string& kind) {
    if (kind == "silu") return program.gated(x, Gate::silu);
    if (kind == "gelu_tanh") return program.gated(x, Gate::gelu_tanh);
    throw std::invalid_argument("kind must be \"silu\" or \"gelu_tanh\", got \"" + kind + '"');
}

using Ids = Array<std::int32_t, 1>;

StepInput step_input(const Ids& tokens, const Ids& positions, const Ids& seq_row_starts,
                     const Array<std::int32_t, 2>& block_tables, const Ids& logit_rows) {
    const auto length = [](const Ids& ids) { return static_cast<std::int64_t>(ids.shape(0)); };
    if (length(positions) != length(tokens)) throw std::invalid_argument("tokens and positions differ in length");
    if (length(seq_row_starts) < 2) throw std::invalid_argument("seq_row_starts must have at least 2 entries");
    if (static_cast<std::int64_t>(block_tables.shape(0)) != length(seq_row_starts) - 1)
        throw std::invalid_argument("block_tables must have one row a sequence");
    return {.tokens = tokens.data(),
            .positions = positions.data(),
            .rows = length(tokens),
            .row_starts = seq_row_starts.data(),
            .sequences = length(seq_row_starts) - 1,
            .block_tables = block_tables.data(),
            .table_width = static_cast<std::int64_t>(block_tables.shape(1)),
            .logit_rows = logit_rows.data(),
            .logit_count = length(logit_rows)};
}

nb::ndarray<nb::numpy, float> run(nb::handle_t<Program> self, const Ids& tokens, const Ids& positions,
                                  const Ids& seq_row_starts, const Array<std::int32_t, 2>& block_tables,
                                  const Ids& logit_rows, int threads) {
    Program& program = nb::cast<Program&>(self);
    const StepInput input = step_input(tokens, positions, seq_row_starts, block_tables, logit_rows);
    float* out;
    {
        nb::gil_scoped_release released;
        out = program.run(input, threads);
    }
    return numpy_view(out, {logit_rows.shape(0), static_cast<std::size_t>(program.output_cols())}, self);
}

Program::Shifts choose_shifts(Program& program, const Ids& tokens, const Ids& positions, const Ids& seq_row_starts,
                              const Array<std::int32_t, 2>& block_tables, const Ids& logit_rows, int threads) {
    const StepInput input = step_input(tokens, positions, seq_row_starts, block_tables, logit_rows);
    nb::gil_scoped_release released;
    return program.choose_shifts(input, threads);
}

nb::dict profile(const Program& program) {
    nb::dict seconds;
    for (std::size_t kind = 0; kind < kOpKinds; ++kind)
        if (program.seconds()[kind] > 0.0) seconds[op_name(static_cast<OpKind>(kind))] = program.seconds()[kind];
    return seconds;
}

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<Program>(
        m, "Program",
        "A decoder step, recorded once and replayed each step in one parallel region.\n\n"
        "Every operation returns a slot: a number that stands for fp32 [rows, cols]. Rows are those of the "
        "step, or, after select(), its logit rows. ValueError for slots and shapes that do not fit.")
        .def("__init__", construct, nb::arg("kv"), nb::kw_only(), nb::arg("max_rows"), nb::arg("max_logit_rows"),
             nb::arg("max_seqs"), nb::arg("activations") = "int8", nb::arg("max_threads") = 0,
             "activations \"int8\": inputs of quantised weights are quantised too; \"bf16\": both are expanded to bf16 "
             "(instruction set amx only); \"f32\": weights are dequantised.\n"
             "max_threads 0: as many as there are CPUs. It bounds run()'s threads and sizes the scratch.")
        .def(
            "embed",
            [](Program& p, std::shared_ptr<Matrix> weight, float scale) { return p.embed(std::move(weight), scale); },
            nb::arg("weight"), nb::arg("scale") = 1.0f, "scale * weight[tokens].")
        .def(
            "rms_norm",
            [](Program& p, int x, const Vector& weight, float eps) {
                return p.rms_norm(x, float_array<1>(weight), eps);
            },
            nb::arg("x"), nb::arg("weight").noconvert(), nb::arg("eps"), "x / sqrt(mean(x^2) + eps) * weight.")
        .def("linear", linear, nb::arg("x"), nb::arg("weights"), nb::arg("bias").noconvert() = nb::none(),
             nb::arg("residual") = -1,
             "x W^T (+ bias) (+ residual), the outputs of all weights side by side. x is quantised once for all "
             "linears.")
        .def("rope_kv", rope_kv, nb::arg("qkv"), nb::arg("layer"), nb::arg("cos").noconvert(),
             nb::arg("sin").noconvert(), nb::kw_only(), nb::arg("interleaved"), nb::arg("heads"),
             nb::arg("q_norm").noconvert() = nb::none(), nb::arg("k_norm").noconvert() = nb::none(),
             nb::arg("eps") = 0.0f,
             "Splits [q | k | v], normalises the heads of q and k if norms are given, rotates their first 2 * "
             "cos.shape[1]\n"
             "dimensions (pairs (2i, 2i+1) if interleaved, else (i, i + half)), writes k and v to the cache, returns "
             "q.\n"
             "cos and sin: fp32 [positions, rotated dimensions / 2], referenced, not copied.")
        .def("attention", &Program::attention, nb::arg("q"), nb::arg("layer"), nb::kw_only(), nb::arg("heads"),
             nb::arg("scale"), nb::arg("window") = 0, nb::arg("softcap") = 0.0f,
             "Causal attention of every row to its sequence's cached positions. window > 0: position p sees\n"
             "(p - window, p]. softcap > 0: scores become softcap * tanh(score / softcap).")
        .def("gated", gated, nb::arg("x"), nb::arg("kind"),
             "act(gate) * up, x = [gate | up]. kind \"silu\" or \"gelu_tanh\".")
        .def("add", &Program::add, nb::arg("x"), nb::arg("y"))
        .def("softcap", &Program::softcap, nb::arg("x"), nb::arg("cap"), "cap * tanh(x / cap).")
        .def("select", &Program::select, nb::arg("x"), "The rows named by run()'s logit_rows.")
        .def("seal", &Program::seal, nb::arg("output"),
             "Ends recording: `output` (its logit rows) becomes run()'s result. Allocates nothing.")
        .def_prop_ro("scratch_nbytes", &Program::scratch_nbytes, "Bytes the first run() allocates.")
        .def("run", run, nb::arg("tokens").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("seq_row_starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("logit_rows").noconvert(), nb::arg("threads") = 1,
             "One step; fp32 [logit rows, cols], which the next run() overwrites.\n\n"
             "int32 arrays: tokens and positions [rows], seq_row_starts [sequences + 1], block_tables [sequences, "
             "width],\n"
             "logit_rows [any up to max_logit_rows]. Sequence s owns rows [seq_row_starts[s], seq_row_starts[s + 1]), "
             "at\n"
             "least one, at consecutive positions. ValueError, and nothing done, for anything out of range.")
        .def("choose_shifts", choose_shifts, nb::arg("tokens").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("seq_row_starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("logit_rows").noconvert(), nb::arg("threads") = 1,
             "Runs one step and returns, for each input that the kernels equalise, exponents [cols]: what its columns "
             "are\n"
             "best divided by before they are coded in 8 bits. Empty where the instruction set does not equalise.\n"
             "Arguments as run()'s, with at least one logit row.")
        .def(
            "equalise", &Program::equalise, nb::arg("shifts"),
            "Makes choose_shifts()'s answer, of this program or of one with the same operations, that of runs to come.")
        .def_prop_ro("shifts", &Program::shifts, "The exponents in use; 0 until equalise().")
        .def("set_profile", &Program::set_profile, nb::arg("on"))
        .def("profile", profile,
             "Seconds by kind of operation over the runs since set_profile(True), barriers included.");
}

}  // namespace legato
