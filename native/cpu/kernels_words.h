// What the two integer loops share: formats as words of codes, scales of a tile, the step at a group's end, prefetch.
// Must not know the loops. Compiled for AVX2, AVX-VNNI and AVX-512 VNNI.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/kernels_codes.h"
#include "cpu/kernels_isa.h"
#include "cpu/kernels_layout.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

// One stored format as 32-bit words. A unit is one word of codes (int3: of low bits); it gives kTerms registers of
// unsigned codes, term k of unit j meets digit word kTerms * j + k. A piece of kUnits units ends where a group may end:
// it takes kPieceWords words. kBlockWords words are loaded at a time. kPairUnits: units whose products fit int16 sums
// (AVX2). Term k goes to sum slot(k); the second slot's codes are multiples of 2^kShift.
struct WholeWords {
  static constexpr bool kSplit = false;
  static constexpr int kShift = 0;
  static constexpr int kBlockWords = Isa::kLanes;
  static constexpr int piece_words(int units) { return units; }
  static constexpr int slots(bool) { return 1; }
  static constexpr int slot(int) { return 0; }
  PICAFLOR_INLINE static void load(const uint8_t* const* rows, int64_t block, Isa::Int* t) {
    Isa::load_words(rows, block * Isa::kLanes * 4, t);
  }
};

struct NibbleWords : WholeWords {
  static constexpr int kTerms = 2;
  static constexpr int kPairUnits = 4;  // 8 * 15 * 256 < 32768
  static constexpr int kShift = Isa::kPairs ? 0 : 4;
  static constexpr int slots(bool own) { return own ? 2 : 1; }
  static constexpr int slot(int term) { return term; }
  template <bool kOwn>
  PICAFLOR_INLINE static void unpack(const Isa::Int* t, int j, Isa::Int* codes) {
    codes[0] = Isa::low_nibbles(t[j]);
    codes[1] = kOwn && kShift != 0 ? Isa::high_in_place(t[j]) : Isa::high_nibbles(t[j]);
  }
};

constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Fp4Words : WholeWords {
  static constexpr int kTerms = 2;
  static constexpr int kPairUnits = 2;  // 4 * 24 * 256 < 32768
  static constexpr int slots(bool own) { return own ? 2 : 1; }
  static constexpr int slot(int term) { return term; }
  template <bool>
  PICAFLOR_INLINE static void unpack(const Isa::Int* t, int j, Isa::Int* codes) {
    codes[0] = Isa::look_up(kFp4Codes, Isa::low_nibbles(t[j]));
    codes[1] = Isa::look_up(kFp4Codes, Isa::high_nibbles(t[j]));
  }
};

// Bytes. Where products are paired in int16 a byte would overflow: it is split in two nibbles, the high one counts 16.
template <bool kFlip>
struct ByteWords : WholeWords {
  static constexpr bool kSplit = Isa::kPairs;
  static constexpr int kTerms = 1;
  static constexpr int kPairUnits = 8;
  static constexpr int slots(bool) { return kSplit ? 2 : 1; }
  template <bool>
  PICAFLOR_INLINE static void unpack(const Isa::Int* t, int j, Isa::Int* codes) {
    const Isa::Int v = kFlip ? Isa::flip_signs(t[j]) : t[j];
    if constexpr (kSplit) {
      codes[0] = Isa::low_nibbles(v);
      codes[1] = Isa::high_nibbles(v);
    } else {
      codes[0] = v;
    }
  }
};

// Four codes to the byte.
struct Int2Words : WholeWords {
  static constexpr int kTerms = 4;
  static constexpr int kPairUnits = 4;  // 16 * 3 * 256 < 32768
  static constexpr int kShift = Isa::kPairs ? 0 : 2;
  static constexpr int slots(bool own) { return own ? 2 : 1; }
  static constexpr int slot(int term) { return term & 1; }
  template <bool kOwn>
  PICAFLOR_INLINE static void unpack(const Isa::Int* t, int j, Isa::Int* codes) {
    constexpr bool kInPlace = kOwn && kShift != 0;
    const Isa::Int high = Isa::right<4>(t[j]);
    codes[0] = Isa::masked(t[j], 3);
    codes[1] = kInPlace ? Isa::masked(t[j], 12) : Isa::masked(Isa::right<2>(t[j]), 3);
    codes[2] = Isa::masked(high, 3);
    codes[3] = kInPlace ? Isa::masked(high, 12) : Isa::masked(Isa::right<6>(t[j]), 3);
  }
};

