// Timed passes over many matrices: the kernels against the plain-load read limit of the same memory.
// Must not know Python.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

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

// Seconds per prepare_x of one row, mean over `repeats`.
double prepare_seconds(const KernelTable& kernels, const XSpec& spec, const float* x, std::byte* out, int repeats);

}  // namespace picaflor
