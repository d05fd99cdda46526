// Where things lie: rows and scales of each stored format, and the parts of a prepared activation row.
// Must not know arithmetic or instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/weight.h"
#include "generated/format_constants.h"

namespace picaflor {

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
constexpr int64_t groups_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

constexpr int64_t kBlock = 64;       // inputs whose digits of one plane lie side by side
constexpr int64_t kBlock8 = 8;       // runs of eight inputs in a block
constexpr int64_t kMaxGroup = 256;   // inputs per activation group, at most
constexpr int32_t kE8Largest = 62;   // largest magnitude of a lattice code
constexpr int32_t kFp4Largest = 12;  // largest magnitude of a doubled mxfp4 code

// Bytes of one stored row of codes.
constexpr int64_t row_bytes(const Weight& w) {
  switch (w.format) {
    case FormatId::f32:
      return w.cols * 4;
    case FormatId::bf16:
    case FormatId::f16:
      return w.cols * 2;
    case FormatId::int8_row:
    case FormatId::fp8_b128:
      return w.cols;
    case FormatId::int4_row:
    case FormatId::int4_grouped:
    case FormatId::mxfp4:
      return (w.cols + 1) / 2;
    case FormatId::int2_row:
      return (w.cols + 3) / 4;
    case FormatId::int3_g64:
      return groups_of(w.cols, kInt3Group) * kInt3BlockBytes;
    case FormatId::e8_iq3:
      return groups_of(w.cols, kE8Block) * kE8BlockBytes;
  }
  return 0;
}

// Bytes of the scales of one row (of one row of tiles for fp8); e8 keeps its scales with the codes.
constexpr int64_t scale_row_bytes(const Weight& w) {
  switch (w.format) {
    case FormatId::f32:
    case FormatId::bf16:
    case FormatId::f16:
    case FormatId::e8_iq3:
      return 0;
    case FormatId::int8_row:
    case FormatId::int4_row:
    case FormatId::int2_row:
      return 4;
    case FormatId::int4_grouped:
      return groups_of(w.cols, w.group) * 4;
    case FormatId::int3_g64:
      return groups_of(w.cols, kInt3Group) * 4;
    case FormatId::mxfp4:
      return groups_of(w.cols, kMxfp4Group);
    case FormatId::fp8_b128:
      return groups_of(w.cols, kFp8Block) * 4;
  }
  return 0;
}

// What is subtracted from a stored or looked-up unsigned code to get the signed one.
constexpr int32_t code_offset(FormatId format) {
  switch (format) {
    case FormatId::int8_row:
      return 128;
    case FormatId::int4_row:
    case FormatId::int4_grouped:
      return kInt4Bias;
    case FormatId::int2_row:
      return kInt2Bias;
    case FormatId::int3_g64:
      return kInt3Bias;
    case FormatId::e8_iq3:
      return kE8Largest;
    case FormatId::mxfp4:
      return kFp4Largest;
    case FormatId::f32:
    case FormatId::bf16:
    case FormatId::f16:
    case FormatId::fp8_b128:
      return 0;
  }
  return 0;
}

// Whether rows are stored rotated: a single one must be turned back, or meet what is rotated.
constexpr bool rotated_rows(FormatId format) { return format == FormatId::e8_iq3; }

// The order of digits that a format's codes meet.
constexpr XLayout layout_of(FormatId format) {
  switch (format) {
    case FormatId::int4_row:
    case FormatId::int4_grouped:
    case FormatId::mxfp4:
      return XLayout::nibbles;
    case FormatId::int2_row:
      return XLayout::quads;
    case FormatId::int3_g64:
      return XLayout::octets;
    case FormatId::int8_row:
    case FormatId::e8_iq3:
    case FormatId::f32:
    case FormatId::bf16:
    case FormatId::f16:
    case FormatId::fp8_b128:
      return XLayout::natural;
  }
  return XLayout::natural;
}

// Where the digit of input i goes; runs of 32 inputs stay together.
constexpr int64_t digit_place(XLayout layout, int64_t i) {
  switch (layout) {
    case XLayout::natural:
      return i;
    case XLayout::nibbles:
      return (i & ~int64_t{7}) + (i & 1) * 4 + (i & 7) / 2;
    case XLayout::quads:
      return (i & ~int64_t{15}) + (i & 3) * 4 + (i & 15) / 4;
    case XLayout::octets:
      return (i & ~int64_t{31}) + (i & 7) * 4 + (i & 31) / 8;
  }
  return i;
}

// A prepared row: float scale per group, int32 sum of the digits' value per group (of the two lower digits where there
// are three), int32 sum of the top digits (three planes only), then blocks of 64 inputs with plane after plane, top
// digit first, zeros behind the last input. A rotated row has room for its floats at the end.
struct XView {
  int64_t groups = 0;
  int64_t sums = 0;  // byte offsets
  int64_t tops = 0;
  int64_t digits = 0;
  int64_t rotated = 0;
  int64_t stride = 0;
  int32_t planes = 0;

  explicit XView(const XSpec& spec) : planes(spec.planes) {
    if (planes == 0) {
      stride = round_up(spec.cols * 4, 64);
      return;
    }
    groups = groups_of(spec.cols, spec.group);
    const int64_t column = round_up(groups, 16) * 4;
    sums = column;
    tops = 2 * column;
    digits = planes == 3 ? 3 * column : 2 * column;
    rotated = digits + round_up(spec.cols, kMaxGroup) * planes;
    stride = rotated + (spec.rotated ? round_up(spec.cols * 4, 64) : 0);
  }

  const float* scale(const std::byte* x) const { return reinterpret_cast<const float*>(x); }
  const int32_t* sum(const std::byte* x) const { return reinterpret_cast<const int32_t*>(x + sums); }
  const int32_t* top(const std::byte* x) const { return reinterpret_cast<const int32_t*>(x + tops); }
  const int8_t* digit(const std::byte* x) const { return reinterpret_cast<const int8_t*>(x + digits); }
};

}  // namespace picaflor
