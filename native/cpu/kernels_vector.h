// The matmul of a vector instruction set: which loop computes which format and number of rows.
// Must not know threads or Python. Compiled for AVX2, AVX-VNNI and AVX-512 VNNI.
#pragma once

#include "cpu/kernels_gemv.h"
#if defined(__AVX512F__)
#include "cpu/kernels_linear.h"
#endif
#include "cpu/kernels_prepare.h"
#include "cpu/kernels_rows.h"
#include "cpu/kernels_tile.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

constexpr int64_t kPassRows = 32;    // weight rows that stay in cache for a second pass
constexpr int64_t kFewestTile = 12;  // from here on unpacked columns win

inline void vector_matmul(const Weight& w, const XSpec& spec, const std::byte* x, int64_t n, float* y, int64_t y_stride,
                          int64_t row_begin, int64_t row_end, const Ahead& ahead) {
  if (n <= 0 || row_begin >= row_end || matmul_floats(w, x, n, y, y_stride, row_begin, row_end)) {
    return;
  }
  const Product all{w, spec, x, n, y, y_stride, row_begin, row_end, ahead};
  if (n >= kFewestTile || find_gemv(w.format, spec, 1) == nullptr) {
    tile_matmul(all);
    return;
  }
#if defined(__AVX512F__)
  if (const LinearFn linear = n == 1 ? find_linear(w.format, spec) : nullptr; linear != nullptr) {
    return linear(all);
  }
#endif
  const int64_t stride = x_stride(spec);
  const int64_t step = gemv_rows(n) == n ? row_end - row_begin : kPassRows;
  for (int64_t row = row_begin; row < row_end; row += step) {
    const int64_t end = std::min(row + step, row_end);
    int64_t count = 0;
    for (int64_t s = 0; s < n; s += count) {
      count = gemv_rows(n - s);
      find_gemv(w.format, spec,
                count)(Product{w, spec, x + s * stride, count, y + s * y_stride, y_stride, row, end, ahead});
    }
  }
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
