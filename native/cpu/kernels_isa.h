// Integer vector primitives of one instruction set: a register holds 32 bits of each row of a tile.
// Must not know formats, activations or loops. Compiled for AVX2 and AVX-512 VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/vec16.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

#if defined(__AVX512F__)

struct Isa {
  static constexpr int kLanes = 16;      // rows of a tile, and 32-bit words of one row in a block
  static constexpr bool kPairs = false;  // true: products are summed in int16 first and codes must be small
  using Int = __m512i;
  using Float = __m512;

  PICAFLOR_INLINE static Int zero() { return _mm512_setzero_si512(); }
  PICAFLOR_INLINE static Int set(int32_t v) { return _mm512_set1_epi32(v); }
  PICAFLOR_INLINE static Int load(const void* p) { return _mm512_load_si512(p); }
  PICAFLOR_INLINE static void store(void* p, Int v) { _mm512_store_si512(p, v); }
  PICAFLOR_INLINE static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  PICAFLOR_INLINE static Int times256(Int a) { return _mm512_slli_epi32(a, 8); }
  PICAFLOR_INLINE static Int low_nibbles(Int v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  PICAFLOR_INLINE static Int high_nibbles(Int v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
  PICAFLOR_INLINE static Int high_in_place(Int v) { return _mm512_andnot_si512(_mm512_set1_epi8(15), v); }
  PICAFLOR_INLINE static Int flip_signs(Int v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
  PICAFLOR_INLINE static Int look_up(const uint8_t* table, Int nibbles) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), nibbles);
  }

  // sum += the four products of each lane's bytes with the four bytes at x.
  PICAFLOR_INLINE static Int dot(Int sum, Int codes, const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(word));
  }
  // A partial sum that dot() may add to, and the end of kSlots of them: the second, a multiple of 2^kShift, is divided
  // by it.
  PICAFLOR_INLINE static Int start(Int total, int slot) { return slot == 0 ? total : zero(); }
  template <int kSlots, int kShift>
  PICAFLOR_INLINE static Int finish(Int, const Int* part) {
    return kSlots == 2 ? add(part[0], _mm512_srai_epi32(part[kSlots - 1], kShift)) : part[0];
  }

  PICAFLOR_INLINE static Float zero_float() { return _mm512_setzero_ps(); }
  PICAFLOR_INLINE static Float set_float(float v) { return _mm512_set1_ps(v); }
  PICAFLOR_INLINE static Float load_float(const float* p) { return _mm512_load_ps(p); }
  PICAFLOR_INLINE static void store_float(float* p, Float v) { _mm512_store_ps(p, v); }
  PICAFLOR_INLINE static void store_float_any(float* p, Float v) { _mm512_storeu_ps(p, v); }
  PICAFLOR_INLINE static Float to_float(Int v) { return _mm512_cvtepi32_ps(v); }
  PICAFLOR_INLINE static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  PICAFLOR_INLINE static Float fused(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }

  // t[j] = word j of all rows, from 64 bytes at each row's pointer + offset.
  PICAFLOR_INLINE static void load_words(const uint8_t* const* rows, int64_t offset, Int* t) {
    Int part[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const auto row = [&](int r) { return _mm512_loadu_si512(rows[i + r] + offset); };
      const Int a = _mm512_unpacklo_epi32(row(0), row(1));
      const Int b = _mm512_unpackhi_epi32(row(0), row(1));
      const Int c = _mm512_unpacklo_epi32(row(2), row(3));
      const Int d = _mm512_unpackhi_epi32(row(2), row(3));
      part[i] = _mm512_unpacklo_epi64(a, c);
      part[i + 1] = _mm512_unpackhi_epi64(a, c);
      part[i + 2] = _mm512_unpacklo_epi64(b, d);
      part[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Int even_low = _mm512_shuffle_i32x4(part[k], part[4 + k], 0x88);
      const Int odd_low = _mm512_shuffle_i32x4(part[k], part[4 + k], 0xDD);
      const Int even_high = _mm512_shuffle_i32x4(part[8 + k], part[12 + k], 0x88);
      const Int odd_high = _mm512_shuffle_i32x4(part[8 + k], part[12 + k], 0xDD);
      t[k] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
      t[4 + k] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
      t[8 + k] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
      t[12 + k] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
    }
  }
};

