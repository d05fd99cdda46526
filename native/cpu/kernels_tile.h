// Integer-coded matrix times many prepared rows, or any format without a loop of its own: codes of two tiles of rows
// are unpacked to columns in cache, then met by one small block of prepared rows after the other.
// Must not know threads or files. Compiled for AVX2, AVX-VNNI and AVX-512 VNNI.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cpu/kernels_prepare.h"
#include "cpu/kernels_words.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

constexpr int kHalves = 2;  // tiles of kLanes rows side by side
constexpr int64_t kTileRows = kHalves * Isa::kLanes;
constexpr int64_t kChunkInputs = 512;  // at most; whole groups
constexpr int64_t kChunkWords = kChunkInputs / 4;
constexpr int64_t kChunkGroups = kChunkInputs / 16;
constexpr int64_t kTokenBlock = 128;  // prepared rows per unpacking
constexpr int kRun = 4;               // digit words between group ends, and per int16 sum

// Codes and scales of two tiles over one chunk of inputs. Column of digit word k: [half][slot][kLanes * 4 bytes].
struct Columns {
  alignas(64) uint8_t codes[kChunkWords * kHalves * (Isa::kPairs ? 2 : 1) * Isa::kLanes * 4];
  alignas(64) float scales[kChunkGroups * kTileRows];
  alignas(64) float acc[kTokenBlock * kTileRows];
  alignas(64) uint8_t decoded[Isa::kLanes * kChunkInputs];
};

template <bool kSplit>
constexpr int64_t column_bytes() {
  return kHalves * (kSplit ? 2 : 1) * Isa::kLanes * 4;
}

// `words` stored words of kLanes rows, from `offset` bytes on, to columns of half `half`.
template <class Words>
inline void unpack_words(const uint8_t* const* rows, int64_t offset, int64_t words, int half, uint8_t* columns) {
  constexpr int64_t kColumn = column_bytes<Words::kSplit>();
  constexpr int64_t kRegister = Isa::kLanes * 4;
  constexpr int kSlots = Words::kSplit ? 2 : 1;
  for (int64_t first = 0; first < words; first += Isa::kLanes) {
    Isa::Int t[Isa::kLanes];
    Isa::load_words(rows, offset + first * 4, t);
#pragma GCC unroll 16
    for (int j = 0; j < Isa::kLanes; ++j) {
      Isa::Int codes[Words::kTerms * kSlots];
      Words::template unpack<false>(t, j, codes);
      for (int k = 0; k < Words::kTerms * kSlots; ++k) {
        const int64_t column = (first + j) * Words::kTerms + k / kSlots;
        const int slot = Words::kSplit ? k : 0;
        Isa::store(columns + column * kColumn + (half * kSlots + slot) * kRegister, codes[k]);
      }
    }
  }
}

// One pass over a chunk: what the token blocks need to know.
struct Chunk {
  const Columns& columns;
  int64_t begin;   // first input
  int64_t inputs;  // real ones
  int64_t group_inputs;
  int64_t scale_stride;  // floats from one group's scales to the next; 0: one scale per row
  int32_t offset;
};

