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

double prepare_seconds(const KernelTable& kernels, const XSpec& spec, const float* x, std::byte* out, int repeats) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    kernels.prepare_x(spec, x, out);
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  return passed.count() / repeats;
}

}  // namespace picaflor
