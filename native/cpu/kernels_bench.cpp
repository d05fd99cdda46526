// Timed passes: threads take ranges of rows from one counter.
// Must not know Python.
#include "cpu/kernels_bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <functional>
#include <thread>

#include "cpu/kernels_layout.h"

namespace picaflor {
namespace {

constexpr int64_t kRowsPerItem = 256;

double process_cpu_s() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The compiler knows nothing of the value after this; costs no instruction.
inline void keep(uint64_t& value) { asm volatile("" : "+r"(value)); }

// body(thread) on all threads at once; the time from the moment when all have started.
PassTime timed(int threads, const std::function<void(int)>& body) {
  std::atomic<int> waiting{threads};
  const auto start = [&](int thread) {
    waiting.fetch_sub(1);
    while (waiting.load() > 0) {
      std::this_thread::yield();
    }
    body(thread);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back(start, thread);
  }
  while (waiting.load() > 1) {
    std::this_thread::yield();
  }
  const double cpu = process_cpu_s();
  const auto wall = std::chrono::steady_clock::now();
  start(0);
  for (std::thread& other : others) {
    other.join();
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - wall;
  return {passed.count(), process_cpu_s() - cpu};
}

struct Item {
  const Weight* weight;
  int64_t begin;
  int64_t end;
};

std::vector<Item> items_of(const std::vector<Weight>& weights) {
  std::vector<Item> items;
  for (const Weight& weight : weights) {
    for (int64_t row = 0; row < weight.rows; row += kRowsPerItem) {
      items.push_back({&weight, row, std::min(row + kRowsPerItem, weight.rows)});
    }
  }
  return items;
}

}  // namespace

PassTime read_pass(const KernelTable& kernels, const std::vector<Weight>& weights, int threads) {
  const std::vector<Item> items = items_of(weights);
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> sink{0};
  return timed(threads, [&](int) {
    uint64_t sum = 0;
    for (size_t i = next.fetch_add(1); i < items.size(); i = next.fetch_add(1)) {
      const Item& item = items[i];
      for (int plane = 0; plane < 2; ++plane) {
        const uint8_t* data = plane == 0 ? item.weight->codes : item.weight->scales;
        const int64_t bytes = plane_bytes(*item.weight, plane);
        const int64_t begin = bytes * item.begin / item.weight->rows;
        const int64_t end = bytes * item.end / item.weight->rows;
        sum += kernels.read_all(reinterpret_cast<const std::byte*>(data + begin), end - begin);
      }
    }
    sink.fetch_add(sum);
  });
}

PassTime matmul_pass(const KernelTable& kernels, const std::vector<Weight>& weights, const XSpec& spec,
                     const std::byte* x, int64_t n, int threads) {
  const std::vector<Item> items = items_of(weights);
  const int64_t rows = weights.front().rows;
  std::vector<float> y(static_cast<size_t>(rows * n));
  std::atomic<size_t> next{0};
  return timed(threads, [&](int) {
    for (size_t i = next.fetch_add(1); i < items.size(); i = next.fetch_add(1)) {
      const Item& item = items[i];
      Ahead ahead;
      if (i + static_cast<size_t>(threads) < items.size()) {
        const Item& later = items[i + static_cast<size_t>(threads)];
        ahead = {later.weight, later.begin, later.end};
      }
      kernels.matmul(*item.weight, spec, x, n, y.data(), rows, item.begin, item.end, ahead);
    }
  });
}

PassTime program_pass(const KernelTable& kernels, const std::vector<Weight>& weights, const XSpec& spec, const float* x,
                      std::byte* prepared, int64_t n, Pool& pool) {
  const std::vector<Item> items = items_of(weights);
  const int64_t rows = weights.front().rows;
  const auto per_weight = static_cast<int64_t>(items.size() / weights.size());
  std::vector<float> y(static_cast<size_t>(rows * n));
  std::vector<Stage> preparing(weights.size());
  std::vector<Stage> multiplying(weights.size());
  for (size_t w = 0; w < weights.size(); ++w) {
    preparing[w].reset(n);
    multiplying[w].reset(per_weight);
  }
  const auto pass = [&](int) {
    for (size_t w = 0; w < weights.size(); ++w) {
      preparing[w].work([&](int64_t s) { kernels.prepare_x(spec, x + s * spec.cols, prepared + s * x_stride(spec)); });
      multiplying[w].work([&](int64_t i) {
        const size_t at = w * static_cast<size_t>(per_weight) + static_cast<size_t>(i);
        const Item& item = items[at];
        Ahead ahead;
        const size_t later = at + static_cast<size_t>(pool.threads());
        if (later < items.size()) {
          ahead = {items[later].weight, items[later].begin, items[later].end};
        }
        kernels.matmul(*item.weight, spec, prepared, n, y.data(), rows, item.begin, item.end, ahead);
      });
    }
  };
  const double cpu = process_cpu_s();
  const auto wall = std::chrono::steady_clock::now();
  pool.run_open(pass);
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - wall;
  return {passed.count(), process_cpu_s() - cpu};
}

PassTime clock_pass(int64_t count, int threads) {
  constexpr int64_t kUnrolled = 32;
  return timed(threads, [count](int) {
    uint64_t sum = 0;
    uint64_t step = 3;
    keep(step);
    for (int64_t i = 0; i < count; i += kUnrolled) {
#pragma GCC unroll 32
      for (int64_t j = 0; j < kUnrolled; ++j) {
        sum += step;
        keep(sum);
      }
    }
  });
}

double prepare_seconds(const KernelTable& kernels, const XSpec& spec, const float* x, std::byte* out, int repeats) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    kernels.prepare_x(spec, x, out);
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  return passed.count() / repeats;
}

}  // namespace picaflor
