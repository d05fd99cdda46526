// The matrix kernels without Python, for sanitizer builds: every format, odd shapes, planes that end 64 bytes before
// their memory does. All tables must give the scalar table's bits and read no byte beyond the slack.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "cpu/expert_ffn.h"
#include "cpu/kernels.h"
#include "cpu/kernels_layout.h"

namespace {

using namespace picaflor;

int failures = 0;

void expect(bool good, const char* what, const Weight& w, const char* isa) {
  if (!good) {
    std::printf("%s: %s, format %d, [%lld, %lld], group %d\n", isa, what, static_cast<int>(w.format),
                static_cast<long long>(w.rows), static_cast<long long>(w.cols), w.group);
    ++failures;
  }
}

// A plane of exactly `nbytes` and the slack that the contract grants, on the heap so that sanitizers see its end.
std::unique_ptr<uint8_t[]> plane(int64_t nbytes, std::mt19937& random) {
  auto memory = std::make_unique<uint8_t[]>(static_cast<size_t>(nbytes) + 64);
  for (int64_t i = 0; i < nbytes + 64; ++i) {
    memory[static_cast<size_t>(i)] = static_cast<uint8_t>(random());
  }
  return memory;
}

struct Matrix {
  Weight weight;
  std::unique_ptr<uint8_t[]> codes, scales;
};

// Finite values everywhere: floats are small, exponents of mxfp4 near 127, halves without infinities.
Matrix matrix(FormatId format, int64_t rows, int64_t cols, int32_t group, std::mt19937& random) {
  Matrix m;
  m.weight.format = format;
  m.weight.rows = rows;
  m.weight.cols = cols;
  m.weight.group = group;
  const int64_t codes = plane_bytes(m.weight, 0);
  const int64_t scales = plane_bytes(m.weight, 1);
  m.codes = plane(codes, random);
  m.scales = plane(scales, random);
  std::uniform_real_distribution<float> value(0.01f, 1.0f);
  const auto floats = [&](uint8_t* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float f = value(random);
      std::memcpy(out + 4 * i, &f, 4);
    }
  };
  if (format == FormatId::f32) {
    floats(m.codes.get(), rows * cols);
  } else if (format == FormatId::bf16 || format == FormatId::f16 || format == FormatId::fp8_b128) {
    const int64_t step = format == FormatId::fp8_b128 ? 1 : 2;
    for (int64_t i = step - 1; i < codes; i += step) {
      m.codes[static_cast<size_t>(i)] &= 0xBB;
    }
  } else if (format == FormatId::e8_iq3) {
    for (int64_t i = 97; i < codes; i += 98) {
      m.codes[static_cast<size_t>(i)] &= 0xBB;
    }
  }
  if (format == FormatId::mxfp4) {
    for (int64_t i = 0; i < scales; ++i) {
      m.scales[static_cast<size_t>(i)] = static_cast<uint8_t>(120 + random() % 12);
    }
  } else {
    floats(m.scales.get(), scales / 4);
  }
  m.weight.codes = m.codes.get();
  m.weight.scales = scales > 0 ? m.scales.get() : nullptr;
  check_weight(m.weight);
  return m;
}

