// Integer vector primitives of NEON with dot products: eight lanes in two registers, like AVX2's.
// Must not know formats, activations or loops.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/vec16.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

struct Isa {
  static constexpr int kLanes = 8;
  static constexpr bool kPairs = true;  // codes are small here because the dot product is of signed bytes
  static constexpr bool kFewRegisters = true;
  struct Int {
    int32x4_t lo, hi;
  };
  struct Float {
    float32x4_t lo, hi;
  };

  PICAFLOR_INLINE static Int set(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
  PICAFLOR_INLINE static Int zero() { return set(0); }
  PICAFLOR_INLINE static Int load(const void* p) {
    const auto* words = static_cast<const int32_t*>(p);
    return {vld1q_s32(words), vld1q_s32(words + 4)};
  }
  PICAFLOR_INLINE static void store(void* p, Int v) {
    auto* words = static_cast<int32_t*>(p);
    vst1q_s32(words, v.lo);
    vst1q_s32(words + 4, v.hi);
  }
  PICAFLOR_INLINE static Int add(Int a, Int b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
  PICAFLOR_INLINE static Int times256(Int a) { return {vshlq_n_s32(a.lo, 8), vshlq_n_s32(a.hi, 8)}; }
  PICAFLOR_INLINE static uint8x16_t bytes(int32x4_t v) { return vreinterpretq_u8_s32(v); }
  PICAFLOR_INLINE static int32x4_t words(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
  PICAFLOR_INLINE static Int masked(Int v, int8_t mask) {
    const uint8x16_t m = vdupq_n_u8(static_cast<uint8_t>(mask));
    return {words(vandq_u8(bytes(v.lo), m)), words(vandq_u8(bytes(v.hi), m))};
  }
  PICAFLOR_INLINE static Int low_nibbles(Int v) { return masked(v, 15); }
  PICAFLOR_INLINE static Int high_nibbles(Int v) {
    return {words(vshrq_n_u8(bytes(v.lo), 4)), words(vshrq_n_u8(bytes(v.hi), 4))};
  }
  PICAFLOR_INLINE static Int high_in_place(Int v) { return masked(v, -16); }
  PICAFLOR_INLINE static Int flip_signs(Int v) {
    const uint8x16_t sign = vdupq_n_u8(0x80);
    return {words(veorq_u8(bytes(v.lo), sign)), words(veorq_u8(bytes(v.hi), sign))};
  }
  template <int kBits>
  PICAFLOR_INLINE static Int right(Int v) {
    const int32x4_t by = vdupq_n_s32(-kBits);
    const auto shift = [&](int32x4_t part) {
      return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(part), by));
    };
    return {shift(v.lo), shift(v.hi)};
  }
  PICAFLOR_INLINE static Int choose(int8_t mask, Int a, Int b) {
    const uint8x16_t m = vdupq_n_u8(static_cast<uint8_t>(mask));
    return {words(vbslq_u8(m, bytes(a.lo), bytes(b.lo))), words(vbslq_u8(m, bytes(a.hi), bytes(b.hi)))};
  }
  PICAFLOR_INLINE static Int look_up(const uint8_t* table, Int v) {
    const uint8x16_t t = vld1q_u8(table);
    const Int index = low_nibbles(v);
    return {words(vqtbl1q_u8(t, bytes(index.lo))), words(vqtbl1q_u8(t, bytes(index.hi)))};
  }

  PICAFLOR_INLINE static int32x4_t half_powers4(uint32x4_t e) {
    const uint32x4_t normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
    const uint32x4_t low = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(e));
    const uint32x4_t value = vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), low, normal);
    return vreinterpretq_s32_u32(vbslq_u32(vceqq_u32(e, vdupq_n_u32(255)), vdupq_n_u32(0x7FC00000), value));
  }
  PICAFLOR_INLINE static Int half_powers(const uint8_t* p) {
    const uint16x8_t e = vmovl_u8(vld1_u8(p));
    return {half_powers4(vmovl_u16(vget_low_u16(e))), half_powers4(vmovl_u16(vget_high_u16(e)))};
  }

  // sum += the four products of each lane's bytes, all below 128, with the four bytes at x.
  template <bool>
  PICAFLOR_INLINE static Int dot(Int sum, Int codes, const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(word));
    return {vdotq_s32(sum.lo, vreinterpretq_s8_s32(codes.lo), four),
            vdotq_s32(sum.hi, vreinterpretq_s8_s32(codes.hi), four)};
  }
  PICAFLOR_INLINE static Int start(Int, int) { return zero(); }
  // The second of two partial sums counts 16 times.
  template <int kSlots, int>
  PICAFLOR_INLINE static Int finish(Int total, const Int* part) {
    Int out = add(total, part[0]);
    if constexpr (kSlots == 2) {
      out = add(out, {vshlq_n_s32(part[1].lo, 4), vshlq_n_s32(part[1].hi, 4)});
    }
    return out;
  }

  PICAFLOR_INLINE static Float set_float(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
  PICAFLOR_INLINE static Float zero_float() { return set_float(0.0f); }
  PICAFLOR_INLINE static Float load_float(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  PICAFLOR_INLINE static void store_float(float* p, Float v) {
    vst1q_f32(p, v.lo);
    vst1q_f32(p + 4, v.hi);
  }
  PICAFLOR_INLINE static void store_float_any(float* p, Float v) { store_float(p, v); }
  PICAFLOR_INLINE static Float to_float(Int v) { return {vcvtq_f32_s32(v.lo), vcvtq_f32_s32(v.hi)}; }
  PICAFLOR_INLINE static Float multiply(Float a, Float b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
  PICAFLOR_INLINE static Float fused(Float a, Float b, Float c) {
    return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)};
  }

  // t[k] = word k of four rows, from 16 bytes at each row's pointer + offset. kSplit: each eight bytes in the order
  // 0, 2, 4, 6, 1, 3, 5, 7 first.
  template <bool kSplit>
  PICAFLOR_INLINE static void four_words(const uint8_t* const* rows, int64_t offset, int32x4_t* t) {
    constexpr uint8_t kEven[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    int32x4_t row[4];
    for (int r = 0; r < 4; ++r) {
      const uint8x16_t v = vld1q_u8(rows[r] + offset);
      row[r] = words(kSplit ? vqtbl1q_u8(v, vld1q_u8(kEven)) : v);
    }
    const int64x2_t a = vreinterpretq_s64_s32(vtrn1q_s32(row[0], row[1]));
    const int64x2_t b = vreinterpretq_s64_s32(vtrn2q_s32(row[0], row[1]));
    const int64x2_t c = vreinterpretq_s64_s32(vtrn1q_s32(row[2], row[3]));
    const int64x2_t d = vreinterpretq_s64_s32(vtrn2q_s32(row[2], row[3]));
    t[0] = vreinterpretq_s32_s64(vtrn1q_s64(a, c));
    t[1] = vreinterpretq_s32_s64(vtrn1q_s64(b, d));
    t[2] = vreinterpretq_s32_s64(vtrn2q_s64(a, c));
    t[3] = vreinterpretq_s32_s64(vtrn2q_s64(b, d));
  }

  // t[j] = word j of all rows, from 32 bytes at each row's pointer + offset. kInt3: as AVX2's.
  template <bool kInt3 = false>
  PICAFLOR_INLINE static void load_words(const uint8_t* const* rows, int64_t offset, Int* t) {
    int32x4_t part[2][8];
    for (int h = 0; h < 2; ++h) {
      four_words<kInt3>(rows + 4 * h, offset, part[h]);
      four_words<false>(rows + 4 * h, offset + 16, part[h] + 4);
    }
    for (int j = 0; j < 8; ++j) {
      t[j] = {part[0][j], part[1][j]};
    }
  }
};

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
