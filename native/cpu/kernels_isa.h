// Integer vector primitives of one instruction set: a register holds 32 bits of each row of a tile.
// Must not know formats, activations or loops. Compiled for AVX2, AVX-VNNI and AVX-512 VNNI; kernels_isa_neon.h has
// NEON's. Dot products are written as instructions: gcc 12 copies the sums of its intrinsics back and forth in loops.
#pragma once

#if defined(__ARM_FEATURE_DOTPROD)
#include "cpu/kernels_isa_neon.h"
#else
#include <immintrin.h>

#include <cstdint>

#include "cpu/vec16.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

#if defined(__AVX512F__)

struct Isa {
  static constexpr int kLanes = 16;      // rows of a tile, and 32-bit words of one row in a block
  static constexpr bool kPairs = false;  // true: products are summed in int16 first and codes must be small
  static constexpr bool kFewRegisters = false;
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
  PICAFLOR_INLINE static Int masked(Int v, int8_t mask) { return _mm512_and_si512(v, _mm512_set1_epi8(mask)); }
  // Bits move right inside 32 (left where kBits is negative).
  template <int kBits>
  PICAFLOR_INLINE static Int right(Int v) {
    return kBits >= 0 ? _mm512_srli_epi32(v, kBits >= 0 ? kBits : 0) : _mm512_slli_epi32(v, kBits >= 0 ? 0 : -kBits);
  }
  // The bits of `mask` in each byte from a, the others from b.
  PICAFLOR_INLINE static Int choose(int8_t mask, Int a, Int b) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(mask), a, b, 0xCA);
  }
  PICAFLOR_INLINE static Int high_in_place(Int v) { return _mm512_andnot_si512(_mm512_set1_epi8(15), v); }
  PICAFLOR_INLINE static Int flip_signs(Int v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
  PICAFLOR_INLINE static Int look_up(const uint8_t* table, Int nibbles) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), nibbles);
  }

  // half_e8m0 of kLanes bytes, as the bits of floats.
  PICAFLOR_INLINE static Int half_powers(const uint8_t* p) {
    const Int e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const Int normal = _mm512_slli_epi32(_mm512_sub_epi32(e, set(1)), 23);
    const Int low = _mm512_mask_sllv_epi32(normal, _mm512_cmplt_epi32_mask(e, set(2)), set(0x00200000), e);
    return _mm512_mask_mov_epi32(low, _mm512_cmpeq_epi32_mask(e, set(255)), set(0x7FC00000));
  }

  // sum += the four products of each lane's bytes with the four bytes at x. kOnce: no other codes meet these four.
  template <bool kOnce>
  PICAFLOR_INLINE static Int dot(Int sum, Int codes, const int8_t* x) {
    if constexpr (kOnce) {
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int8_t (*)[4]>(x)));
    } else {
      int32_t word;
      __builtin_memcpy(&word, x, 4);
      asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(_mm512_set1_epi32(word)));
    }
    return sum;
  }
  // A partial sum that dot() may add to, and the end of kSlots of them: the second, a multiple of 2^kShift, is divided
  // by it.
  PICAFLOR_INLINE static Int start(Int total, int slot) { return slot == 0 ? total : zero(); }
  template <int kSlots, int kShift>
  PICAFLOR_INLINE static Int finish(Int, const Int* part) {
    const Int second = kShift == 0 ? part[kSlots - 1] : _mm512_srai_epi32(part[kSlots - 1], kShift);
    return kSlots == 2 ? add(part[0], second) : part[0];
  }

  PICAFLOR_INLINE static Float zero_float() { return _mm512_setzero_ps(); }
  PICAFLOR_INLINE static Float set_float(float v) { return _mm512_set1_ps(v); }
  PICAFLOR_INLINE static Float load_float(const float* p) { return _mm512_load_ps(p); }
  PICAFLOR_INLINE static void store_float(float* p, Float v) { _mm512_store_ps(p, v); }
  PICAFLOR_INLINE static void store_float_any(float* p, Float v) { _mm512_storeu_ps(p, v); }
  PICAFLOR_INLINE static Float to_float(Int v) { return _mm512_cvtepi32_ps(v); }
  PICAFLOR_INLINE static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  PICAFLOR_INLINE static Float fused(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }

  // Bytes 0, 2, 4, 6, 1, 3, 5, 7 of each eight that hold low bits, in two blocks of int3 side by side.
  PICAFLOR_INLINE static Int int3_order(Int v) {
    const __m128i even = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i second = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Int order = _mm512_inserti32x4(
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(even), second, 1), first, 2), even, 3);
    return _mm512_shuffle_epi8(v, order);
  }

  // t[j] = word j of all rows, from 64 bytes at each row's pointer + offset.
  template <bool kInt3 = false>
  PICAFLOR_INLINE static void load_words(const uint8_t* const* rows, int64_t offset, Int* t) {
    Int part[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const auto row = [&](int r) __attribute__((always_inline)) {
        const Int v = _mm512_loadu_si512(rows[i + r] + offset);
        return kInt3 ? int3_order(v) : v;
      };
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
#if defined(PICAFLOR_VNNI)
  static constexpr bool kPairs = false;
#else
  static constexpr bool kPairs = true;
#endif
  static constexpr bool kFewRegisters = true;
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
  PICAFLOR_INLINE static Int masked(Int v, int8_t mask) { return _mm256_and_si256(v, _mm256_set1_epi8(mask)); }
  template <int kBits>
  PICAFLOR_INLINE static Int right(Int v) {
    return kBits >= 0 ? _mm256_srli_epi32(v, kBits >= 0 ? kBits : 0) : _mm256_slli_epi32(v, kBits >= 0 ? 0 : -kBits);
  }
  PICAFLOR_INLINE static Int choose(int8_t mask, Int a, Int b) {
    const Int bits = _mm256_set1_epi8(mask);
    return _mm256_or_si256(_mm256_and_si256(bits, a), _mm256_andnot_si256(bits, b));
  }
  PICAFLOR_INLINE static Int high_in_place(Int v) { return _mm256_andnot_si256(_mm256_set1_epi8(15), v); }
  PICAFLOR_INLINE static Int flip_signs(Int v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
  PICAFLOR_INLINE static Int look_up(const uint8_t* table, Int nibbles) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), nibbles);
  }

  PICAFLOR_INLINE static Int half_powers(const uint8_t* p) {
    const Int e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const Int normal = _mm256_slli_epi32(_mm256_sub_epi32(e, set(1)), 23);
    const Int low = _mm256_sllv_epi32(set(0x00200000), e);
    const Int value = _mm256_blendv_epi8(normal, low, _mm256_cmpgt_epi32(set(2), e));
    return _mm256_blendv_epi8(value, set(0x7FC00000), _mm256_cmpeq_epi32(e, set(255)));
  }