#else

struct Isa {
  static constexpr int kLanes = 8;
  static constexpr bool kPairs = true;
  using Int = __m256i;
  using Float = __m256;

  PICAFLOR_INLINE static Int zero() { return _mm256_setzero_si256(); }
  PICAFLOR_INLINE static Int set(int32_t v) { return _mm256_set1_epi32(v); }
  PICAFLOR_INLINE static Int load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
  PICAFLOR_INLINE static void store(void* p, Int v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }
  PICAFLOR_INLINE static Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  PICAFLOR_INLINE static Int times256(Int a) { return _mm256_slli_epi32(a, 8); }
  PICAFLOR_INLINE static Int low_nibbles(Int v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  PICAFLOR_INLINE static Int high_nibbles(Int v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
  PICAFLOR_INLINE static Int high_in_place(Int v) { return _mm256_andnot_si256(_mm256_set1_epi8(15), v); }
  PICAFLOR_INLINE static Int flip_signs(Int v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
  PICAFLOR_INLINE static Int look_up(const uint8_t* table, Int nibbles) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), nibbles);
  }

  // sum += products of each lane's bytes with the four bytes at x, in pairs, in int16. A pair of codes up to c adds at
  // most 256 c; the caller widens before 32768.
  PICAFLOR_INLINE static Int dot(Int sum, Int codes, const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(word)));
  }
  // A partial sum that dot() may add to, and the end of kSlots of them: the second counts 16 times.
  PICAFLOR_INLINE static Int start(Int, int) { return zero(); }
  template <int kSlots, int>
  PICAFLOR_INLINE static Int finish(Int total, const Int* part) {
    Int out = add(total, _mm256_madd_epi16(part[0], _mm256_set1_epi16(1)));
    if constexpr (kSlots == 2) {
      out = add(out, _mm256_madd_epi16(part[1], _mm256_set1_epi16(16)));
    }
    return out;
  }

  PICAFLOR_INLINE static Float zero_float() { return _mm256_setzero_ps(); }
  PICAFLOR_INLINE static Float set_float(float v) { return _mm256_set1_ps(v); }
  PICAFLOR_INLINE static Float load_float(const float* p) { return _mm256_load_ps(p); }
  PICAFLOR_INLINE static void store_float(float* p, Float v) { _mm256_store_ps(p, v); }
  PICAFLOR_INLINE static void store_float_any(float* p, Float v) { _mm256_storeu_ps(p, v); }
  PICAFLOR_INLINE static Float to_float(Int v) { return _mm256_cvtepi32_ps(v); }
  PICAFLOR_INLINE static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  PICAFLOR_INLINE static Float fused(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }

  // t[j] = word j of all rows, from 32 bytes at each row's pointer + offset.
  PICAFLOR_INLINE static void load_words(const uint8_t* const* rows, int64_t offset, Int* t) {
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
      Int part[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const auto half = [&](int r) {
          return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset + 16 * q));
        };
        part[k] = _mm256_inserti128_si256(_mm256_castsi128_si256(half(k)), half(k + 4), 1);
      }
      const Int a = _mm256_unpacklo_epi32(part[0], part[1]);
      const Int b = _mm256_unpackhi_epi32(part[0], part[1]);
      const Int c = _mm256_unpacklo_epi32(part[2], part[3]);
      const Int d = _mm256_unpackhi_epi32(part[2], part[3]);
      t[4 * q] = _mm256_unpacklo_epi64(a, c);
      t[4 * q + 1] = _mm256_unpackhi_epi64(a, c);
      t[4 * q + 2] = _mm256_unpacklo_epi64(b, d);
      t[4 * q + 3] = _mm256_unpackhi_epi64(b, d);
    }
  }
};

#endif

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
