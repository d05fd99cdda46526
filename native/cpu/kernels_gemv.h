// Integer-coded matrix times one to eight prepared rows, straight from the stored words.
// Must not know threads or files. Compiled for AVX2, AVX-VNNI and AVX-512 VNNI.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/kernels_words.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

// sums[s][p] += codes of a piece of kUnits units at t times the digits at x + s * stride, plane p 64 bytes after plane
// p - 1. The digits of a piece lie in one block.
template <class Words, int kPlanes, int kTokens, int kUnits>
PICAFLOR_INLINE void dot_words(const Isa::Int* t, const int8_t* x, int64_t stride, Isa::Int (*sums)[kPlanes]) {
  // Few chains of dependent sums: one more hides the latency.
  constexpr bool kOwn = !Isa::kPairs && kTokens * kPlanes <= 4;
  constexpr int kSlots = Words::slots(kOwn);
  constexpr int kParts = Words::kSplit ? 2 : 1;  // registers per term
  constexpr int kChunk = Isa::kPairs ? std::min(kUnits, Words::kPairUnits) : kUnits;
  for (int begin = 0; begin < kUnits; begin += kChunk) {
    Isa::Int part[kTokens][kPlanes][kSlots];
    for (int s = 0; s < kTokens; ++s) {
      for (int p = 0; p < kPlanes; ++p) {
        for (int k = 0; k < kSlots; ++k) {
          part[s][p][k] = Isa::start(sums[s][p], k);
        }
      }
    }
#pragma GCC unroll 16
    for (int j = begin; j < begin + kChunk; ++j) {
      Isa::Int codes[Words::kTerms * kParts];
      Words::template unpack<kOwn>(t, j, codes);
      for (int k = 0; k < Words::kTerms * kParts; ++k) {
        const int slot = Words::kSplit ? k : kSlots == 1 ? 0 : Words::slot(k);
        for (int s = 0; s < kTokens; ++s) {
          for (int p = 0; p < kPlanes; ++p) {
            const int8_t* four = x + s * stride + p * kBlock + 4 * (j * Words::kTerms + k / kParts);
            part[s][p][slot] = Isa::template dot<true>(part[s][p][slot], codes[k], four);
          }
        }
      }
    }
    for (int s = 0; s < kTokens; ++s) {
      for (int p = 0; p < kPlanes; ++p) {
        sums[s][p] = Isa::template finish<kSlots, Words::kShift>(sums[s][p], part[s][p]);
      }
    }
  }
}

// The loop of contracts.md over tiles of kLanes rows, a piece of kUnits units at a time; pieces divide a group.
template <class Words, int kPlanes, int kTokens, int kUnits>
void gemv(const Product& a) {
  constexpr int kLanes = Isa::kLanes;
  constexpr int kInputs = 4 * Words::kTerms * kUnits;  // per piece
  constexpr int kPieceWords = Words::piece_words(kUnits);
  constexpr int kPieces = Words::kBlockWords / kPieceWords;  // per block
  const Weight& w = a.weight;
  const XView view(a.spec);
  const int64_t pieces = groups_of(w.cols, kInputs);
  const int64_t blocks = groups_of(pieces, kPieces);
  const int64_t group_pieces = a.spec.group / kInputs;
  const int32_t offset = code_offset(w.format);
  const bool row_scale = one_scale_per_row(w.format);
  const int8_t* digits = view.digit(a.x);
  const GroupData data(view, a.x);
  alignas(64) float scales[kLanes][kLanes];

  for (int64_t row = a.row_begin; row < a.row_end; row += kLanes) {
    const TileRows rows(w, row, a.row_end);
    const NextTile next(w, row, a.row_end, kLanes, a.ahead);
    Fetcher next_codes = next.codes(blocks);
    Fetcher next_scales = next.scales(blocks);
    Isa::Float y[kTokens];
    Isa::Int sums[kTokens][kPlanes];
    for (int s = 0; s < kTokens; ++s) {
      y[s] = Isa::zero_float();
      for (int p = 0; p < kPlanes; ++p) {
        sums[s][p] = Isa::zero();
      }
    }
    if (row_scale) {
      tile_scales(w, rows, 0, 1, scales[0], kLanes);
    }
    int64_t group = 0;
    int64_t left = group_pieces;
    const auto end_group = [&] {
      if (!row_scale && group % kLanes == 0) {
        tile_scales(w, rows, group, view.groups, scales[0], kLanes);
      }
      const Isa::Float scale = Isa::load_float(scales[row_scale ? 0 : group % kLanes]);
      for (int s = 0; s < kTokens; ++s) {
        const int64_t skip = s * view.stride / 4 + group;
        const Isa::Float value =
            group_value<kPlanes>(sums[s], offset, data.sum[skip], kPlanes == 3 ? data.top[skip] : 0);
        y[s] = Isa::fused(value, Isa::multiply(scale, Isa::set_float(data.scale[skip])), y[s]);
        for (int p = 0; p < kPlanes; ++p) {
          sums[s][p] = Isa::zero();
        }
      }
      ++group;
      left = group_pieces;
    };
    for (int64_t block = 0; block < blocks; ++block) {
      next_codes.step<kMiddle>();
      next_scales.step<kMiddle>();
      Isa::Int t[kLanes];
      Words::load(rows.at, block, t);
      const int64_t first = block * kPieces;
      const int64_t count = std::min<int64_t>(kPieces, pieces - first);
      const int64_t digit = first * (kInputs / 4);  // word of digits; sixteen are a block of one plane
      const int8_t* start = digits + digit / 16 * (kBlock * kPlanes) + digit % 16 * 4;
      const auto piece = [&](int64_t j) __attribute__((always_inline)) {
        const int64_t word = j * (kInputs / 4);
        const int8_t* x = start + word / 16 * (kBlock * kPlanes) + word % 16 * 4;
        dot_words<Words, kPlanes, kTokens, kUnits>(t + j * kPieceWords, x, view.stride, sums);
        if (--left == 0) {
          end_group();
        }
      };
      if (count == kPieces) {
#pragma GCC unroll 8
        for (int j = 0; j < kPieces; ++j) {
          piece(j);
        }
      } else {
        for (int64_t j = 0; j < count; ++j) {
          piece(j);
        }
      }
    }
    if (left != group_pieces) {
      end_group();
    }
    for (int s = 0; s < kTokens; ++s) {
      store_lanes(a.y + s * a.y_stride + row, y[s], a.row_end - row);
    }
  }
}