#if defined(PICAFLOR_VNNI)
  template <bool>
  PICAFLOR_INLINE static Int dot(Int sum, Int codes, const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    asm(PICAFLOR_VNNI " %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(_mm256_set1_epi32(word)));
    return sum;
  }
  PICAFLOR_INLINE static Int start(Int total, int slot) { return slot == 0 ? total : zero(); }
  template <int kSlots, int kShift>
  PICAFLOR_INLINE static Int finish(Int, const Int* part) {
    const Int second = kShift == 0 ? part[kSlots - 1] : _mm256_srai_epi32(part[kSlots - 1], kShift);
    return kSlots == 2 ? add(part[0], second) : part[0];
  }
#else
  // sum += products of each lane's bytes with the four bytes at x, in pairs, in int16. A pair of codes up to c adds at
  // most 256 c; the caller widens before 32768.
  template <bool>
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
#endif

  PICAFLOR_INLINE static Float zero_float() { return _mm256_setzero_ps(); }
  PICAFLOR_INLINE static Float set_float(float v) { return _mm256_set1_ps(v); }
  PICAFLOR_INLINE static Float load_float(const float* p) { return _mm256_load_ps(p); }
  PICAFLOR_INLINE static void store_float(float* p, Float v) { _mm256_store_ps(p, v); }
  PICAFLOR_INLINE static void store_float_any(float* p, Float v) { _mm256_storeu_ps(p, v); }
  PICAFLOR_INLINE static Float to_float(Int v) { return _mm256_cvtepi32_ps(v); }
  PICAFLOR_INLINE static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  PICAFLOR_INLINE static Float fused(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }

  // t[j] = word j of all rows, from 32 bytes at each row's pointer + offset. kInt3: one block of int3, its eights of
  // low bits in the order 0, 2, 4, 6, 1, 3, 5, 7.
  template <bool kInt3 = false>
  PICAFLOR_INLINE static void load_words(const uint8_t* const* rows, int64_t offset, Int* t) {
    const Int even = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
      Int part[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const auto half = [&](int r) {
          return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset + 16 * q));
        };
        part[k] = _mm256_inserti128_si256(_mm256_castsi128_si256(half(k)), half(k + 4), 1);
        if (kInt3 && q == 0) {
          part[k] = _mm256_shuffle_epi8(part[k], even);
        }
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
#endif