// A block of int3: four words of low bits in the order of int3_order, then two of high bits. A unit is two words of low
// bits, even and odd ones of eight bytes, and the word of their high bits.
struct Int3Words {
  static constexpr bool kSplit = false;
  static constexpr int kTerms = 8;
  static constexpr int kPairUnits = 2;  // 16 * 7 * 256 < 32768
  static constexpr int kShift = Isa::kPairs ? 0 : 4;
  static constexpr int kBlockWords = Isa::kLanes / 8 * 6;
  static constexpr int piece_words(int) { return 6; }
  static constexpr int slots(bool own) { return own ? 2 : 1; }
  static constexpr int slot(int term) { return term / 4; }
  PICAFLOR_INLINE static void load(const uint8_t* const* rows, int64_t block, Isa::Int* t) {
    Isa::load_words<true>(rows, block * kBlockWords * 4, t);
  }
  template <bool kOwn>
  PICAFLOR_INLINE static void unpack(const Isa::Int* t, int j, Isa::Int* codes) {
    const Isa::Int even = t[2 * j];
    const Isa::Int odd = t[2 * j + 1];
    const Isa::Int high = t[4 + j];
    // Two codes of `even` below two of `odd`; then one of each, with its high bit, in the nibbles of a byte.
    const Isa::Int first = Isa::choose(15, even, Isa::right<-4>(odd));
    const Isa::Int last = Isa::choose(15, Isa::right<4>(even), odd);
    const Isa::Int both[4] = {
        Isa::choose(0x33, first, Isa::right<-2>(high)), Isa::choose(0x33, Isa::right<2>(first), Isa::right<-1>(high)),
        Isa::choose(0x33, last, high), Isa::choose(0x33, Isa::right<2>(last), Isa::right<1>(high))};
    for (int k = 0; k < 4; ++k) {
      codes[k] = Isa::masked(both[k], 7);
      codes[4 + k] = kOwn && kShift != 0 ? Isa::masked(both[k], 0x70) : Isa::masked(Isa::right<4>(both[k]), 7);
    }
  }
};

// Pointers to the rows of one tile; behind the last row it is repeated.
struct TileRows {
  int64_t index[Isa::kLanes];
  const uint8_t* at[Isa::kLanes];

  TileRows(const Weight& w, int64_t row, int64_t row_end) {
    const int64_t nbytes = row_bytes(w);
    for (int r = 0; r < Isa::kLanes; ++r) {
      index[r] = std::min(row + r, row_end - 1);
      at[r] = w.codes + index[r] * nbytes;
    }
  }
};

constexpr bool one_scale_per_row(FormatId format) {
  return format == FormatId::int8_row || format == FormatId::int4_row || format == FormatId::int2_row;
}

// Scales of groups [group, group + kLanes) of a tile: out[g * stride + r]. Reads up to 60 bytes behind the scales.
inline void tile_scales(const Weight& w, const TileRows& rows, int64_t group, int64_t groups, float* out,
                        int64_t stride) {
  constexpr int kLanes = Isa::kLanes;
  const int64_t count = std::min<int64_t>(kLanes, groups - group);
  const int64_t nbytes = scale_row_bytes(w);
  alignas(64) float values[kLanes][kLanes];  // by row, where the scales are not stored as floats
  const uint8_t* at[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    const uint8_t* stored = w.scales + rows.index[r] * nbytes + group * (w.format == FormatId::mxfp4 ? 1 : 4);
    at[r] = reinterpret_cast<const uint8_t*>(values[r]);
    if (w.format == FormatId::int4_grouped || w.format == FormatId::int3_g64) {
      at[r] = stored;
    } else if (w.format == FormatId::mxfp4) {
      Isa::store(values[r], Isa::half_powers(stored));
    } else {
      for (int64_t g = 0; g < count; ++g) {
        values[r][g] = group_scale(w, rows.index[r], group + g);
      }
    }
  }
  Isa::Int words[kLanes];
  Isa::load_words(at, 0, words);
  for (int64_t g = 0; g < count; ++g) {
    Isa::store(out + g * stride, words[g]);
  }
}