// sums += products of one run of digit words: `codes` their columns, `x[s] + at` the digits of prepared row s.
template <int kPlanes, int kTokens, bool kSplit>
PICAFLOR_INLINE void meet_run(const uint8_t* codes, const int8_t* const* x, int64_t at,
                              Isa::Int (*sums)[kHalves][kPlanes]) {
  static_assert(Isa::kPairs || !kSplit);
  constexpr int kSlots = kSplit ? 2 : 1;
  constexpr int64_t kRegister = Isa::kLanes * 4;
  Isa::Int part[kTokens][kHalves][kPlanes][kSlots];
  if constexpr (Isa::kPairs) {
    for (int s = 0; s < kTokens; ++s) {
      for (int h = 0; h < kHalves; ++h) {
        for (int p = 0; p < kPlanes; ++p) {
          for (int k = 0; k < kSlots; ++k) {
            part[s][h][p][k] = Isa::start(sums[s][h][p], k);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kRun; ++j) {
    Isa::Int code[kHalves][kSlots];
    for (int h = 0; h < kHalves; ++h) {
      for (int k = 0; k < kSlots; ++k) {
        code[h][k] = Isa::load(codes + j * column_bytes<kSplit>() + (h * kSlots + k) * kRegister);
      }
    }
    for (int s = 0; s < kTokens; ++s) {
      for (int p = 0; p < kPlanes; ++p) {
        const int8_t* four = x[s] + at + p * kBlock + 4 * j;
        for (int h = 0; h < kHalves; ++h) {
          for (int k = 0; k < kSlots; ++k) {
            Isa::Int& sum = Isa::kPairs ? part[s][h][p][k] : sums[s][h][p];
            sum = Isa::template dot<false>(sum, code[h][k], four);
          }
        }
      }
    }
  }
  if constexpr (Isa::kPairs) {
    for (int s = 0; s < kTokens; ++s) {
      for (int h = 0; h < kHalves; ++h) {
        for (int p = 0; p < kPlanes; ++p) {
          sums[s][h][p] = Isa::template finish<kSlots, 0>(sums[s][h][p], part[s][h][p]);
        }
      }
    }
  }
}

// acc += chunk times kTokens prepared rows.
template <int kPlanes, int kTokens, bool kSplit>
void meet_tokens(const Chunk& chunk, const XView& view, const std::byte* x, float* acc) {
  constexpr int kParts = kPlanes == 3 ? 2 : 1;
  const int64_t first_group = chunk.begin / chunk.group_inputs;
  const int64_t groups = groups_of(chunk.inputs, chunk.group_inputs);
  const int8_t* digits[kTokens];
  const float* x_scales[kTokens];
  int32_t start[kTokens][kParts][kChunkGroups];  // minus what the codes' offset adds
  for (int s = 0; s < kTokens; ++s) {
    const std::byte* row = x + s * view.stride;
    digits[s] = view.digit(row) + chunk.begin / kBlock * kBlock * kPlanes;
    x_scales[s] = view.scale(row) + first_group;
    for (int part = 0; part < kParts; ++part) {
      const int32_t* sum = (part == 0 ? view.sum(row) : view.top(row)) + first_group;
      for (int64_t g = 0; g < groups; ++g) {
        start[s][part][g] = -chunk.offset * sum[g];
      }
    }
  }
  const float* scales = chunk.columns.scales;
  const uint8_t* codes = chunk.columns.codes;
  Isa::Float y[kTokens][kHalves];
  for (int s = 0; s < kTokens; ++s) {
    for (int h = 0; h < kHalves; ++h) {
      y[s][h] = Isa::load_float(acc + s * kTileRows + h * Isa::kLanes);
    }
  }
  for (int64_t g = 0; g < groups; ++g, scales += chunk.scale_stride) {
    const int64_t first = g * chunk.group_inputs;
    const int64_t end = first / 4 + round_up(groups_of(std::min(chunk.group_inputs, chunk.inputs - first), 4), kRun);
    Isa::Int sums[kTokens][kHalves][kPlanes];
    for (int s = 0; s < kTokens; ++s) {
      for (int h = 0; h < kHalves; ++h) {
        std::fill_n(sums[s][h], kPlanes, Isa::zero());
        if constexpr (kPlanes == 3) {
          sums[s][h][0] = Isa::set(start[s][1][g]);
        }
        sums[s][h][kPlanes - 1] = Isa::set(start[s][0][g]);
      }
    }
    for (int64_t word = first / 4; word < end; word += kRun) {
      meet_run<kPlanes, kTokens, kSplit>(codes, digits, word / 16 * (kBlock * kPlanes) + word % 16 * 4, sums);
      codes += kRun * column_bytes<kSplit>();
    }
    for (int s = 0; s < kTokens; ++s) {
      const Isa::Float x_scale = Isa::set_float(x_scales[s][g]);
      for (int h = 0; h < kHalves; ++h) {
        const Isa::Float value = group_value<kPlanes>(sums[s][h], 0, 0, 0);
        const Isa::Float scale = Isa::multiply(Isa::load_float(scales + h * Isa::kLanes), x_scale);
        y[s][h] = Isa::fused(value, scale, y[s][h]);
      }
    }
  }
  for (int s = 0; s < kTokens; ++s) {
    for (int h = 0; h < kHalves; ++h) {
      Isa::store_float(acc + s * kTileRows + h * Isa::kLanes, y[s][h]);
    }
  }
}

template <int kPlanes, bool kSplit>
void meet_all(const Chunk& chunk, const XView& view, const std::byte* x, int64_t n, float* acc) {
  constexpr int kMost = Isa::kFewRegisters ? (kSplit || kPlanes == 3 ? 1
                                              : kPlanes == 2         ? 2
                                                                     : 4)
                                           : (kPlanes == 1   ? 8
                                              : kPlanes == 2 ? 4
                                                             : 3);
  int64_t s = 0;
  for (; s + kMost <= n; s += kMost) {
    meet_tokens<kPlanes, kMost, kSplit>(chunk, view, x + s * view.stride, acc + s * kTileRows);
  }
  if constexpr (kMost > 2) {
    for (; s + 2 <= n; s += 2) {
      meet_tokens<kPlanes, 2, kSplit>(chunk, view, x + s * view.stride, acc + s * kTileRows);
    }
  }
  for (; s < n; ++s) {
    meet_tokens<kPlanes, 1, kSplit>(chunk, view, x + s * view.stride, acc + s * kTileRows);
  }
}

template <bool kSplit>
void meet(const Chunk& chunk, const XView& view, const std::byte* x, int64_t n, float* acc) {
  switch (view.planes) {
    case 1:
      return meet_all<1, kSplit>(chunk, view, x, n, acc);
    case 2:
      return meet_all<2, kSplit>(chunk, view, x, n, acc);
    case 3:
      return meet_all<3, kSplit>(chunk, view, x, n, acc);
  }
}

// Codes of one tile over [begin, begin + inputs) to the columns of half `half`.
inline void unpack_tile(const Weight& w, const TileRows& rows, int64_t begin, int64_t inputs, int half,
                        Columns& columns) {
  switch (w.format) {
    case FormatId::int4_row:
    case FormatId::int4_grouped:
      return unpack_words<NibbleWords>(rows.at, begin / 2, groups_of(inputs, 8), half, columns.codes);
    case FormatId::mxfp4:
      return unpack_words<Fp4Words>(rows.at, begin / 2, groups_of(inputs, 8), half, columns.codes);
    case FormatId::int8_row:
      return unpack_words<ByteWords<true>>(rows.at, begin, groups_of(inputs, 4), half, columns.codes);
    case FormatId::int2_row:
      return unpack_words<Int2Words>(rows.at, begin / 4, groups_of(inputs, 16), half, columns.codes);
    case FormatId::int3_g64:
    case FormatId::e8_iq3: {
      const uint8_t* at[Isa::kLanes];
      for (int r = 0; r < Isa::kLanes; ++r) {
        uint8_t* out = columns.decoded + r * kChunkInputs;
        decode_codes(w.format, rows.at[r], begin, round_up(inputs, 8), out);
        if (layout_of(w.format) == XLayout::octets) {
          order_octets(out, inputs);
        }
        at[r] = out;
      }
      return unpack_words<ByteWords<false>>(at, 0, groups_of(inputs, 4), half, columns.codes);
    }
    case FormatId::f32:
    case FormatId::bf16:
    case FormatId::f16:
    case FormatId::fp8_b128:
      return;
  }
}

inline bool splits(FormatId format) {
  return Isa::kPairs && (format == FormatId::int8_row || format == FormatId::int3_g64 || format == FormatId::e8_iq3);
}

// Rows [row, row + kTileRows) times prepared rows [0, n), n <= kTokenBlock.
inline void tile_product(const Product& a, const XView& view, int64_t row, const std::byte* x, int64_t n, float* y,
                         Columns& columns) {
  const Weight& w = a.weight;
  const int64_t whole = std::lcm<int64_t>(a.spec.group, kBlock);  // chunks begin with a group and with a block
  const int64_t chunk_inputs = kChunkInputs / whole * whole;
  const int64_t chunks = groups_of(w.cols, chunk_inputs);
  const bool row_scale = one_scale_per_row(w.format);
  const TileRows halves[kHalves] = {{w, row, a.row_end}, {w, row + Isa::kLanes, a.row_end}};
  const NextTile next(w, row, a.row_end, kTileRows, a.ahead);
  Fetcher next_codes = next.codes(chunks * kHalves);
  Fetcher next_scales = next.scales(chunks * kHalves);
  std::fill_n(columns.acc, n * kTileRows, 0.0f);
  for (int64_t begin = 0; begin < w.cols; begin += chunk_inputs) {
    int64_t inputs = std::min(chunk_inputs, w.cols - begin);
    if (a.spec.layout == XLayout::octets) {
      inputs = round_up(inputs, kBlock);  // the last digits are spread over a block
    }
    for (int h = 0; h < kHalves; ++h) {
      next_codes.step<kMiddle>();
      next_scales.step<kNear>();
      unpack_tile(w, halves[h], begin, inputs, h, columns);
      float* scales = columns.scales + h * Isa::kLanes;
      const int64_t first = row_scale ? 0 : begin / a.spec.group;
      const int64_t count = row_scale ? 1 : groups_of(inputs, a.spec.group);
      for (int64_t g = 0; g < count; g += Isa::kLanes) {
        tile_scales(w, halves[h], first + g, first + count, scales + g * kTileRows, kTileRows);
      }
    }
    const Chunk chunk{columns, begin, inputs, a.spec.group, row_scale ? 0 : kTileRows, code_offset(w.format)};
    if (splits(w.format)) {
      meet<Isa::kPairs>(chunk, view, x, n, columns.acc);
    } else {
      meet<false>(chunk, view, x, n, columns.acc);
    }
  }
  for (int64_t s = 0; s < n; ++s) {
    for (int h = 0; h < kHalves; ++h) {
      const int64_t at = row + h * Isa::kLanes;
      const Isa::Float lanes = Isa::load_float(columns.acc + s * kTileRows + h * Isa::kLanes);
      store_lanes(y + s * a.y_stride + at, lanes, a.row_end - at);
    }
  }
}

inline void tile_matmul(const Product& a) {
  const XView view(a.spec);
  Columns columns;
  for (int64_t row = a.row_begin; row < a.row_end; row += kTileRows) {
    for (int64_t s = 0; s < a.n; s += kTokenBlock) {
      tile_product(a, view, row, a.x + s * view.stride, std::min(kTokenBlock, a.n - s), a.y + s * a.y_stride, columns);
    }
  }
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
