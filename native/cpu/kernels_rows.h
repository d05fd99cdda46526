// Float-coded matrices and decoded rows, over sixteen lanes.
// Must not know digits or tiles. Compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/kernels_codes.h"
#include "cpu/kernels_layout.h"
#include "cpu/math16.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

// Sixteen stored values of a row from input i on, as float32; `scales` is the row's scale row (fp8 only). Up to 60
// bytes behind the last input are read.
#if defined(__AVX512F__)
PICAFLOR_INLINE V16 f32_values(const uint8_t* p) { return load16(reinterpret_cast<const float*>(p)); }
PICAFLOR_INLINE V16 bf16_values(const uint8_t* p) {
  return from_bits(ishl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
PICAFLOR_INLINE V16 f16_values(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// e4m3 as a half is 256 times too small; 0x7F and 0xFF are NaN.
PICAFLOR_INLINE V16 fp8_values(const uint8_t* p) {
  const __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i rest = _mm256_and_si256(v, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x80)), 8);
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7E00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(rest, 7), sign), nan);
  return mul(_mm512_cvtph_ps(half), set16(256.0f));
}
#elif defined(__AVX2__) && defined(__FMA__)
PICAFLOR_INLINE V16 f32_values(const uint8_t* p) { return load16(reinterpret_cast<const float*>(p)); }
PICAFLOR_INLINE __m128i load128(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
PICAFLOR_INLINE V16 bf16_values(const uint8_t* p) {
  return from_bits(ishl<16>(I16{_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 16))}));
}
PICAFLOR_INLINE V16 f16_values(const uint8_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))};
}
PICAFLOR_INLINE V16 fp8_values(const uint8_t* p) {
  const __m256i v = _mm256_cvtepu8_epi16(load128(p));
  const __m256i rest = _mm256_and_si256(v, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x80)), 8);
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7E00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(rest, 7), sign), nan);
  const V16 value{_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
  return mul(value, set16(256.0f));
}
#else
PICAFLOR_INLINE V16 f32_values(const uint8_t* p) {
  V16 out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
PICAFLOR_INLINE V16 bf16_values(const uint8_t* p) {
  V16 out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = __builtin_bit_cast(float, static_cast<uint32_t>(p[2 * i] | p[2 * i + 1] << 8) << 16);
  }
  return out;
}
PICAFLOR_INLINE V16 f16_values(const uint8_t* p) {
  V16 out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = half_value(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
  }
  return out;
}
PICAFLOR_INLINE V16 fp8_values(const uint8_t* p) {
  V16 out;
  for (int i = 0; i < 16; ++i) {
    const uint32_t rest = p[i] & 0x7F;
    const uint32_t half = rest << 7 | (p[i] & 0x80u) << 8 | (rest == 0x7F ? 0x7E00u : 0u);
    out.v[i] = half_value(static_cast<uint16_t>(half)) * 256.0f;
  }
  return out;
}
#endif

struct CodeF32 {
  PICAFLOR_INLINE static V16 load(const uint8_t* row, const uint8_t*, int64_t i) { return f32_values(row + 4 * i); }
};
struct CodeBf16 {
  PICAFLOR_INLINE static V16 load(const uint8_t* row, const uint8_t*, int64_t i) { return bf16_values(row + 2 * i); }
};
struct CodeF16 {
  PICAFLOR_INLINE static V16 load(const uint8_t* row, const uint8_t*, int64_t i) { return f16_values(row + 2 * i); }
};
struct CodeFp8 {
  PICAFLOR_INLINE static V16 load(const uint8_t* row, const uint8_t* scales, int64_t i) {
    return mul(fp8_values(row + i), set16(float_at(scales, i / kFp8Block)));
  }
};