struct Bytes {
  explicit Bytes(int64_t nbytes)
      : data(static_cast<std::byte*>(::operator new(static_cast<size_t>(nbytes), std::align_val_t{64}))) {}
  ~Bytes() { ::operator delete(data, std::align_val_t{64}); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  std::byte* data;
};

std::vector<float> product(const KernelTable& table, const Weight& w, int32_t planes, const std::vector<float>& x,
                           int64_t n) {
  const XSpec spec = x_spec(w, planes);
  const Bytes prepared(n * x_stride(spec));
  for (int64_t s = 0; s < n; ++s) {
    table.prepare_x(spec, x.data() + s * w.cols, prepared.data + s * x_stride(spec));
  }
  std::vector<float> y(static_cast<size_t>(n * w.rows));
  table.matmul(w, spec, prepared.data, n, y.data(), w.rows, 0, w.rows, {&w, 0, w.rows});
  return y;
}

void test_products() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const int64_t shapes[][2] = {{1, 1}, {3, 31}, {17, 130}, {33, 515}, {18, 800}};
  for (int32_t format = 0; format < kFormatCount; ++format) {
    for (const auto& shape : shapes) {
      for (const int32_t group : kInt4GroupSizes) {
        const auto id = static_cast<FormatId>(format);
        if (id != FormatId::int4_grouped && group != kInt4GroupSizes[0]) {
          continue;
        }
        const Matrix m = matrix(id, shape[0], shape[1], group, random);
        std::vector<float> x(static_cast<size_t>(13 * shape[1]));
        for (float& value : x) {
          value = normal(random);
        }
        for (const int64_t n : {int64_t{1}, int64_t{2}, int64_t{5}, int64_t{8}, int64_t{13}}) {
          for (int32_t planes = 1; planes <= 3; ++planes) {
            const std::vector<float> expected = product(*scalar_kernels(), m.weight, planes, x, n);
            for (const KernelTable* table : kernel_tables()) {
              const std::vector<float> got = product(*table, m.weight, planes, x, n);
              const bool same = std::memcmp(got.data(), expected.data(), got.size() * 4) == 0;
              expect(same && std::isfinite(got[0]), "product", m.weight, table->isa);
            }
          }
        }
        std::vector<float> expected(static_cast<size_t>(shape[1]));
        std::vector<float> row(expected.size());
        scalar_kernels()->decode_row(m.weight, shape[0] - 1, expected.data());
        for (const std::string& isa : kernel_isas()) {
          kernels_for(isa)->decode_row(m.weight, shape[0] - 1, row.data());
          expect(std::memcmp(row.data(), expected.data(), row.size() * 4) == 0, "decode", m.weight, isa.c_str());
        }
      }
    }
  }
}

void test_experts() {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  constexpr int64_t kHidden = 70, kInner = 37, kRows = 9, kTopK = 2;
  constexpr int32_t kExperts = 3;
  const Matrix gate = matrix(FormatId::int4_grouped, kInner, kHidden, 32, random);
  const Matrix up = matrix(FormatId::int8_row, kInner, kHidden, 0, random);
  const Matrix down = matrix(FormatId::mxfp4, kHidden, kInner, 0, random);
  SlotLayout layout;
  std::vector<uint8_t> slot;
  const auto put = [&](const Matrix& m, SlotMatrix& out) {
    out = {m.weight.format, m.weight.rows, m.weight.cols, m.weight.group, static_cast<int64_t>(slot.size()), 0};
    slot.insert(slot.end(), m.codes.get(), m.codes.get() + plane_bytes(m.weight, 0));
    out.scales = static_cast<int64_t>(slot.size());
    slot.insert(slot.end(), m.scales.get(), m.scales.get() + plane_bytes(m.weight, 1));
  };
  put(gate, layout.gate);
  put(up, layout.up);
  put(down, layout.down);
  slot.resize(slot.size() + 64);
  std::vector<float> x(kRows * kHidden), weights(kRows * kTopK), expected(kRows * kHidden), out(kRows * kHidden);
  std::vector<int32_t> ids(kRows * kTopK);
  for (float& value : x) {
    value = normal(random);
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>((i / kTopK + i % kTopK) % kExperts);
    weights[i] = normal(random);
  }
  for (const std::string& isa : kernel_isas()) {
    for (int threads = 1; threads <= 3; ++threads) {
      ExpertFfn ffn(std::make_shared<Pool>(threads), kernels_for(isa), {2, kHidden, kInner, kRows, kTopK});
      const int32_t layer = ffn.add_layer(std::vector<SlotLayout>(kExperts, layout));
      const std::vector<int32_t> distinct = ffn.begin(layer, x.data(), kHidden, ids.data(), kRows);
      const std::vector<uint64_t> addresses(distinct.size(), reinterpret_cast<uint64_t>(slot.data()));
      ffn.run(distinct.data(), addresses.data(), static_cast<int64_t>(distinct.size()));
      ffn.finish(weights.data(), out.data(), kHidden);
      if (isa == "scalar" && threads == 1) {
        expected = out;
      }
      expect(std::memcmp(out.data(), expected.data(), out.size() * 4) == 0 && std::isfinite(out[0]), "experts",
             down.weight, isa.c_str());
    }
  }
}

}  // namespace

int main() {
  test_products();
  test_experts();
  std::printf(failures == 0 ? "kernels: all equal\n" : "kernels: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
