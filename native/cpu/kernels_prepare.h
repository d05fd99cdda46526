// Activations to digits: rotation, one scale per group, one to three int8 planes (contracts.md, section 2).
// Must not know weights. Compiled once per instruction set; all give the same bytes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/kernels_layout.h"
#include "cpu/vec16.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

constexpr float kTinyGroup = 1e-30f;

// Largest of |x|, as the bits of a float: at least 0x7F800000 where any is not finite.
inline int32_t largest_bits(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

#if defined(__AVX512F__)

// rne(double(x) * ratio) of sixteen values.
PICAFLOR_INLINE I16 scaled16(const float* x, double ratio) {
  const __m512d r = _mm512_set1_pd(ratio);
  const __m256i low = _mm512_cvtpd_epi32(_mm512_mul_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x)), r));
  const __m256i high = _mm512_cvtpd_epi32(_mm512_mul_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x + 8)), r));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
PICAFLOR_INLINE __m128i low_bytes(I16 v) { return _mm512_cvtepi32_epi8(v); }
PICAFLOR_INLINE int32_t total(I16 v) { return _mm512_reduce_add_epi32(v); }

#elif defined(__AVX2__) && defined(__FMA__)

PICAFLOR_INLINE __m128i scaled4(const float* x, __m256d ratio) {
  return _mm256_cvtpd_epi32(_mm256_mul_pd(_mm256_cvtps_pd(_mm_loadu_ps(x)), ratio));
}
PICAFLOR_INLINE I16 scaled16(const float* x, double ratio) {
  const __m256d r = _mm256_set1_pd(ratio);
  return {_mm256_set_m128i(scaled4(x + 4, r), scaled4(x, r)), _mm256_set_m128i(scaled4(x + 12, r), scaled4(x + 8, r))};
}
PICAFLOR_INLINE __m128i low_bytes(I16 v) {
  const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                        -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i low = _mm256_shuffle_epi8(v.lo, pick);
  const __m256i high = _mm256_shuffle_epi8(v.hi, pick);
  const __m128i a = _mm_or_si128(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  const __m128i b = _mm_or_si128(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  return _mm_unpacklo_epi64(a, b);
}
PICAFLOR_INLINE int32_t total(I16 v) {
  const __m256i both = _mm256_add_epi32(v.lo, v.hi);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
  return _mm_cvtsi128_si32(sum);
}

#else

PICAFLOR_INLINE I16 scaled16(const float* x, double ratio) {
  I16 out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = static_cast<int32_t>(std::nearbyint(static_cast<double>(x[i]) * ratio));
  }
  return out;
}
PICAFLOR_INLINE int32_t total(I16 v) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    sum += v.v[i];
  }
  return sum;
}

#endif

// The lowest byte of each value, in the order of `layout`.
PICAFLOR_INLINE void store_digits(I16 v, XLayout layout, int8_t* out) {
#if defined(__AVX2__)
  const __m128i split = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m128i square = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m128i bytes = low_bytes(v);
  if (layout == XLayout::nibbles) {
    bytes = _mm_shuffle_epi8(bytes, split);
  } else if (layout == XLayout::quads) {
    bytes = _mm_shuffle_epi8(bytes, square);
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
#else
  const XLayout inside = layout == XLayout::octets ? XLayout::natural : layout;
  for (int i = 0; i < 16; ++i) {
    out[digit_place(inside, i)] = static_cast<int8_t>(static_cast<uint8_t>(v.v[i] & 0xFF));
  }
#endif
}

// Runs of 32 bytes to the order of XLayout::octets, in place.
inline void order_octets(void* bytes, int64_t count) {
  auto* at = static_cast<uint8_t*>(bytes);
  for (const uint8_t* end = at + count; at < end; at += 32) {
#if defined(__AVX2__)
    const __m128i pairs = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    auto* p = reinterpret_cast<__m128i*>(at);
    const __m128i low = _mm_shuffle_epi8(_mm_loadu_si128(p), pairs);
    const __m128i high = _mm_shuffle_epi8(_mm_loadu_si128(p + 1), pairs);
    _mm_storeu_si128(p, _mm_unpacklo_epi16(low, high));
    _mm_storeu_si128(p + 1, _mm_unpackhi_epi16(low, high));
#else
    uint8_t copy[32];
    std::memcpy(copy, at, 32);
    for (int64_t i = 0; i < 32; ++i) {
      at[digit_place(XLayout::octets, i)] = copy[i];
    }
#endif
  }
}

// v without its lowest balanced digit, divided by 256.
PICAFLOR_INLINE I16 without_digit(I16 v) { return ishr<8>(iadd(v, iset16(128))); }

// Digits of `count` (a multiple of 16) inputs from input `begin`; their sums by the rule of XView.
template <int kPlanes>
inline void quantize_run(const float* x, int64_t begin, int64_t count, double ratio, XLayout layout, int8_t* digits,
                         int32_t* sum, int32_t* top) {
  I16 sums = iset16(0);
  I16 tops = iset16(0);
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t at = begin + i;
    int8_t* out = digits + at / kBlock * kBlock * kPlanes + at % kBlock;
    const I16 q = scaled16(x + i, ratio);
    store_digits(q, layout, out + (kPlanes - 1) * kBlock);
    if constexpr (kPlanes >= 2) {
      I16 rest = without_digit(q);
      store_digits(rest, layout, out + (kPlanes - 2) * kBlock);
      if constexpr (kPlanes == 3) {
        rest = without_digit(rest);
        store_digits(rest, layout, out);
        tops = iadd(tops, rest);
        sums = iadd(sums, isub(q, ishl<16>(rest)));
      }
    }
    if constexpr (kPlanes < 3) {
      sums = iadd(sums, q);
    }
  }
  *sum = total(sums);
  *top = total(tops);
}

