// The matrix kernels of one instruction set, as a table of functions. Every table computes the same bits.
// Must not know threads, programs or Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/weight.h"

namespace picaflor {

// The activations that `weight` wants at this precision (planes 1 fast, 2 standard, 3 exact); floats for float formats.
XSpec x_spec(const Weight& weight, int32_t planes);

// Bytes of `n` prepared rows; the layout is the same for every instruction set, rows `x_stride` bytes apart.
int64_t x_stride(const XSpec& spec);

// A run of weight bytes that will be needed next; kernels prefetch it while they work. May be empty.
struct Ahead {
  const Weight* weight = nullptr;
  int64_t row_begin = 0;
  int64_t row_end = 0;
};

struct KernelTable {
  const char* isa;
  int64_t tile_rows;  // output rows per natural tile; ranges given to matmul should be multiples of it where possible

  // Prepare one row x[spec.cols] into out (x_stride(spec) bytes, 64-byte aligned). For float specs: a padded copy.
  void (*prepare_x)(const XSpec& spec, const float* x, std::byte* out);

  // y[s * y_stride + o] = row o of W times prepared row s, for o in [row_begin, row_end) and s in [0, n).
  void (*matmul)(const Weight& weight, const XSpec& spec, const std::byte* x, int64_t n, float* y, int64_t y_stride,
                 int64_t row_begin, int64_t row_end, const Ahead& ahead);

  // out[cols] = decoded row, each value float(code) * scale rounded once. For e8 the row as stored, rotated.
  void (*decode_row)(const Weight& weight, int64_t row, float* out);

  // Sum of 64-bit words: the plain-load read limit of this core (bench kernels).
  uint64_t (*read_all)(const std::byte* data, int64_t nbytes);

  // out[i] = silu(gate[i]) * up[i]; out may be gate.
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t n);

  // out[i] = fma(factor, x[i], out[i]).
  void (*add_scaled)(float factor, const float* x, float* out, int64_t n);
};

// Throws std::invalid_argument where format, shape, group size or addresses cannot be a matrix.
void check_weight(const Weight& weight);

// Exact bytes of a plane (0 codes, 1 scales) as the kernels read it.
int64_t plane_bytes(const Weight& weight, int plane);

// The tables that this build has and this machine runs, slowest first; and the names of their instruction sets.
std::vector<const KernelTable*> kernel_tables();
std::vector<std::string> kernel_isas();

// With VBMI and GFNI; kernels_for takes it for the table without them where those are missing.
inline constexpr const char* kAvx512 = "avx512";

// The table of one of them; "auto" is the fastest. Throws std::invalid_argument naming what there is.
const KernelTable* kernels_for(const std::string& isa);

const KernelTable* scalar_kernels();
const KernelTable* avx2_kernels();     // null where this build has none, as all that follow
const KernelTable* avxvnni_kernels();  // AVX2 with dot products of bytes
const KernelTable* avx512_kernels();   // with VNNI
const KernelTable* vbmi_kernels();     // AVX-512 with VBMI and GFNI as well
const KernelTable* neon_kernels();

}  // namespace picaflor