// kRows rows times kTokens prepared rows: chain16 of every pair.
template <class Code, int kRows, int kTokens>
inline void float_block(const Weight& w, int64_t row, const std::byte* x, int64_t stride, float* y, int64_t y_stride) {
  const int64_t nbytes = row_bytes(w);
  const uint8_t* codes = w.codes + row * nbytes;
  const uint8_t* scales[kRows];
  for (int r = 0; r < kRows; ++r) {
    scales[r] = w.format == FormatId::fp8_b128 ? w.scales + (row + r) / kFp8Block * scale_row_bytes(w) : nullptr;
  }
  V16 acc[kRows][kTokens];
  for (int r = 0; r < kRows; ++r) {
    for (int s = 0; s < kTokens; ++s) {
      acc[r][s] = zero16();
    }
  }
  const auto input = [&](int s, int64_t i) { return load16(reinterpret_cast<const float*>(x + s * stride) + i); };
  int64_t i = 0;
  for (; i + 16 <= w.cols; i += 16) {
    for (int r = 0; r < kRows; ++r) {
      const V16 value = Code::load(codes + r * nbytes, scales[r], i);
      for (int s = 0; s < kTokens; ++s) {
        acc[r][s] = fma(value, input(s, i), acc[r][s]);
      }
    }
  }
  if (i < w.cols) {
    const M16 real = first16(w.cols - i);
    for (int r = 0; r < kRows; ++r) {
      const V16 value = Code::load(codes + r * nbytes, scales[r], i);
      for (int s = 0; s < kTokens; ++s) {
        acc[r][s] = select(real, fma(value, input(s, i), acc[r][s]), acc[r][s]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int s = 0; s < kTokens; ++s) {
      y[s * y_stride + r] = tree16(acc[r][s]);
    }
  }
}

template <class Code, int kRows>
inline void float_rows(const Weight& w, int64_t row, const std::byte* x, int64_t stride, int64_t n, float* y,
                       int64_t y_stride) {
  int64_t s = 0;
  for (; s + 4 <= n; s += 4) {
    float_block<Code, kRows, 4>(w, row, x + s * stride, stride, y + s * y_stride, y_stride);
  }
  switch (n - s) {
    case 1:
      return float_block<Code, kRows, 1>(w, row, x + s * stride, stride, y + s * y_stride, y_stride);
    case 2:
      return float_block<Code, kRows, 2>(w, row, x + s * stride, stride, y + s * y_stride, y_stride);
    case 3:
      return float_block<Code, kRows, 3>(w, row, x + s * stride, stride, y + s * y_stride, y_stride);
  }
}

template <class Code>
inline void float_matmul(const Weight& w, const std::byte* x, int64_t n, float* y, int64_t y_stride, int64_t row_begin,
                         int64_t row_end) {
  const int64_t stride = round_up(w.cols * 4, 64);
  int64_t row = row_begin;
#if defined(__AVX512F__)
  constexpr int kRows = 4;
#else
  constexpr int kRows = 2;
#endif
  if (n == 1) {
    for (; row + 2 * kRows <= row_end; row += 2 * kRows) {
      float_block<Code, 2 * kRows, 1>(w, row, x, stride, y + row, y_stride);
    }
  }
  for (; row + kRows <= row_end; row += kRows) {
    float_rows<Code, kRows>(w, row, x, stride, n, y + row, y_stride);
  }
  for (; row < row_end; ++row) {
    float_rows<Code, 1>(w, row, x, stride, n, y + row, y_stride);
  }
}

template <class Code>
inline void decode_float_row(const Weight& w, int64_t row, float* out) {
  const uint8_t* codes = w.codes + row * row_bytes(w);
  const uint8_t* scales = w.format == FormatId::fp8_b128 ? w.scales + row / kFp8Block * scale_row_bytes(w) : nullptr;
  for (int64_t i = 0; i < w.cols; i += 16) {
    store16(out + i, Code::load(codes, scales, i), std::min<int64_t>(16, w.cols - i));
  }
}

// Sixteen codes of a format whose codes lie one behind the other, at input `at` of a row.
struct CodeNibbles {
  static I16 load(const uint8_t* row, int64_t at) { return isub(nibbles16(row + at / 2), iset16(8)); }
};
struct CodeBytes {
  static I16 load(const uint8_t* row, int64_t at) { return bytes16(row + at); }
};

// float(code) * scale over runs of `group` inputs, a multiple of 16.
template <class Code>
inline void decode_plain_row(const Weight& w, int64_t row, int64_t group, float* out) {
  const uint8_t* codes = w.codes + row * row_bytes(w);
  for (int64_t begin = 0; begin < w.cols; begin += group) {
    const int64_t end = std::min(begin + group, w.cols);
    const V16 scale = set16(group_scale(w, row, begin / group));
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
      store16(out + i, mul(to_float(Code::load(codes, i)), scale));
    }
    if (i < end) {
      store16(out + i, mul(to_float(Code::load(codes, i)), scale), end - i);
    }
  }
}

// float(code) * scale over runs of inputs with one scale.
inline void decode_code_row(const Weight& w, int64_t row, float* out) {
  const uint8_t* codes = w.codes + row * row_bytes(w);
  const int64_t group =
      kActivationGroup[static_cast<int32_t>(w.format)] < 0 ? w.group : kActivationGroup[static_cast<int32_t>(w.format)];
  const int32_t offset = code_offset(w.format);
  alignas(64) uint8_t run[kMaxGroup];
  for (int64_t begin = 0; begin < w.cols; begin += group) {
    const int64_t count = std::min(group, w.cols - begin);
    decode_codes(w.format, codes, begin, round_up(count, 8), run);
    const float scale = group_scale(w, row, begin / group);
    for (int64_t i = 0; i < count; ++i) {
      out[begin + i] = static_cast<float>(static_cast<int32_t>(run[i]) - offset) * scale;
    }
  }
}

inline void decode_any_row(const Weight& w, int64_t row, float* out) {
  switch (w.format) {
    case FormatId::f32:
      return decode_float_row<CodeF32>(w, row, out);
    case FormatId::bf16:
      return decode_float_row<CodeBf16>(w, row, out);
    case FormatId::f16:
      return decode_float_row<CodeF16>(w, row, out);
    case FormatId::fp8_b128:
      return decode_float_row<CodeFp8>(w, row, out);
    case FormatId::int8_row:
      return decode_plain_row<CodeBytes>(w, row, round_up(w.cols, 16), out);
    case FormatId::int4_row:
      return decode_plain_row<CodeNibbles>(w, row, round_up(w.cols, 16), out);
    case FormatId::int4_grouped:
      return decode_plain_row<CodeNibbles>(w, row, w.group, out);
    case FormatId::int2_row:
    case FormatId::int3_g64:
    case FormatId::e8_iq3:
    case FormatId::mxfp4:
      return decode_code_row(w, row, out);
  }
}

// True where the format was float-coded and the product is done.
inline bool matmul_floats(const Weight& w, const std::byte* x, int64_t n, float* y, int64_t y_stride, int64_t row_begin,
                          int64_t row_end) {
  switch (w.format) {
    case FormatId::f32:
      float_matmul<CodeF32>(w, x, n, y, y_stride, row_begin, row_end);
      return true;
    case FormatId::bf16:
      float_matmul<CodeBf16>(w, x, n, y, y_stride, row_begin, row_end);
      return true;
    case FormatId::f16:
      float_matmul<CodeF16>(w, x, n, y, y_stride, row_begin, row_end);
      return true;
    case FormatId::fp8_b128:
      float_matmul<CodeFp8>(w, x, n, y, y_stride, row_begin, row_end);
      return true;
    case FormatId::int8_row:
    case FormatId::int4_row:
    case FormatId::int2_row:
    case FormatId::int4_grouped:
    case FormatId::int3_g64:
    case FormatId::e8_iq3:
    case FormatId::mxfp4:
      return false;
  }
  return false;
}

inline void silu_mul_row(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t count = std::min<int64_t>(16, n - i);
    store16(out + i, mul(silu(load16(gate + i, count)), load16(up + i, count)), count);
  }
}

inline void add_scaled_row(float factor, const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t count = std::min<int64_t>(16, n - i);
    store16(out + i, fma(set16(factor), load16(x + i, count), load16(out + i, count)), count);
  }
}

inline uint64_t sum_words(const std::byte* data, int64_t nbytes) {
  uint64_t sums[16] = {};
  int64_t i = 0;
  for (; i + 128 <= nbytes; i += 128) {
    uint64_t words[16];
    std::memcpy(words, data + i, sizeof words);
    for (int j = 0; j < 16; ++j) {
      sums[j] += words[j];
    }
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) {
    sum += part;
  }
  return sum;
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
