// Python bindings of pools, recorded programs and sampling.
// Must not know families or files. Used by backends/cpu only.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "cpu/program_record.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace picaflor {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const float* as_floats(uint64_t address) { return reinterpret_cast<const float*>(address); }

// The operations that go with a matrix kernel table; NEON has the plain ones. "auto" and refusals are kernels_for's.
const OpsTable* ops_for(const KernelTable* kernels) {
  if (kernels == scalar_kernels() || kernels == neon_kernels()) {
    return scalar_ops();
  }
  if (kernels == avx2_kernels() || kernels == avxvnni_kernels()) {
    return avx2_ops();
  }
  if (kernels == avx512_kernels() || kernels == vbmi_kernels()) {
    return avx512_ops();
  }
  throw std::invalid_argument(std::string("no float operations for instruction set ") + kernels->isa);
}

int64_t sample(const std::string& isa, const Floats& logits, float temperature, double top_p, double uniform) {
  const float* x = logits.data();
  const int64_t n = static_cast<int64_t>(logits.shape(0));
  if (n > kMostTokens) {
    throw std::invalid_argument("a row of " + std::to_string(n) + " logits; accepted: up to " +
                                std::to_string(kMostTokens));
  }
  if (temperature <= 0.0f) {
    return argmax(x, n);
  }
  float top = -INFINITY;
  for (int64_t i = 0; i < n; ++i) {
    top = std::isfinite(x[i]) && x[i] > top ? x[i] : top;
  }
  if (!std::isfinite(top)) {
    return 0;
  }
  if (!std::isfinite(top / temperature)) {
    return std::find(x, x + n, top) - x;  // colder than floats can say: greedy
  }
  std::vector<float> weights(static_cast<size_t>(n));
  ops_for(kernels_for(isa))->sample_weights(x, temperature, top / temperature, weights.data(), n);
  return choose_token(weights.data(), n, top_p, uniform);
}

void bind_pool(nb::module_& module) {
  nb::class_<Pool>(module, "Pool")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &Pool::threads)
      .def("run", &Pool::run, "body"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Call body(thread) on every thread; for tests, since Python runs them one at a time.")
      .def("barrier", &Pool::barrier, nb::call_guard<nb::gil_scoped_release>());
}

template <typename T>
nb::ndarray<nb::numpy, T> as_array(const RowsOf<T>& rows, int64_t count, nb::handle owner) {
  const size_t shape[2] = {static_cast<size_t>(count), static_cast<size_t>(rows.width)};
  const int64_t strides[2] = {rows.stride, 1};
  return nb::ndarray<nb::numpy, T>(rows.data, 2, shape, owner, strides);
}

void bind_arena(nb::module_& module) {
  nb::class_<View>(module, "View").def(nb::init<int32_t, int64_t, int64_t>(), "storage"_a, "start"_a, "width"_a);
  nb::class_<Arena>(module, "Arena")
      .def(
          "__init__",
          [](Arena* self, std::shared_ptr<Pool> pool, const std::string& isa, int64_t max_rows, int64_t max_outputs,
             int64_t page_tokens, int64_t pages) {
            const KernelTable* kernels = kernels_for(isa);
            new (self)
                Arena(std::move(pool), kernels, ops_for(kernels), ArenaSpec{max_rows, max_outputs, page_tokens, pages});
          },
          "pool"_a, "isa"_a, nb::kw_only(), "max_rows"_a, "max_outputs"_a, "page_tokens"_a, "pages"_a)
      .def("add_storage", &Arena::add_storage, "width"_a)
      .def("add_plane", &Arena::add_plane, "width"_a)
      .def_prop_ro("touched_bytes", &Arena::touched_bytes)
      .def_prop_ro("workspace_bytes", &Arena::workspace_bytes)
      .def_prop_ro("row_bytes", &Arena::row_bytes)
      .def("limit_rows", &Arena::limit_rows, "rows"_a)
      .def("floats", [](nb::handle self, const View& view,
                        int64_t count) { return as_array(nb::cast<Arena&>(self).f32(view), count, self); })
      .def("ints", [](nb::handle self, const View& view,
                      int64_t count) { return as_array(nb::cast<Arena&>(self).i32(view), count, self); })
      .def("address",
           [](const Arena& self, const View& view) {
             const RowsOf<float> rows = self.f32(view);
             return std::make_tuple(reinterpret_cast<uint64_t>(rows.data), rows.stride);
           })
      .def(
          "set_batch",
          [](Arena& self, const Ints& tokens, const Ints& sequences, const Ints& positions, const IntTable& pages,
             const Ints& outputs) {
            if (sequences.shape(0) != tokens.shape(0) || positions.shape(0) != tokens.shape(0)) {
              throw std::invalid_argument("tokens, sequences and positions of a batch differ in length");
            }
            self.set_batch(tokens.data(), sequences.data(), positions.data(), static_cast<int64_t>(tokens.shape(0)),
                           pages.data(), static_cast<int64_t>(pages.shape(0)), static_cast<int64_t>(pages.shape(1)),
                           outputs.data(), static_cast<int64_t>(outputs.shape(0)));
          },
          "tokens"_a, "sequences"_a, "positions"_a, "pages"_a, "outputs"_a);
}