using GemvFn = void (*)(const Product&);

// How many of n rows the next pass takes.
constexpr int64_t gemv_rows(int64_t n) { return n >= 8 ? 8 : n >= 6 ? 6 : n >= 4 ? 4 : n; }

template <class Words, int kUnits, int kPlanes>
GemvFn gemv_of_tokens(int64_t n) {
  switch (n) {
    case 1:
      return gemv<Words, kPlanes, 1, kUnits>;
    case 2:
      return gemv<Words, kPlanes, 2, kUnits>;
    case 3:
      return gemv<Words, kPlanes, 3, kUnits>;
    case 4:
      return gemv<Words, kPlanes, 4, kUnits>;
    case 6:
      return gemv<Words, kPlanes, 6, kUnits>;
    case 8:
      return gemv<Words, kPlanes, 8, kUnits>;
  }
  return nullptr;
}

template <class Words, int kUnits>
GemvFn gemv_of_planes(int32_t planes, int64_t n) {
  switch (planes) {
    case 1:
      return gemv_of_tokens<Words, kUnits, 1>(n);
    case 2:
      return gemv_of_tokens<Words, kUnits, 2>(n);
    case 3:
      return gemv_of_tokens<Words, kUnits, 3>(n);
  }
  return nullptr;
}

template <class Words, int kUnits>
GemvFn gemv_alone(int32_t planes) {
  switch (planes) {
    case 1:
      return gemv<Words, 1, 1, kUnits>;
    case 2:
      return gemv<Words, 2, 1, kUnits>;
    case 3:
      return gemv<Words, 3, 1, kUnits>;
  }
  return nullptr;
}

// The loop for n = gemv_rows(n) rows of this format; null where the format has none.
inline GemvFn find_gemv(FormatId format, const XSpec& spec, int64_t n) {
  switch (format) {
    case FormatId::int4_row:
    case FormatId::int4_grouped:
      if (spec.group % 64 == 0 && n == 1) {  // where memory can be the limit
        return gemv_alone<NibbleWords, 8>(spec.planes);
      }
      if (spec.group % 32 == 0) {
        return gemv_of_planes<NibbleWords, 4>(spec.planes, n);
      }
      return gemv_of_planes<NibbleWords, 2>(spec.planes, n);
    case FormatId::mxfp4:
      return gemv_of_planes<Fp4Words, 4>(spec.planes, n);
    case FormatId::int8_row:
      return gemv_of_planes<ByteWords<true>, 8>(spec.planes, n);
    case FormatId::int2_row:
      return gemv_of_planes<Int2Words, 4>(spec.planes, n);
    case FormatId::int3_g64:
      return gemv_of_planes<Int3Words, 2>(spec.planes, n);
    case FormatId::e8_iq3:
    case FormatId::f32:
    case FormatId::bf16:
    case FormatId::f16:
    case FormatId::fp8_b128:
      return nullptr;
  }
  return nullptr;
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
