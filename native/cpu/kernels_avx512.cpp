// The matrix kernels compiled for AVX-512 VNNI.
// Must not know threads or Python.
// gcc 12 takes the undefined operands of its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "cpu/kernels_vector.h"

namespace picaflor {
namespace {

constexpr KernelTable kTable = {"avx512-base",  Isa::kLanes, prepare_row,  vector_matmul,
                                decode_any_row, sum_words,   silu_mul_row, add_scaled_row};

}  // namespace

const KernelTable* avx512_kernels() { return &kTable; }

}  // namespace picaflor
