// Pool, stages and float operations in C++, for runs under sanitizers: results against plain loops, every table equal.
// Must not know programs or Python.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpu/ops.h"
#include "cpu/pool.h"

namespace {

using namespace picaflor;

int failures = 0;

void expect(bool right, const char* what) {
  if (!right) {
    std::printf("FAILED: %s\n", what);
    ++failures;
  }
}

std::vector<const OpsTable*> tables() {
  std::vector<const OpsTable*> found{scalar_ops()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && avx2_ops() != nullptr) {
    found.push_back(avx2_ops());
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni") && avx512_ops() != nullptr) {
    found.push_back(avx512_ops());
  }
#endif
  return found;
}

// Numbers that differ in size and sign, the same on every run. Exactly n values, so that a read behind them is seen.
std::vector<float> numbers(int64_t n, uint32_t seed) {
  std::vector<float> out;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    out.push_back(std::ldexp(static_cast<float>(static_cast<int32_t>(seed)), -31 + static_cast<int>(seed % 7)));
  }
  return out;
}

float chain(const float* a, const float* b, int64_t n) {
  float lanes[16] = {};
  for (int64_t i = 0; i < n; ++i) {
    lanes[i % 16] = std::fma(a[i], b[i], lanes[i % 16]);
  }
  for (int width = 8; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) {
      lanes[j] = lanes[j] + lanes[j + width];
    }
  }
  return lanes[0];
}

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void test_dots() {
  for (const OpsTable* ops : tables()) {
    for (int64_t n = 1; n <= 70; ++n) {
      const std::vector<float> w = numbers(7 * n, 3), x = numbers(n, 5);
      std::vector<float> out(7);
      ops->dot_rows(w.data(), n, 7, x.data(), n, out.data());
      for (int64_t row = 0; row < 7; ++row) {
        expect(same(out[static_cast<size_t>(row)], chain(w.data() + row * n, x.data(), n)), ops->isa);
      }
    }
  }
}

// A product that underflows to -0 must survive in its lane: adding +0 for missing lanes would lose it.
void test_negative_zero() {
  for (const OpsTable* ops : tables()) {
    std::vector<float> a(17, 0.0f), b(17, 0.0f);
    for (int i = 0; i < 16; ++i) {
      a[static_cast<size_t>(i)] = -1e-30f;
      b[static_cast<size_t>(i)] = 1e-30f;
    }
    float out = 1.0f;
    ops->dot_rows(a.data(), 17, 1, b.data(), 17, &out);
    expect(out == 0.0f && !std::signbit(out), "lane 0 was touched again and is +0");
    ops->dot_rows(a.data(), 16, 1, b.data(), 16, &out);
    expect(out == 0.0f && std::signbit(out), "all lanes are -0");
  }
}

// The same attention by every table, in memory that ends where the data ends.
void test_attention() {
  constexpr int64_t kKeys = 300, kHeads = 5, kWidth = 37, kRope = 6;
  const std::vector<float> keys = numbers(kKeys * kWidth, 1), rope = numbers(kKeys * kRope, 2);
  const std::vector<float> q = numbers(kHeads * kWidth, 3), q2 = numbers(kHeads * kRope, 4);
  std::vector<int32_t> pages;
  for (int32_t page = 0; page <= kKeys / 4; ++page) {
    pages.push_back(page);
  }
  std::vector<float> first;
  for (const OpsTable* ops : tables()) {
    std::vector<float> out(static_cast<size_t>(kHeads * kWidth));
    std::vector<float> scratch(static_cast<size_t>(attend_scratch(kHeads, kWidth)));
    Attend a;
    a.heads = kHeads;
    a.q = q.data();
    a.q_stride = kWidth;
    a.q2 = q2.data();
    a.q2_stride = kRope;
    a.keys = a.values = {keys.data(), kWidth, kWidth};
    a.keys2 = {rope.data(), kRope, kRope};
    a.scale = 0.125f;
    a.table = {pages.data(), 2};
    a.visible = kKeys;
    a.out = out.data();
    a.out_stride = kWidth;
    a.scratch = scratch.data();
    ops->attend(a);
    if (first.empty()) {
      first = out;
    }
    expect(std::memcmp(first.data(), out.data(), out.size() * sizeof(float)) == 0, "attention differs");
  }
}

void test_stages() {
  Pool pool(3);
  std::vector<Stage> stages(4);
  std::atomic<int64_t> sum{0};
  std::vector<int64_t> done(4);
  for (int round = 0; round < 2000; ++round) {
    for (Stage& stage : stages) {
      stage.reset(5);
    }
    std::atomic<int> finished[4] = {};
    std::atomic<bool> early{false};
    pool.run_open([&](int) {
      for (int i = 0; i < 4; ++i) {
        stages[static_cast<size_t>(i)].work([&](int64_t item) {
          early = early || (i > 0 && finished[i - 1].load() != 5);
          sum += item;
          ++finished[i];
        });
      }
    });
    expect(!early.load(), "an item ran before the stage in front of it was finished");
    expect(finished[3].load() == 5, "run_open came back before its items were finished");
  }
  expect(sum.load() == 2000 * 4 * 10, "every item runs once");
}

void test_failures() {
  Pool pool(3);
  std::vector<Stage> stages(3);
  for (int round = 0; round < 500; ++round) {
    for (Stage& stage : stages) {
      stage.reset(4);
    }
    bool caught = false;
    try {
      pool.run_open([&](int) {
        for (size_t i = 0; i < stages.size(); ++i) {
          stages[i].work([&](int64_t item) {
            if (i == 1 && item == round % 4) {
              throw std::runtime_error("item");
            }
          });
        }
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    expect(caught, "an exception of an item comes out");
    std::atomic<int> count{0};
    pool.run([&](int) {
      ++count;
      pool.barrier();
      if (count.load() != 3) {
        std::abort();
      }
    });
  }
}

void test_choices() {
  const std::vector<float> scores{1.0f, NAN, -0.0f, 0.0f, 1.0f, -2.0f};
  std::vector<uint32_t> scratch(scores.size());
  std::vector<int32_t> positions(4);
  choose_positions(scores.data(), 6, 4, scratch.data(), positions.data());
  expect(positions == std::vector<int32_t>({0, 2, 3, 4}), "positions");
  expect(argmax(scores.data(), 6) == 0, "argmax");
}

}  // namespace

int main() {
  test_dots();
  test_negative_zero();
  test_attention();
  test_stages();
  test_failures();
  test_choices();
  return failures == 0 ? 0 : 1;
}