template <int kPlanes>
inline void prepare_digits(const XSpec& spec, const XView& view, const float* x, std::byte* out) {
  constexpr int32_t kLargest = kPlanes == 1 ? 127 : kPlanes == 2 ? 127 * 256 + 127 : 127 * 65536;
  auto* scales = reinterpret_cast<float*>(out);
  auto* sums = reinterpret_cast<int32_t*>(out + view.sums);
  auto* digits = reinterpret_cast<int8_t*>(out + view.digits);
  std::memset(out, 0, static_cast<size_t>(view.rotated));  // also what is behind the last group and input
  alignas(64) float padded[kMaxGroup];
  for (int64_t g = 0; g < view.groups; ++g) {
    const int64_t begin = g * spec.group;
    const int64_t real = std::min<int64_t>(spec.group, spec.cols - begin);
    const int64_t count = round_up(real, 16);
    const float* run = x + begin;
    if (count != real) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, run, static_cast<size_t>(real) * 4);
      run = padded;
    }
    const int32_t bits = largest_bits(run, count);
    const float largest = __builtin_bit_cast(float, bits);
    int32_t sum = 0;
    int32_t top = 0;
    scales[g] = 0.0f;
    if (bits >= 0x7F800000) {
      scales[g] = std::numeric_limits<float>::quiet_NaN();
    } else if (largest >= kTinyGroup) {
      scales[g] = largest / static_cast<float>(kLargest);
      const double ratio = static_cast<double>(kLargest) / static_cast<double>(largest);
      quantize_run<kPlanes>(run, begin, count, ratio, spec.layout, digits, &sum, &top);
      if (spec.layout == XLayout::octets) {  // only groups of one block have it
        order_octets(digits + begin * kPlanes, kBlock * kPlanes);
      }
    }
    sums[g] = sum;
    if constexpr (kPlanes == 3) {
      reinterpret_cast<int32_t*>(out + view.tops)[g] = top;
    }
  }
}

// The signs of a block of the rotation, in place.
inline void turn_signs(float* x, int64_t n) {
  uint64_t state = static_cast<uint64_t>(kE8RotationSeed) + static_cast<uint64_t>(n);
  for (int64_t i = 0; i < n; i += 8) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    const auto signs = static_cast<uint32_t>((state * kE8RotationMultiplier) >> 56);
    for (int64_t j = i; j < std::min(i + 8, n); ++j) {
      x[j] = (signs >> (j - i) & 1) != 0 ? -x[j] : x[j];
    }
  }
}

// Walsh-Hadamard butterflies and 1/sqrt(n) of a block, in place; its own inverse.
inline void mix_block(float* x, int64_t n) {
  for (int64_t stride = 1; stride < n; stride *= 2) {
    for (int64_t i = 0; i < n; i += 2 * stride) {
      for (int64_t j = i; j < i + stride; ++j) {
        const float u = x[j];
        const float v = x[j + stride];
        x[j] = u + v;
        x[j + stride] = u - v;
      }
    }
  }
  const float factor = 1.0f / std::sqrt(static_cast<float>(n));
  for (int64_t i = 0; i < n; ++i) {
    x[i] *= factor;
  }
}

inline void rotate(float* x, int64_t cols) {
  while (cols > 0) {
    const int64_t block = std::min<int64_t>(cols & -cols, kE8RotationMax);
    turn_signs(x, block);
    mix_block(x, block);
    x += block;
    cols -= block;
  }
}

// The inverse of rotate up to float32 rounding: makes a row of a rotated matrix, or a sum of such rows, a plain one.
inline void rotate_back(float* x, int64_t cols) {
  while (cols > 0) {
    const int64_t block = std::min<int64_t>(cols & -cols, kE8RotationMax);
    mix_block(x, block);
    turn_signs(x, block);
    x += block;
    cols -= block;
  }
}

inline void prepare_row(const XSpec& spec, const float* x, std::byte* out) {
  const XView view(spec);
  const auto bytes = static_cast<size_t>(spec.cols) * 4;
  if (spec.planes == 0) {
    std::memcpy(out, x, bytes);
    std::memset(out + bytes, 0, static_cast<size_t>(view.stride) - bytes);
    return;
  }
  if (spec.rotated) {
    auto* turned = reinterpret_cast<float*>(out + view.rotated);
    std::memset(out + view.rotated, 0, static_cast<size_t>(view.stride - view.rotated));
    std::memcpy(turned, x, bytes);
    rotate(turned, spec.cols);
    x = turned;
  }
  switch (spec.planes) {
    case 1:
      return prepare_digits<1>(spec, view, x, out);
    case 2:
      return prepare_digits<2>(spec, view, x, out);
    case 3:
      return prepare_digits<3>(spec, view, x, out);
  }
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
