// The matrix kernels compiled for NEON with dot products.
// Must not know threads or Python.
#include "cpu/kernels_vector.h"

namespace picaflor {
namespace {

constexpr KernelTable kTable = {"neon",         Isa::kLanes, prepare_row,  vector_matmul,
                                decode_any_row, sum_words,   silu_mul_row, add_scaled_row};

}  // namespace

const KernelTable* neon_kernels() { return &kTable; }

}  // namespace picaflor
