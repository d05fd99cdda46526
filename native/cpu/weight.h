// What a stored matrix is to the kernels: format, shape, plane addresses.
// Must not know files, tensors' names or Python.
#pragma once

#include <cstdint>

namespace picaflor {

// One number per format, in memory only; never written to disk. Order is that of picaflor.formats.REGISTRY's names.
enum class FormatId : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  int8_row = 3,
  int4_row = 4,
  int2_row = 5,
  int4_grouped = 6,
  int3_g64 = 7,
  e8_iq3 = 8,
  mxfp4 = 9,
  fp8_b128 = 10,
};

// W[rows, cols], row-major as on disk. At least 64 bytes are readable behind each plane.
struct Weight {
  FormatId format = FormatId::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int32_t group = 0;                // int4_grouped only: inputs per scale
  const uint8_t* codes = nullptr;   // plane 0
  const uint8_t* scales = nullptr;  // plane 1, null where the format has none
};

// Order of the digits: as they come; evens then odds of eight inputs (they meet low and high nibbles); columns of a
// 4 x 4 square of sixteen inputs (they meet the four codes of four bytes); columns of a 4 x 8 table of 32 inputs (they
// meet the eight bits of four bytes).
enum class XLayout : int32_t { natural = 0, nibbles = 1, quads = 2, octets = 3 };

// How activations are prepared for a weight: `planes` int8 planes per group of `group` inputs, or floats (planes 0).
struct XSpec {
  int32_t planes = 0;  // 0 float, 1 fast, 2 standard, 3 exact
  int32_t group = 0;
  bool rotated = false;
  XLayout layout = XLayout::natural;
  int64_t cols = 0;

  bool operator==(const XSpec&) const = default;
};

}  // namespace picaflor
