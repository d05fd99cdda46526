// Decode primitives of the integer-coded formats: unsigned codes in input order, and the scale of a run of inputs.
// Must not know activations or vectors. Compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/kernels_layout.h"
#include "cpu/vec16.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

inline float float_at(const uint8_t* p, int64_t index) {
  float value;
  std::memcpy(&value, p + index * 4, 4);
  return value;
}

// Exact value of a half-precision float.
inline float half_value(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7FFF;
  if (rest >= 0x7C00) {
    return __builtin_bit_cast(float, sign | 0x7F800000u | ((rest & 0x3FF) << 13));
  }
  // The half's exponent field read as a float's is 112 too small; the product is exact, also for subnormals.
  return __builtin_bit_cast(float, sign | (rest << 13)) * 0x1p112f;
}

// 2^(e - 127) / 2, the scale that meets doubled mxfp4 codes; 255 is NaN.
inline float half_e8m0(uint8_t e) {
  const uint32_t bits = e == 255 ? 0x7FC00000u : e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
  return __builtin_bit_cast(float, bits);
}

// Bits of `source`, low first, to the positions set in `mask`.
inline uint64_t deposit(uint64_t source, uint64_t mask) {
#if defined(__BMI2__)
  return _pdep_u64(source, mask);
#else
  uint64_t out = 0;
  for (; mask != 0; mask &= mask - 1) {
    out |= (source & 1) != 0 ? mask & (0 - mask) : 0;
    source >>= 1;
  }
  return out;
#endif
}

constexpr uint64_t kEachByte = 0x0101010101010101u;

inline void store8(uint8_t* out, uint64_t codes) { std::memcpy(out, &codes, 8); }

inline uint64_t eight_nibbles(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return deposit(word, 0x0F * kEachByte);
}

inline uint64_t eight_int2(const uint8_t* p) {
  uint16_t word;
  std::memcpy(&word, p, 2);
  return deposit(word, 0x03 * kEachByte);
}

// Eight codes from two bytes of low bits and one of high bits.
inline uint64_t eight_int3(const uint8_t* block, int64_t eighth) {
  return eight_int2(block + 2 * eighth) | deposit(block[kInt3LowBytes + eighth], 4 * kEachByte);
}

// Eight lattice codes: `lane` of sub-block `sub`; 62 + code, so that no byte is negative.
inline uint64_t eight_e8(const uint8_t* block, int64_t sub, int64_t lane) {
  uint32_t low;
  uint32_t high;
  std::memcpy(&low, kE8Grid[block[8 * sub + 2 * lane]], 4);
  std::memcpy(&high, kE8Grid[block[8 * sub + 2 * lane + 1]], 4);
  const uint64_t magnitude = low | static_cast<uint64_t>(high) << 32;
  uint32_t word;
  std::memcpy(&word, block + kE8IndexBytes + 4 * sub, 4);
  uint32_t signs = (word >> (7 * lane)) & 0x7F;
  signs |= static_cast<uint32_t>(__builtin_parity(signs)) << 7;
  const uint64_t negative = deposit(signs, kEachByte) * 0xFF;
  const uint64_t middle = kE8Largest * kEachByte;
  return ((middle + magnitude) & ~negative) | ((middle - magnitude) & negative);
}

// Unsigned codes of inputs [begin, begin + count) of a row into out; begin and count multiples of 8. Codes behind
// the last input are anything.
inline void decode_codes(FormatId format, const uint8_t* row, int64_t begin, int64_t count, uint8_t* out) {
  switch (format) {
    case FormatId::int8_row:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = row[begin + i] ^ 0x80;
      }
      return;
    case FormatId::int4_row:
    case FormatId::int4_grouped:
      for (int64_t i = 0; i < count; i += 8) {
        store8(out + i, eight_nibbles(row + (begin + i) / 2));
      }
      return;
    case FormatId::mxfp4:
      for (int64_t i = 0; i < count; i += 8) {
        store8(out + i, eight_nibbles(row + (begin + i) / 2));
        for (int64_t j = i; j < i + 8; ++j) {
          out[j] = static_cast<uint8_t>(kFp4Doubled[out[j]] + kFp4Largest);
        }
      }
      return;
    case FormatId::int2_row:
      for (int64_t i = 0; i < count; i += 8) {
        store8(out + i, eight_int2(row + (begin + i) / 4));
      }
      return;
    case FormatId::int3_g64:
      for (int64_t i = 0; i < count; i += 8) {
        const int64_t at = begin + i;
        store8(out + i, eight_int3(row + at / kInt3Group * kInt3BlockBytes, at % kInt3Group / 8));
      }
      return;
    case FormatId::e8_iq3:
      for (int64_t i = 0; i < count; i += 8) {
        const int64_t at = begin + i;
        const int64_t inside = at % kE8Block;
        store8(out + i, eight_e8(row + at / kE8Block * kE8BlockBytes, inside / kE8SubBlock, inside % kE8SubBlock / 8));
      }
      return;
    case FormatId::f32:
    case FormatId::bf16:
    case FormatId::f16:
    case FormatId::fp8_b128:
      return;
  }
}

// The scale that meets the codes of activation group `group` of `row`.
inline float group_scale(const Weight& w, int64_t row, int64_t group) {
  const uint8_t* scales = w.scales + row * scale_row_bytes(w);
  switch (w.format) {
    case FormatId::int8_row:
    case FormatId::int4_row:
    case FormatId::int2_row:
      return float_at(scales, 0);
    case FormatId::int4_grouped:
    case FormatId::int3_g64:
      return float_at(scales, group);
    case FormatId::mxfp4:
      return half_e8m0(scales[group]);
    case FormatId::e8_iq3: {
      const int64_t per_block = kE8Block / kE8SubBlock;
      const uint8_t* block = w.codes + row * row_bytes(w) + group / per_block * kE8BlockBytes;
      uint16_t d;
      std::memcpy(&d, block + kE8ScaleOffset, 2);
      const uint8_t code = block[kE8IndexBytes + 4 * (group % per_block) + 3] >> 4;
      return half_value(d) * (0.5f + static_cast<float>(code)) * 0.5f * 0.5f;
    }
    case FormatId::f32:
    case FormatId::bf16:
    case FormatId::f16:
    case FormatId::fp8_b128:
      return 0.0f;
  }
  return 0.0f;
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
