// Sixteen floats as one value: the same interface and the same bits on scalar, AVX2 and AVX-512 code.
// Must not know operations or formats. The compile flags of the including file choose the instruction set; all names
// live in an inline namespace of that set, so files of different sets can be linked together.
//
// Functions, each lane by itself unless said:
//   zero16() set16(f) load16(p) load16(p, n) store16(p, v) store16(p, v, n)     unaligned; n in 0..16, rest 0 /
//   untouched add sub mul div sqrt fma(a, b, c) = a * b + c rounded once; fnma(a, b, c) = c - a * b max(a, b) = a > b ?
//   a : b; min(a, b) = a < b ? a : b (b where either is NaN); round: to nearest even lt gt le eq unordered -> M16;
//   first16(n): lanes below n; select(m, a, b) = m ? a : b; any(m) to_int: to nearest even; to_float; bits / from_bits:
//   the same 32 bits; iadd isub ishl ishr (arithmetic); nibbles16(p): 16 nibbles of 8 bytes, low first; bytes16(p): 16
//   signed bytes; tree16(v): t8[j] = v[j] + v[j+8], t4[j] = t8[j] + t8[j+4], t2[j] = t4[j] + t4[j+2], t2[0] + t2[1]
//   chain16(a, b, n), sum16(a, n): contracts.md, section 2
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#define PICAFLOR_ISA isa_avx512vbmi
#elif defined(__AVX512F__)
#include <immintrin.h>
#define PICAFLOR_ISA isa_avx512
#elif defined(__AVX2__) && defined(PICAFLOR_VNNI_AS_AVX512)
#include <immintrin.h>
#define PICAFLOR_ISA isa_avxvnni
#define PICAFLOR_VNNI "vpdpbusd"
#elif defined(__AVXVNNI__)
#include <immintrin.h>
#define PICAFLOR_ISA isa_avxvnni
#define PICAFLOR_VNNI "%{vex%} vpdpbusd"
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define PICAFLOR_ISA isa_avx2
#elif defined(__ARM_FEATURE_DOTPROD)
#define PICAFLOR_ISA isa_neon
#else
#define PICAFLOR_ISA isa_scalar
#endif

#define PICAFLOR_INLINE [[gnu::always_inline]] inline

