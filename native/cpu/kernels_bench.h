// Timed passes over many matrices: the kernels against the plain-load read limit of the same memory.
// Must not know Python.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pool.h"

namespace picaflor {

struct PassTime {
  double wall_s = 0.0;
  double cpu_s = 0.0;  // of the whole process
};

// Read every plane of every matrix once, with plain loads.
PassTime read_pass(const KernelTable& kernels, const std::vector<Weight>& weights, int threads);

// y = W x for every matrix, all of one shape and format, with n prepared rows.
PassTime matmul_pass(const KernelTable& kernels, const std::vector<Weight>& weights, const XSpec& spec,
                     const std::byte* x, int64_t n, int threads);

// The same with float rows x [n][cols] as a program does it: per matrix the rows are prepared by all threads of the
// pool, then multiplied, and the next matrix waits for both. `prepared` has n rows.
PassTime program_pass(const KernelTable& kernels, const std::vector<Weight>& weights, const XSpec& spec, const float* x,
                      std::byte* prepared, int64_t n, Pool& pool);

// Additions that each wait for the one before, on all threads at once: one per clock. Adds `count` per thread.
PassTime clock_pass(int64_t count, int threads);

// Seconds per prepare_x of one row, mean over `repeats`.
double prepare_seconds(const KernelTable& kernels, const XSpec& spec, const float* x, std::byte* out, int repeats);

}  // namespace picaflor
