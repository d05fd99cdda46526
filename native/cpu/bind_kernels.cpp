// Python's view of the matrix kernels: for tests, benchmarks and the expert operation of backends/cpu.
// Addresses come in as integers; whoever passes them owns the memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/expert_ffn.h"
#include "cpu/kernels.h"
#include "cpu/kernels_bench.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace picaflor {

void bind_kernels(nb::module_& module);

namespace {

using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Memory at a multiple of 64 bytes.
class Aligned {
 public:
  explicit Aligned(int64_t nbytes)
      : data_(static_cast<std::byte*>(::operator new(static_cast<size_t>(nbytes) + 64, std::align_val_t{64}))) {}
  ~Aligned() { ::operator delete(data_, std::align_val_t{64}); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  std::byte* data() { return data_; }

 private:
  std::byte* data_;
};

template <class T>
nb::ndarray<nb::numpy, T> owned(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

void check_plane(const Weight& weight, int plane, int64_t nbytes) {
  const int64_t needed = plane_bytes(weight, plane);
  if (nbytes < needed) {
    throw std::invalid_argument("plane " + std::to_string(plane) + " has " + std::to_string(nbytes) + " bytes, needs " +
                                std::to_string(needed));
  }
}

void make_weight(Weight* self, int32_t format, int64_t rows, int64_t cols, int32_t group, uint64_t codes,
                 int64_t codes_bytes, uint64_t scales, int64_t scales_bytes) {
  Weight weight;
  weight.format = static_cast<FormatId>(format);
  weight.rows = rows;
  weight.cols = cols;
  weight.group = group;
  weight.codes = reinterpret_cast<const uint8_t*>(codes);
  weight.scales = reinterpret_cast<const uint8_t*>(scales);
  check_weight(weight);
  check_plane(weight, 0, codes_bytes);
  check_plane(weight, 1, scales_bytes);
  new (self) Weight(weight);
}

void check_planes(int32_t planes) {
  if (planes < 1 || planes > 3) {
    throw std::invalid_argument("planes is " + std::to_string(planes) + ", must be 1, 2 or 3");
  }
}

void prepare_rows(const KernelTable& kernels, const XSpec& spec, const FloatTable& x, std::byte* out) {
  if (static_cast<int64_t>(x.shape(1)) != spec.cols) {
    throw std::invalid_argument("x has rows of " + std::to_string(x.shape(1)) + " values, the weight needs " +
                                std::to_string(spec.cols));
  }
  for (size_t s = 0; s < x.shape(0); ++s) {
    kernels.prepare_x(spec, x.data() + s * x.shape(1), out + static_cast<int64_t>(s) * x_stride(spec));
  }
}

nb::ndarray<nb::numpy, uint8_t> prepare(const std::string& isa, const Weight& weight, int32_t planes,
                                        const FloatTable& x) {
  check_planes(planes);
  const XSpec spec = x_spec(weight, planes);
  const int64_t nbytes = x_stride(spec) * static_cast<int64_t>(x.shape(0));
  Aligned prepared(nbytes);
  prepare_rows(*kernels_for(isa), spec, x, prepared.data());
  const auto* begin = reinterpret_cast<const uint8_t*>(prepared.data());
  return owned(std::vector<uint8_t>(begin, begin + nbytes), {x.shape(0), static_cast<size_t>(x_stride(spec))});
}

nb::ndarray<nb::numpy, float> matmul(const std::string& isa, const Weight& weight, int32_t planes, const FloatTable& x,
                                     int64_t row_begin, int64_t row_end) {
  check_planes(planes);
  if (row_begin < 0 || row_begin > row_end || row_end > weight.rows) {
    throw std::invalid_argument("rows " + std::to_string(row_begin) + " to " + std::to_string(row_end) +
                                " are not within 0 to " + std::to_string(weight.rows));
  }
  const KernelTable* kernels = kernels_for(isa);
  const XSpec spec = x_spec(weight, planes);
  const auto n = static_cast<int64_t>(x.shape(0));
  Aligned prepared(x_stride(spec) * n);
  prepare_rows(*kernels, spec, x, prepared.data());
  std::vector<float> y(static_cast<size_t>(n * weight.rows));
  {
    const nb::gil_scoped_release release;
    kernels->matmul(weight, spec, prepared.data(), n, y.data(), weight.rows, row_begin, row_end, {});
  }
  return owned(std::move(y), {x.shape(0), static_cast<size_t>(weight.rows)});
}

nb::ndarray<nb::numpy, float> decode_row(const std::string& isa, const Weight& weight, int64_t row) {
  if (row < 0 || row >= weight.rows) {
    throw std::invalid_argument("row " + std::to_string(row) + " of a weight with " + std::to_string(weight.rows));
  }
  std::vector<float> out(static_cast<size_t>(weight.cols));
  kernels_for(isa)->decode_row(weight, row, out.data());
  return owned(std::move(out), {static_cast<size_t>(weight.cols)});
}

std::pair<double, double> bench_read(const std::string& isa, const std::vector<Weight>& weights, int threads) {
  const KernelTable* kernels = kernels_for(isa);
  const nb::gil_scoped_release release;
  const PassTime time = read_pass(*kernels, weights, threads);
  return {time.wall_s, time.cpu_s};
}

void check_alike(const std::vector<Weight>& weights) {
  if (weights.empty()) {
    throw std::invalid_argument("no weights to time");
  }
  for (const Weight& weight : weights) {
    if (weight.format != weights.front().format || weight.rows != weights.front().rows ||
        weight.cols != weights.front().cols || weight.group != weights.front().group) {
      throw std::invalid_argument("weights of different formats or shapes cannot be timed together");
    }
  }
}

std::pair<double, double> bench_matmul(const std::string& isa, const std::vector<Weight>& weights, int32_t planes,
                                       const FloatTable& x, int threads) {
  check_planes(planes);
  check_alike(weights);
  const KernelTable* kernels = kernels_for(isa);
  const XSpec spec = x_spec(weights.front(), planes);
  const auto n = static_cast<int64_t>(x.shape(0));
  Aligned prepared(x_stride(spec) * n);
  prepare_rows(*kernels, spec, x, prepared.data());
  const nb::gil_scoped_release release;
  const PassTime time = matmul_pass(*kernels, weights, spec, prepared.data(), n, threads);
  return {time.wall_s, time.cpu_s};
}

std::pair<double, double> bench_program(const std::string& isa, const std::vector<Weight>& weights, int32_t planes,
                                        const FloatTable& x, Pool& pool) {
  check_planes(planes);
  check_alike(weights);
  const KernelTable* kernels = kernels_for(isa);
  const XSpec spec = x_spec(weights.front(), planes);
  const auto n = static_cast<int64_t>(x.shape(0));
  Aligned prepared(x_stride(spec) * n);
  prepare_rows(*kernels, spec, x, prepared.data());  // checks the sizes
  const nb::gil_scoped_release release;
  const PassTime time = program_pass(*kernels, weights, spec, x.data(), prepared.data(), n, pool);
  return {time.wall_s, time.cpu_s};
}

// (wall, CPU) seconds of `count` additions per thread that each wait for the one before.
std::pair<double, double> bench_clock(int64_t count, int threads) {
  if (threads < 1 || count < 1) {
    throw std::invalid_argument("count and threads must be 1 or more");
  }
  const nb::gil_scoped_release release;
  const PassTime time = clock_pass(count, threads);
  return {time.wall_s, time.cpu_s};
}

// Rows x [n] at an address, prepared at another (a multiple of 64), products y [n][rows] at a third: for tests that
// place each at the edge of readable memory. Whoever passes addresses answers for their sizes.
void matmul_at(const std::string& isa, const Weight& weight, int32_t planes, uint64_t x, uint64_t prepared, uint64_t y,
               int64_t n) {
  check_planes(planes);
  if (prepared % 64 != 0) {
    throw std::invalid_argument("prepared rows must start at a multiple of 64");
  }
  const KernelTable* kernels = kernels_for(isa);
  const XSpec spec = x_spec(weight, planes);
  auto* out = reinterpret_cast<std::byte*>(prepared);
  const nb::gil_scoped_release release;
  for (int64_t s = 0; s < n; ++s) {
    kernels->prepare_x(spec, reinterpret_cast<const float*>(x) + s * weight.cols, out + s * x_stride(spec));
  }
  kernels->matmul(weight, spec, out, n, reinterpret_cast<float*>(y), weight.rows, 0, weight.rows, {});
}

void decode_row_at(const std::string& isa, const Weight& weight, int64_t row, uint64_t out) {
  if (row < 0 || row >= weight.rows) {
    throw std::invalid_argument("row " + std::to_string(row) + " of a weight with " + std::to_string(weight.rows));
  }
  kernels_for(isa)->decode_row(weight, row, reinterpret_cast<float*>(out));
}

// Seconds per preparation of one row, over `repeats`.
double bench_prepare(const std::string& isa, const Weight& weight, int32_t planes, const FloatTable& x, int repeats) {
  check_planes(planes);
  const KernelTable* kernels = kernels_for(isa);
  const XSpec spec = x_spec(weight, planes);
  Aligned prepared(x_stride(spec) * static_cast<int64_t>(x.shape(0)));
  return prepare_seconds(*kernels, spec, x.data(), prepared.data(), repeats);
}

// (format, rows, cols, group size, offset in bytes of each plane)
using MatrixTuple = std::tuple<int32_t, int64_t, int64_t, int32_t, std::vector<int64_t>>;
using IntList = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AddressList = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

SlotMatrix slot_matrix(const MatrixTuple& tuple) {
  const auto& [format, rows, cols, group, offsets] = tuple;
  if (offsets.empty() || offsets.size() > 2) {
    throw std::invalid_argument("an expert matrix has " + std::to_string(offsets.size()) + " planes, needs 1 or 2");
  }
  return {static_cast<FormatId>(format), rows, cols, group, offsets[0], offsets.size() > 1 ? offsets[1] : 0};
}

int32_t add_layer(ExpertFfn& ffn, const std::vector<std::vector<MatrixTuple>>& experts) {
  std::vector<SlotLayout> layouts;
  for (const std::vector<MatrixTuple>& expert : experts) {
    if (expert.size() != 3) {
      throw std::invalid_argument("an expert has " + std::to_string(expert.size()) + " matrices, needs 3");
    }
    layouts.push_back({slot_matrix(expert[0]), slot_matrix(expert[1]), slot_matrix(expert[2])});
  }
  return ffn.add_layer(layouts);
}

nb::ndarray<nb::numpy, int32_t> begin_experts(ExpertFfn& ffn, int32_t layer, uint64_t x, int64_t x_stride, uint64_t ids,
                                              int64_t rows) {
  std::vector<int32_t> distinct =
      ffn.begin(layer, reinterpret_cast<const float*>(x), x_stride, reinterpret_cast<const int32_t*>(ids), rows);
  const size_t count = distinct.size();
  return owned(std::move(distinct), {count});
}

void run_experts(ExpertFfn& ffn, const IntList& ids, const AddressList& addresses) {
  if (ids.shape(0) != addresses.shape(0)) {
    throw std::invalid_argument(std::to_string(ids.shape(0)) + " expert ids with " +
                                std::to_string(addresses.shape(0)) + " addresses");
  }
  const nb::gil_scoped_release release;
  ffn.run(ids.data(), addresses.data(), static_cast<int64_t>(ids.shape(0)));
}

void bind_experts(nb::module_& module) {
  nb::class_<ExpertFfn>(module, "ExpertFfn")
      .def(
          "__init__",
          [](ExpertFfn* self, std::shared_ptr<Pool> pool, const std::string& isa, int32_t planes, int64_t hidden,
             int64_t inner_max, int64_t max_rows, int64_t top_k) {
            new (self)
                ExpertFfn(std::move(pool), kernels_for(isa), ExpertSizes{planes, hidden, inner_max, max_rows, top_k});
          },
          "pool"_a, "isa"_a, "planes"_a, "hidden"_a, "inner_max"_a, "max_rows"_a, "top_k"_a)
      .def("add_layer", add_layer, "experts"_a, "The layer's number; per expert gate, up and down as tuples.")
      .def("begin", begin_experts, "layer"_a, "x"_a, "x_stride"_a, "ids"_a, "rows"_a,
           "Distinct expert ids of the rows, in order of first use.")
      .def("run", run_experts, "ids"_a, "addresses"_a)
      .def(
          "finish",
          [](ExpertFfn& ffn, uint64_t weights, uint64_t out, int64_t out_stride) {
            const nb::gil_scoped_release release;
            ffn.finish(reinterpret_cast<const float*>(weights), reinterpret_cast<float*>(out), out_stride);
          },
          "weights"_a, "out"_a, "out_stride"_a)
      .def(
          "pairs",
          [](ExpertFfn& ffn, uint64_t out) {
            const nb::gil_scoped_release release;
            ffn.pairs(reinterpret_cast<float*>(out));
          },
          "out"_a, "Instead of finish: the single rows of chosen pairs, out [rows][top_k][hidden].")
      .def(
          "use", [](ExpertFfn& ffn, const std::string& isa) { ffn.use(kernels_for(isa)); }, "isa"_a,
          "The instruction set of the next begin, run or finish.")
      .def_prop_ro("workspace_bytes", &ExpertFfn::workspace_bytes)
      .def_prop_ro("row_bytes", &ExpertFfn::row_bytes)
      .def("limit_rows", &ExpertFfn::limit_rows, "rows"_a);
}

}  // namespace

void bind_kernels(nb::module_& module) {
  bind_experts(module);
  nb::class_<Weight>(module, "Weight")
      .def("__init__", make_weight, "format"_a, "rows"_a, "cols"_a, nb::kw_only(), "group"_a, "codes"_a,
           "codes_bytes"_a, "scales"_a, "scales_bytes"_a)
      .def_ro("rows", &Weight::rows)
      .def_ro("cols", &Weight::cols);
  module.def("kernel_isas", kernel_isas, "Instruction sets that can be chosen here, slowest first.");
  module.def(
      "check_isa", [](const std::string& isa) { return std::string(kernels_for(isa)->isa); }, "isa"_a,
      "The name of the table that `isa` (or auto) means here; ValueError names what there is.");
  module.def("prepare", prepare, "isa"_a, "weight"_a, "planes"_a, "x"_a);
  module.def("matmul", matmul, "isa"_a, "weight"_a, "planes"_a, "x"_a, "row_begin"_a, "row_end"_a);
  module.def("decode_row", decode_row, "isa"_a, "weight"_a, "row"_a);
  module.def("bench_read", bench_read, "isa"_a, "weights"_a, "threads"_a);
  module.def("bench_matmul", bench_matmul, "isa"_a, "weights"_a, "planes"_a, "x"_a, "threads"_a);
  module.def("bench_program", bench_program, "isa"_a, "weights"_a, "planes"_a, "x"_a, "pool"_a);
  module.def("bench_clock", bench_clock, "count"_a, "threads"_a);
  module.def("matmul_at", matmul_at, "isa"_a, "weight"_a, "planes"_a, "x"_a, "prepared"_a, "y"_a, "n"_a);
  module.def("decode_row_at", decode_row_at, "isa"_a, "weight"_a, "row"_a, "out"_a);
  module.def(
      "prepared_bytes",
      [](const Weight& weight, int32_t planes) {
        check_planes(planes);
        return x_stride(x_spec(weight, planes));
      },
      "weight"_a, "planes"_a, "Of one row.");
  module.def("bench_prepare", bench_prepare, "isa"_a, "weight"_a, "planes"_a, "x"_a, "repeats"_a);
}

}  // namespace picaflor