namespace picaflor {
inline namespace PICAFLOR_ISA {

#if defined(__AVX512F__)

using V16 = __m512;
using I16 = __m512i;
using M16 = __mmask16;

PICAFLOR_INLINE M16 first16(int64_t n) { return static_cast<M16>(n >= 16 ? 0xFFFF : (1u << n) - 1); }
PICAFLOR_INLINE V16 zero16() { return _mm512_setzero_ps(); }
PICAFLOR_INLINE V16 set16(float f) { return _mm512_set1_ps(f); }
PICAFLOR_INLINE V16 load16(const float* p) { return _mm512_loadu_ps(p); }
PICAFLOR_INLINE V16 load16(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first16(n), p); }
PICAFLOR_INLINE void store16(float* p, V16 v) { _mm512_storeu_ps(p, v); }
PICAFLOR_INLINE void store16(float* p, V16 v, int64_t n) { _mm512_mask_storeu_ps(p, first16(n), v); }
PICAFLOR_INLINE V16 add(V16 a, V16 b) { return _mm512_add_ps(a, b); }
PICAFLOR_INLINE V16 sub(V16 a, V16 b) { return _mm512_sub_ps(a, b); }
PICAFLOR_INLINE V16 mul(V16 a, V16 b) { return _mm512_mul_ps(a, b); }
PICAFLOR_INLINE V16 div(V16 a, V16 b) { return _mm512_div_ps(a, b); }
PICAFLOR_INLINE V16 sqrt(V16 a) { return _mm512_sqrt_ps(a); }
PICAFLOR_INLINE V16 fma(V16 a, V16 b, V16 c) { return _mm512_fmadd_ps(a, b, c); }
PICAFLOR_INLINE V16 fnma(V16 a, V16 b, V16 c) { return _mm512_fnmadd_ps(a, b, c); }
PICAFLOR_INLINE V16 max(V16 a, V16 b) { return _mm512_max_ps(a, b); }
PICAFLOR_INLINE V16 min(V16 a, V16 b) { return _mm512_min_ps(a, b); }
PICAFLOR_INLINE V16 round(V16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PICAFLOR_INLINE M16 lt(V16 a, V16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
PICAFLOR_INLINE M16 gt(V16 a, V16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
PICAFLOR_INLINE M16 le(V16 a, V16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
PICAFLOR_INLINE M16 eq(V16 a, V16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
PICAFLOR_INLINE M16 unordered(V16 a, V16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
PICAFLOR_INLINE V16 select(M16 m, V16 a, V16 b) { return _mm512_mask_blend_ps(m, b, a); }
PICAFLOR_INLINE bool any(M16 m) { return m != 0; }
PICAFLOR_INLINE I16 to_int(V16 a) { return _mm512_cvtps_epi32(a); }
PICAFLOR_INLINE V16 to_float(I16 a) { return _mm512_cvtepi32_ps(a); }
PICAFLOR_INLINE I16 bits(V16 a) { return _mm512_castps_si512(a); }
PICAFLOR_INLINE V16 from_bits(I16 a) { return _mm512_castsi512_ps(a); }
PICAFLOR_INLINE I16 iset16(int32_t i) { return _mm512_set1_epi32(i); }
PICAFLOR_INLINE I16 iadd(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
PICAFLOR_INLINE I16 isub(I16 a, I16 b) { return _mm512_sub_epi32(a, b); }
template <int kBits>
PICAFLOR_INLINE I16 ishl(I16 a) {
  return _mm512_slli_epi32(a, kBits);
}
template <int kBits>
PICAFLOR_INLINE I16 ishr(I16 a) {
  return _mm512_srai_epi32(a, kBits);
}
// 16 nibbles of 8 bytes in order, low nibble first.
PICAFLOR_INLINE __m128i spread_nibbles(const uint8_t* p) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(0x0F);
  return _mm_unpacklo_epi8(_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
}
PICAFLOR_INLINE I16 nibbles16(const uint8_t* p) { return _mm512_cvtepu8_epi32(spread_nibbles(p)); }
PICAFLOR_INLINE I16 bytes16(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PICAFLOR_INLINE float tree16(V16 v) {
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  const __m256 t8 = _mm256_add_ps(_mm512_castps512_ps256(v), high);
  const __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
  const __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
  return _mm_cvtss_f32(_mm_add_ss(t2, _mm_movehdup_ps(t2)));
}
PICAFLOR_INLINE float sqrt1(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
PICAFLOR_INLINE float fma1(float a, float b, float c) {
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}

#elif defined(__AVX2__) && defined(__FMA__)

struct V16 {
  __m256 lo, hi;
};
struct I16 {
  __m256i lo, hi;
};
struct M16 {
  __m256 lo, hi;  // all bits of a lane set or none
};

PICAFLOR_INLINE M16 first16(int64_t n) {
  const __m256i count = _mm256_set1_epi32(static_cast<int32_t>(n));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}
PICAFLOR_INLINE V16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PICAFLOR_INLINE V16 set16(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
PICAFLOR_INLINE V16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PICAFLOR_INLINE V16 load16(const float* p, int64_t n) {
  const M16 m = first16(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
PICAFLOR_INLINE void store16(float* p, V16 v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
PICAFLOR_INLINE void store16(float* p, V16 v, int64_t n) {
  const M16 m = first16(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), v.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), v.hi);
}
PICAFLOR_INLINE V16 add(V16 a, V16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PICAFLOR_INLINE V16 sub(V16 a, V16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PICAFLOR_INLINE V16 mul(V16 a, V16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PICAFLOR_INLINE V16 div(V16 a, V16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PICAFLOR_INLINE V16 sqrt(V16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
PICAFLOR_INLINE V16 fma(V16 a, V16 b, V16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PICAFLOR_INLINE V16 fnma(V16 a, V16 b, V16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
PICAFLOR_INLINE V16 max(V16 a, V16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PICAFLOR_INLINE V16 min(V16 a, V16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PICAFLOR_INLINE V16 round(V16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
#define PICAFLOR_COMPARE(name, code) \
  PICAFLOR_INLINE M16 name(V16 a, V16 b) { return {_mm256_cmp_ps(a.lo, b.lo, code), _mm256_cmp_ps(a.hi, b.hi, code)}; }
PICAFLOR_COMPARE(lt, _CMP_LT_OQ)
PICAFLOR_COMPARE(gt, _CMP_GT_OQ)
PICAFLOR_COMPARE(le, _CMP_LE_OQ)
PICAFLOR_COMPARE(eq, _CMP_EQ_OQ)
PICAFLOR_COMPARE(unordered, _CMP_UNORD_Q)
#undef PICAFLOR_COMPARE
PICAFLOR_INLINE V16 select(M16 m, V16 a, V16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
PICAFLOR_INLINE bool any(M16 m) { return (_mm256_movemask_ps(m.lo) | _mm256_movemask_ps(m.hi)) != 0; }
PICAFLOR_INLINE I16 to_int(V16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
PICAFLOR_INLINE V16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PICAFLOR_INLINE I16 bits(V16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
PICAFLOR_INLINE V16 from_bits(I16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
PICAFLOR_INLINE I16 iset16(int32_t i) { return {_mm256_set1_epi32(i), _mm256_set1_epi32(i)}; }
PICAFLOR_INLINE I16 iadd(I16 a, I16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
PICAFLOR_INLINE I16 isub(I16 a, I16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
template <int kBits>
PICAFLOR_INLINE I16 ishl(I16 a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
PICAFLOR_INLINE I16 ishr(I16 a) {
  return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
}
// 16 nibbles of 8 bytes in order, low nibble first.
PICAFLOR_INLINE __m128i spread_nibbles(const uint8_t* p) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(0x0F);
  return _mm_unpacklo_epi8(_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
}
PICAFLOR_INLINE I16 nibbles16(const uint8_t* p) {
  const __m128i codes = spread_nibbles(p);
  return {_mm256_cvtepu8_epi32(codes), _mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8))};
}
PICAFLOR_INLINE I16 bytes16(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(codes), _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))};
}
PICAFLOR_INLINE float tree16(V16 v) {
  const __m256 t8 = _mm256_add_ps(v.lo, v.hi);
  const __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
  const __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
  return _mm_cvtss_f32(_mm_add_ss(t2, _mm_movehdup_ps(t2)));
}
PICAFLOR_INLINE float sqrt1(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
PICAFLOR_INLINE float fma1(float a, float b, float c) {
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}

#else  // scalar: std::fmaf is one rounding on every machine (glibc picks the instruction at run time)

struct V16 {
  float v[16];
};
struct I16 {
  int32_t v[16];
};
struct M16 {
  bool v[16];
};

#define PICAFLOR_LANES(type, expression) \
  type out;                              \
  for (int i = 0; i < 16; ++i) {         \
    out.v[i] = (expression);             \
  }                                      \
  return out

PICAFLOR_INLINE M16 first16(int64_t n) { PICAFLOR_LANES(M16, i < n); }
PICAFLOR_INLINE V16 zero16() { PICAFLOR_LANES(V16, 0.0f); }
PICAFLOR_INLINE V16 set16(float f) { PICAFLOR_LANES(V16, f); }
PICAFLOR_INLINE V16 load16(const float* p) { PICAFLOR_LANES(V16, p[i]); }
PICAFLOR_INLINE V16 load16(const float* p, int64_t n) { PICAFLOR_LANES(V16, i < n ? p[i] : 0.0f); }
PICAFLOR_INLINE void store16(float* p, V16 v, int64_t n = 16) {
  for (int i = 0; i < 16 && i < n; ++i) {
    p[i] = v.v[i];
  }
}
PICAFLOR_INLINE V16 add(V16 a, V16 b) { PICAFLOR_LANES(V16, a.v[i] + b.v[i]); }
PICAFLOR_INLINE V16 sub(V16 a, V16 b) { PICAFLOR_LANES(V16, a.v[i] - b.v[i]); }
PICAFLOR_INLINE V16 mul(V16 a, V16 b) { PICAFLOR_LANES(V16, a.v[i] * b.v[i]); }
PICAFLOR_INLINE V16 div(V16 a, V16 b) { PICAFLOR_LANES(V16, a.v[i] / b.v[i]); }
PICAFLOR_INLINE V16 sqrt(V16 a) { PICAFLOR_LANES(V16, std::sqrt(a.v[i])); }
PICAFLOR_INLINE V16 fma(V16 a, V16 b, V16 c) { PICAFLOR_LANES(V16, std::fma(a.v[i], b.v[i], c.v[i])); }
PICAFLOR_INLINE V16 fnma(V16 a, V16 b, V16 c) { PICAFLOR_LANES(V16, std::fma(-a.v[i], b.v[i], c.v[i])); }
PICAFLOR_INLINE V16 max(V16 a, V16 b) { PICAFLOR_LANES(V16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PICAFLOR_INLINE V16 min(V16 a, V16 b) { PICAFLOR_LANES(V16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PICAFLOR_INLINE V16 round(V16 a) { PICAFLOR_LANES(V16, std::nearbyint(a.v[i])); }
PICAFLOR_INLINE M16 lt(V16 a, V16 b) { PICAFLOR_LANES(M16, a.v[i] < b.v[i]); }
PICAFLOR_INLINE M16 gt(V16 a, V16 b) { PICAFLOR_LANES(M16, a.v[i] > b.v[i]); }
PICAFLOR_INLINE M16 le(V16 a, V16 b) { PICAFLOR_LANES(M16, a.v[i] <= b.v[i]); }
PICAFLOR_INLINE M16 eq(V16 a, V16 b) { PICAFLOR_LANES(M16, a.v[i] == b.v[i]); }
PICAFLOR_INLINE M16 unordered(V16 a, V16 b) { PICAFLOR_LANES(M16, a.v[i] != a.v[i] || b.v[i] != b.v[i]); }
PICAFLOR_INLINE V16 select(M16 m, V16 a, V16 b) { PICAFLOR_LANES(V16, m.v[i] ? a.v[i] : b.v[i]); }
PICAFLOR_INLINE bool any(M16 m) {
  bool found = false;
  for (int i = 0; i < 16; ++i) {
    found = found || m.v[i];
  }
  return found;
}
// Outside the range of int32 (and for NaN) the vector units give INT32_MIN; so does this.
PICAFLOR_INLINE I16 to_int(V16 a) {
  PICAFLOR_LANES(I16, a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(a.v[i]))
                                                                         : INT32_MIN);
}
PICAFLOR_INLINE V16 to_float(I16 a) { PICAFLOR_LANES(V16, static_cast<float>(a.v[i])); }
PICAFLOR_INLINE I16 bits(V16 a) { PICAFLOR_LANES(I16, __builtin_bit_cast(int32_t, a.v[i])); }
PICAFLOR_INLINE V16 from_bits(I16 a) { PICAFLOR_LANES(V16, __builtin_bit_cast(float, a.v[i])); }
PICAFLOR_INLINE I16 iset16(int32_t k) { PICAFLOR_LANES(I16, k); }
PICAFLOR_INLINE I16 iadd(I16 a, I16 b) {
  PICAFLOR_LANES(I16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i])));
}
PICAFLOR_INLINE I16 isub(I16 a, I16 b) {
  PICAFLOR_LANES(I16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i])));
}
template <int kBits>
PICAFLOR_INLINE I16 ishl(I16 a) {
  PICAFLOR_LANES(I16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << kBits));
}
template <int kBits>
PICAFLOR_INLINE I16 ishr(I16 a) {
  PICAFLOR_LANES(I16, a.v[i] >> kBits);
}
PICAFLOR_INLINE I16 nibbles16(const uint8_t* p) { PICAFLOR_LANES(I16, (p[i / 2] >> (i % 2 * 4)) & 0x0F); }
PICAFLOR_INLINE I16 bytes16(const uint8_t* p) { PICAFLOR_LANES(I16, static_cast<int8_t>(p[i])); }
#undef PICAFLOR_LANES
PICAFLOR_INLINE float tree16(V16 v) {
  float t[8];
  for (int j = 0; j < 8; ++j) {
    t[j] = v.v[j] + v.v[j + 8];
  }
  for (int j = 0; j < 4; ++j) {
    t[j] = t[j] + t[j + 4];
  }
  return (t[0] + t[2]) + (t[1] + t[3]);
}
PICAFLOR_INLINE float sqrt1(float x) { return std::sqrt(x); }
PICAFLOR_INLINE float fma1(float a, float b, float c) { return std::fma(a, b, c); }

#endif

PICAFLOR_INLINE V16 neg(V16 a) { return mul(a, set16(-1.0f)); }

// sum of a[i] * b[i]; lanes behind the end are left as they are, so that a lane of -0 stays -0.
PICAFLOR_INLINE float chain16(const float* a, const float* b, int64_t n) {
  V16 acc = zero16();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    acc = fma(load16(a + i), load16(b + i), acc);
  }
  if (i < n) {
    const M16 m = first16(n - i);
    acc = select(m, fma(load16(a + i, n - i), load16(b + i, n - i), acc), acc);
  }
  return tree16(acc);
}

// sum of a[i] in the same order
PICAFLOR_INLINE float sum16(const float* a, int64_t n) {
  V16 acc = zero16();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    acc = add(acc, load16(a + i));
  }
  if (i < n) {
    acc = select(first16(n - i), add(acc, load16(a + i, n - i)), acc);
  }
  return tree16(acc);
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