void bind_builder(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def_prop_ro("segments", &Program::segments)
      .def_prop_ro("barriers", &Program::barriers)
      .def("run_segment", &Program::run_segment, "segment"_a, "plain"_a = false,
           nb::call_guard<nb::gil_scoped_release>(), "`plain`: by the scalar tables; the same bits.")
      .def("take_seconds", [](Program& self) {
        const auto seconds = self.take_seconds();
        return std::vector<double>(seconds.begin(), seconds.end());
      });
  nb::class_<Builder>(module, "Builder")
      .def(nb::init<std::shared_ptr<Arena>, int32_t>(), "arena"_a, "planes"_a)
      .def_prop_ro("after_outputs", &Builder::after_outputs)
      .def_rw("plain", &Builder::plain, "What is recorded while it is set runs by the scalar tables.")
      .def("embed", &Builder::embed)
      .def("rmsnorm", [](Builder& b, View x, uint64_t weight, View out, float eps,
                         int64_t heads) { b.rmsnorm(x, as_floats(weight), out, eps, heads); })
      .def("layernorm", [](Builder& b, View x, uint64_t weight, uint64_t bias, View out,
                           float eps) { b.layernorm(x, as_floats(weight), as_floats(bias), out, eps); })
      .def("matmul", &Builder::matmul)
      .def("rope", &Builder::rope, "x"_a, "heads"_a, "head_width"_a, "start"_a, "dims"_a, "theta"_a, "interleaved"_a)
      .def("add", &Builder::add)
      .def("silu_mul", &Builder::silu_mul)
      .def("kv_write", &Builder::kv_write)
      .def("index_select", &Builder::index_select, "q"_a, "weights"_a, "keys"_a, "out"_a, "heads"_a, "head_dim"_a,
           "top_k"_a)
      .def(
          "mla",
          [](Builder& b, View q, View out, std::optional<View> selection, const Weight& kv_b, int32_t latent,
             int32_t rope_key, int64_t heads, int64_t nope, int64_t rope, int64_t value, float scale) {
            const MlaSpec spec{kv_b, latent, rope_key, heads, nope, rope, value, scale};
            b.mla(q, out, spec, selection ? &*selection : nullptr);
          },
          "q"_a, "out"_a, "selection"_a.none(), "kv_b"_a, "latent"_a, "rope_key"_a, "heads"_a, "nope"_a, "rope"_a,
          "value"_a, "scale"_a)
      .def(
          "gqa",
          [](Builder& b, View q, View out, std::optional<View> selection, int32_t keys, int32_t values, int64_t heads,
             int64_t kv_heads, int64_t head_dim, float scale) {
            b.gqa(q, out, GqaSpec{keys, values, heads, kv_heads, head_dim, scale}, selection ? &*selection : nullptr);
          },
          "q"_a, "out"_a, "selection"_a.none(), "keys"_a, "values"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a)
      .def(
          "router",
          [](Builder& b, View logits, uint64_t bias, View ids, View weights, bool softmax, int64_t experts,
             int64_t top_k, bool normalise, float scale, int64_t groups, int64_t top_groups) {
            b.router(logits, as_floats(bias), ids, weights, softmax,
                     RouterChoice{experts, top_k, normalise, scale, groups, top_groups});
          },
          "logits"_a, "bias"_a, "ids"_a, "weights"_a, "softmax"_a, "experts"_a, "top_k"_a, "normalise"_a, "scale"_a,
          "groups"_a, "top_groups"_a)
      .def("experts", &Builder::experts)
      .def("select_outputs", &Builder::select_outputs)
      .def("finish", &Builder::finish);
}

}  // namespace

void bind_program(nb::module_& module) {
  bind_pool(module);
  bind_arena(module);
  bind_builder(module);
  module.def("isas", &kernel_isas, "Instruction sets that this build has and this machine runs, slowest first.");
  module.def("sample", &sample, "isa"_a, "logits"_a, nb::kw_only(), "temperature"_a, "top_p"_a, "uniform"_a);
  module.def(
      "exp_all",
      [](const std::string& isa, const Floats& x, const FloatsOut& out) {
        if (x.shape(0) != out.shape(0)) {
          throw std::invalid_argument("x and out differ in length");
        }
        ops_for(kernels_for(isa))->exp_all(x.data(), out.data(), static_cast<int64_t>(x.shape(0)));
      },
      "isa"_a, "x"_a, "out"_a, "exp of the kernels, element by element (tests).");
}

}  // namespace picaflor