// float(exact sum of signed codes times digits) from sums over unsigned codes: of all digits, or with two parts of the
// two lower digits and of the top one.
template <int kParts>
PICAFLOR_INLINE Isa::Float folded_value(Isa::Int low, Isa::Int top, int32_t offset, int32_t digit_sum,
                                        int32_t top_sum) {
  const Isa::Float value = Isa::to_float(Isa::add(low, Isa::set(-offset * digit_sum)));
  if constexpr (kParts == 1) {
    return value;
  } else {
    const Isa::Float high = Isa::to_float(Isa::add(top, Isa::set(-offset * top_sum)));
    return Isa::fused(high, Isa::set_float(65536.0f), value);
  }
}

// The same from the sums of each plane, in digit order.
template <int kPlanes>
PICAFLOR_INLINE Isa::Float group_value(const Isa::Int* sums, int32_t offset, int32_t digit_sum, int32_t top_sum) {
  constexpr int kParts = kPlanes == 3 ? 2 : 1;
  const Isa::Int low = kPlanes == 1 ? sums[0] : Isa::add(Isa::times256(sums[kPlanes == 3 ? 1 : 0]), sums[kPlanes - 1]);
  return folded_value<kParts>(low, sums[0], offset, digit_sum, top_sum);
}

// One call of KernelTable::matmul.
struct Product {
  const Weight& weight;
  const XSpec& spec;
  const std::byte* x;
  int64_t n;
  float* y;
  int64_t y_stride;
  int64_t row_begin;
  int64_t row_end;
  const Ahead& ahead;
};

// The first `count` of the lanes to `out`.
PICAFLOR_INLINE void store_lanes(float* out, Isa::Float v, int64_t count) {
  if (count >= Isa::kLanes) {
    Isa::store_float_any(out, v);
    return;
  }
  alignas(64) float lanes[Isa::kLanes];
  Isa::store_float(lanes, v);
  for (int64_t r = 0; r < count; ++r) {
    out[r] = lanes[r];
  }
}

// The group data of the first prepared row.
struct GroupData {
  const float* scale;
  const int32_t* sum;
  const int32_t* top;

  GroupData(const XView& view, const std::byte* x) : scale(view.scale(x)), sum(view.sum(x)), top(view.top(x)) {}
};

// How near to the core prefetched lines go: all caches, or all but the first.
constexpr int kNear = 3;
constexpr int kMiddle = 2;

// Tells the caches about a run of bytes in equal shares, one share per step of a loop.
class Fetcher {
 public:
  Fetcher(const uint8_t* begin, int64_t nbytes, int64_t steps)
      : at_(begin), lines_(groups_of(groups_of(nbytes, 64), std::max<int64_t>(steps, 1))), end_(begin + nbytes) {}

  template <int kHint>
  PICAFLOR_INLINE void step() {
    constexpr int64_t kTile = Isa::kLanes * Isa::kLanes * 4 / 64;  // lines of one block of a tile
    if (lines_ == kTile && end_ - at_ >= kTile * 64) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTile; ++i) {
        __builtin_prefetch(at_ + i * 64, 0, kHint);
      }
      at_ += kTile * 64;
      return;
    }
    for (int64_t i = 0; i < lines_ && at_ < end_; ++i, at_ += 64) {
      __builtin_prefetch(at_, 0, kHint);
    }
  }

 private:
  const uint8_t* at_;
  int64_t lines_;
  const uint8_t* end_;
};

// What will be read after the tile of `w` that starts at `row`: the next tile, or the first one of `ahead`.
struct NextTile {
  const Weight* weight;
  int64_t row;
  int64_t rows;

  NextTile(const Weight& w, int64_t row_now, int64_t row_end, int64_t tile, const Ahead& ahead)
      : weight(&w), row(row_now + tile), rows(std::min(tile, row_end - row)) {
    if (rows <= 0) {
      weight = ahead.weight;
      row = ahead.row_begin;
      rows = weight == nullptr ? 0 : std::min(tile, ahead.row_end - row);
    }
  }

  Fetcher codes(int64_t steps) const {
    if (rows <= 0) {
      return {nullptr, 0, steps};
    }
    const int64_t nbytes = row_bytes(*weight);
    return {weight->codes + row * nbytes, rows * nbytes, steps};
  }

  Fetcher scales(int64_t steps) const {
    if (rows <= 0 || weight->scales == nullptr || weight->format == FormatId::fp8_b128) {
      return {nullptr, 0, steps};
    }
    const int64_t nbytes = scale_row_bytes(*weight);
    return {weight->scales + row * nbytes, rows * nbytes, steps};
  }
};

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
