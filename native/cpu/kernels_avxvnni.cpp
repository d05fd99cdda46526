// The matrix kernels compiled for AVX-VNNI: registers of AVX2, dot products of four bytes.
// Must not know threads or Python.
#include "cpu/kernels_vector.h"

namespace picaflor {
namespace {

constexpr KernelTable kTable = {"avxvnni",      Isa::kLanes, prepare_row,  vector_matmul,
                                decode_any_row, sum_words,   silu_mul_row, add_scaled_row};

}  // namespace

const KernelTable* avxvnni_kernels() { return &kTable; }

}  // namespace picaflor
