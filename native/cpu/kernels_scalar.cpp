// The matrix kernels in plain C++: the definition that every other table must equal, bit for bit.
// Must not know vectors, threads or Python.
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/kernels_prepare.h"
#include "cpu/kernels_rows.h"

namespace picaflor {
namespace {

// Signed codes of a group in the digits' order, from input `begin`; zeros need not follow, the digits there are zero.
void group_codes(const Weight& w, int64_t row, const XSpec& spec, int64_t begin, int64_t count, int16_t* out) {
  uint8_t codes[kMaxGroup];
  decode_codes(w.format, w.codes + row * row_bytes(w), begin, count, codes);
  const auto offset = static_cast<int16_t>(code_offset(w.format));
  for (int64_t i = 0; i < count; ++i) {
    out[digit_place(spec.layout, i)] = static_cast<int16_t>(codes[i] - offset);
  }
}

// Exact sum of codes * digits of one plane over a group.
int32_t group_dot(const int16_t* codes, const int8_t* digits, int32_t planes, int32_t plane, int64_t begin,
                  int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i += kBlock8) {
    const int64_t at = begin + i;
    const int8_t* run = digits + (at / kBlock * planes + plane) * kBlock + at % kBlock;
    for (int64_t j = 0; j < kBlock8; ++j) {
      sum += codes[i + j] * run[j];
    }
  }
  return sum;
}

float group_value(const int16_t* codes, const int8_t* digits, int32_t planes, int64_t begin, int64_t count) {
  const int32_t first = group_dot(codes, digits, planes, 0, begin, count);
  if (planes == 1) {
    return static_cast<float>(first);
  }
  const int32_t second = group_dot(codes, digits, planes, 1, begin, count);
  if (planes == 2) {
    return static_cast<float>(first * 256 + second);
  }
  const int32_t third = group_dot(codes, digits, planes, 2, begin, count);
  return std::fma(static_cast<float>(first), 65536.0f, static_cast<float>(second * 256 + third));
}

void matmul(const Weight& w, const XSpec& spec, const std::byte* x, int64_t n, float* y, int64_t y_stride,
            int64_t row_begin, int64_t row_end, const Ahead&) {
  if (matmul_floats(w, x, n, y, y_stride, row_begin, row_end)) {
    return;
  }
  const XView view(spec);
  int16_t codes[kMaxGroup];
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t s = 0; s < n; ++s) {
      y[s * y_stride + row] = 0.0f;
    }
    for (int64_t g = 0; g < view.groups; ++g) {
      const int64_t begin = g * spec.group;
      const int64_t run = spec.layout == XLayout::quads || spec.layout == XLayout::octets ? kBlock : kBlock8;
      const int64_t count = round_up(std::min<int64_t>(spec.group, spec.cols - begin), run);
      group_codes(w, row, spec, begin, count, codes);
      const float scale = group_scale(w, row, g);
      for (int64_t s = 0; s < n; ++s) {
        const std::byte* prepared = x + s * view.stride;
        const float dot = group_value(codes, view.digit(prepared), spec.planes, begin, count);
        float& out = y[s * y_stride + row];
        out = std::fma(dot, scale * view.scale(prepared)[g], out);
      }
    }
  }
}

constexpr KernelTable kTable = {"scalar",       1,         prepare_row,  matmul,
                                decode_any_row, sum_words, silu_mul_row, add_scaled_row};

}  // namespace

const KernelTable* scalar_kernels() { return &kTable; }

}  // namespace picaflor
