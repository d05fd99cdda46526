// Products of the lattice and of fp8 where AVX-512 has byte permutations over two registers (VBMI) and GFNI: both
// formats are tables of bytes. All else is the table of AVX-512.
// Must not know threads or Python. Compiled with its own flags and names.
// gcc 12 takes the undefined operands of its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <array>
#include <bit>

#include "cpu/kernels_rows.h"
#include "cpu/kernels_words.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {
namespace {

using Bytes = __m512i;

Bytes bytes_of(const uint8_t* p) { return _mm512_loadu_si512(p); }

// fp8 -----------------------------------------------------------------------------------------------------------------

// The upper two bytes of the float of each e4m3 magnitude; the lower two are zero.
struct Fp8Table {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};

constexpr Fp8Table fp8_table() {
  Fp8Table table{};
  for (int i = 0; i < 128; ++i) {
    const uint32_t word = i == 127 ? 0x7FC00000u : std::bit_cast<uint32_t>(kE4m3[i]);
    table.high[i] = static_cast<uint8_t>(word >> 24);
    table.low[i] = static_cast<uint8_t>(word >> 16);
  }
  return table;
}

constexpr Fp8Table kFp8 = fp8_table();

struct Fp8Decoder {
  Bytes high0 = bytes_of(kFp8.high);
  Bytes high1 = bytes_of(kFp8.high + 64);
  Bytes low0 = bytes_of(kFp8.low);
  Bytes low1 = bytes_of(kFp8.low + 64);
  Bytes square = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);

  // 64 codes to four registers of sixteen floats, in order.
  PICAFLOR_INLINE void decode(const uint8_t* p, V16* out) const {
    const Bytes codes = _mm512_permutexvar_epi32(square, bytes_of(p));
    const Bytes low = _mm512_permutex2var_epi8(low0, codes, low1);
    // The sign bit of the code over the table's, which is clear.
    const Bytes high =
        _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high0, codes, high1), codes, _mm512_set1_epi8(-128), 0xF8);
    const Bytes first = _mm512_unpacklo_epi8(low, high);
    const Bytes second = _mm512_unpackhi_epi8(low, high);
    const Bytes zero = _mm512_setzero_si512();
    out[0] = from_bits(_mm512_unpacklo_epi16(zero, first));
    out[1] = from_bits(_mm512_unpackhi_epi16(zero, first));
    out[2] = from_bits(_mm512_unpacklo_epi16(zero, second));
    out[3] = from_bits(_mm512_unpackhi_epi16(zero, second));
  }
};

// kRows rows times kTokens prepared rows: chain16 of every pair, 64 inputs at a time (two steps share a scale).
template <int kRows, int kTokens>
void fp8_block(const Product& a, int64_t row, const std::byte* x, float* y) {
  const Weight& w = a.weight;
  const int64_t stride = x_stride(a.spec);
  const uint8_t* codes = w.codes + row * w.cols;
  const uint8_t* scales[kRows];
  for (int r = 0; r < kRows; ++r) {
    scales[r] = w.scales + (row + r) / kFp8Block * scale_row_bytes(w);
  }
  const Fp8Decoder decoder;
  V16 acc[kRows][kTokens];
  for (auto& tokens : acc) {
    for (V16& sum : tokens) {
      sum = zero16();
    }
  }
  for (int64_t i = 0; i < w.cols; i += 64) {
    const int64_t left = w.cols - i;
    for (int r = 0; r < kRows; ++r) {
      V16 values[4];
      decoder.decode(codes + r * w.cols + i, values);
      _mm_prefetch(reinterpret_cast<const char*>(codes + (r + kRows) * w.cols + i), _MM_HINT_T1);
      const V16 scale = set16(float_at(scales[r], i / kFp8Block));
      if (left >= 64) {
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
          const V16 value = mul(values[q], scale);
          for (int s = 0; s < kTokens; ++s) {
            acc[r][s] = fma(value, load16(reinterpret_cast<const float*>(x + s * stride) + i + 16 * q), acc[r][s]);
          }
        }
        continue;
      }
      for (int q = 0; 16 * q < left; ++q) {
        const M16 real = first16(left - 16 * q);
        const V16 value = mul(values[q], scale);
        for (int s = 0; s < kTokens; ++s) {
          const V16 input = load16(reinterpret_cast<const float*>(x + s * stride) + i + 16 * q);
          acc[r][s] = select(real, fma(value, input, acc[r][s]), acc[r][s]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int s = 0; s < kTokens; ++s) {
      y[s * a.y_stride + r] = tree16(acc[r][s]);
    }
  }
}

template <int kRows>
void fp8_rows(const Product& a, int64_t row) {
  const int64_t stride = x_stride(a.spec);
  int64_t s = 0;
  for (; s + 4 <= a.n; s += 4) {
    fp8_block<kRows, 4>(a, row, a.x + s * stride, a.y + s * a.y_stride + row);
  }
  const std::byte* x = a.x + s * stride;
  float* y = a.y + s * a.y_stride + row;
  switch (a.n - s) {
    case 1:
      return fp8_block<kRows, 1>(a, row, x, y);
    case 2:
      return fp8_block<kRows, 2>(a, row, x, y);
    case 3:
      return fp8_block<kRows, 3>(a, row, x, y);
  }
}

void fp8_matmul(const Product& a) {
  int64_t row = a.row_begin;
  for (; row + 4 <= a.row_end; row += 4) {
    fp8_rows<4>(a, row);
  }
  for (; row < a.row_end; ++row) {
    fp8_rows<1>(a, row);
  }
}

// The lattice ---------------------------------------------------------------------------------------------------------

// Coordinate c of each of the 256 points, kE8Largest added.
struct GridTable {
  alignas(64) uint8_t at[4][256];
};

constexpr GridTable grid_table() {
  GridTable table{};
  for (int i = 0; i < 256; ++i) {
    for (int c = 0; c < 4; ++c) {
      table.at[c][i] = static_cast<uint8_t>(kE8Grid[i][c] + kE8Largest);
    }
  }
  return table;
}

constexpr GridTable kGrid = grid_table();
constexpr int kPoints = 64;                         // of a block, four inputs each
constexpr int kSubBlocks = kE8Block / kE8SubBlock;  // of a block, one scale each
constexpr int kPair = 2;                            // blocks per step: sixteen scales

// Digits of one block by coordinate: [plane][coordinate][point].
template <int kPlanes>
void split_digits(const int8_t* digits, int8_t* out) {
  for (int p = 0; p < kPlanes; ++p) {
    Bytes run[4];
    for (int b = 0; b < 4; ++b) {
      run[b] = _mm512_loadu_si512(digits + (b * kPlanes + p) * kBlock);
    }
    alignas(64) uint8_t places[64];
    for (int i = 0; i < 64; ++i) {
      places[i] = static_cast<uint8_t>(4 * i);
    }
    const Bytes first = bytes_of(places);
    for (int c = 0; c < 4; ++c) {
      const Bytes place = _mm512_add_epi8(first, _mm512_set1_epi8(static_cast<char>(c)));
      const Bytes low = _mm512_permutex2var_epi8(run[0], place, run[1]);
      const Bytes high = _mm512_permutex2var_epi8(run[2], place, run[3]);
      _mm512_store_si512(out + (p * 4 + c) * kPoints, _mm512_mask_mov_epi8(low, 0xFFFFFFFF00000000u, high));
    }
  }
}

// Codes of one stored block, by coordinate; each plus kE8Largest.
PICAFLOR_INLINE void block_codes(const uint8_t* block, Bytes* codes) {
  const Bytes index = bytes_of(block);
  const __mmask64 upper = _mm512_movepi8_mask(index);
  const Bytes words =
      _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + kE8IndexBytes)));
  // Per point: the seven sign bits of its eight inputs, then their parity.
  const Bytes fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x15150E0E07070000), words);
  const Bytes signs = _mm512_gf2p8affine_epi64_epi8(fields, _mm512_set1_epi64(0x010204081020407F), 0);
  for (int c = 0; c < 4; ++c) {
    const uint8_t* table = kGrid.at[c];
    const Bytes low = _mm512_permutex2var_epi8(bytes_of(table), index, bytes_of(table + 64));
    const Bytes high = _mm512_permutex2var_epi8(bytes_of(table + 128), index, bytes_of(table + 192));
    const Bytes code = _mm512_mask_mov_epi8(low, upper, high);
    const __mmask64 negative = _mm512_test_epi8_mask(signs, _mm512_set1_epi16(static_cast<int16_t>(0x1001 << c)));
    codes[c] = _mm512_mask_sub_epi8(code, negative, _mm512_set1_epi8(2 * kE8Largest), code);
  }
}

// group_scale of the eight sub-blocks of a block.
PICAFLOR_INLINE __m256 block_scales(const uint8_t* block) {
  uint16_t d;
  std::memcpy(&d, block + kE8ScaleOffset, 2);
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + kE8IndexBytes));
  const __m256 code = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));
  const __m256 half = _mm256_set1_ps(0.5f);
  const __m256 scale =
      _mm256_mul_ps(_mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(d))), _mm256_add_ps(code, half));
  return _mm256_mul_ps(_mm256_mul_ps(scale, half), half);
}

// What a tile of sixteen rows and two blocks gives: scales and integer sums, a row behind the other.
template <int kPlanes, int kTokens>
struct Sums {
  alignas(64) float scales[Isa::kLanes][kPair * kSubBlocks];
  alignas(64) int32_t dots[kTokens][kPlanes][Isa::kLanes][kPair * kSubBlocks];
  alignas(64) int8_t digits[kTokens][kPlanes * kE8Block];
};

// The sums of all rows over block `part` of the pair, whose digits are split.
template <int kPlanes, int kTokens>
void sum_block(const TileRows& rows, int64_t block, int part, Sums<kPlanes, kTokens>& sums) {
  for (int r = 0; r < Isa::kLanes; ++r) {
    const uint8_t* stored = rows.at[r] + block * kE8BlockBytes;
    _mm_prefetch(reinterpret_cast<const char*>(stored + 4 * kE8BlockBytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(stored + 4 * kE8BlockBytes + 64), _MM_HINT_T0);
    Bytes codes[4];
    block_codes(stored, codes);
    _mm256_store_ps(&sums.scales[r][part * kSubBlocks], block_scales(stored));
    for (int s = 0; s < kTokens; ++s) {
      for (int p = 0; p < kPlanes; ++p) {
        Isa::Int sum = Isa::zero();
        Isa::Int other = Isa::zero();
        const int8_t* digits = sums.digits[s] + p * kE8Block;
        sum = _mm512_dpbusd_epi32(sum, codes[0], Isa::load(digits));
        other = _mm512_dpbusd_epi32(other, codes[1], Isa::load(digits + kPoints));
        sum = _mm512_dpbusd_epi32(sum, codes[2], Isa::load(digits + 2 * kPoints));
        other = _mm512_dpbusd_epi32(other, codes[3], Isa::load(digits + 3 * kPoints));
        sum = Isa::add(sum, other);
        const __m256i eight = _mm512_cvtepi64_epi32(Isa::add(sum, _mm512_srli_epi64(sum, 32)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(&sums.dots[s][p][r][part * kSubBlocks]), eight);
      }
    }
  }
}

// t[g] = column g of sixteen rows of sixteen words.
PICAFLOR_INLINE void columns_of(const void* table, Isa::Int* t) {
  const uint8_t* rows[Isa::kLanes];
  for (int r = 0; r < Isa::kLanes; ++r) {
    rows[r] = static_cast<const uint8_t*>(table) + r * Isa::kLanes * 4;
  }
  Isa::load_words(rows, 0, t);
}

template <int kPlanes, int kTokens>
void e8_tile(const Product& a, const XView& view, int64_t row, const std::byte* x, float* y) {
  const TileRows rows(a.weight, row, a.row_end);
  const GroupData data(view, x);
  const int64_t blocks = groups_of(a.weight.cols, kE8Block);
  Sums<kPlanes, kTokens> sums;
  Isa::Float acc[kTokens];
  std::fill_n(acc, kTokens, Isa::zero_float());
  for (int64_t first = 0; first < blocks; first += kPair) {
    for (int part = 0; part < kPair && first + part < blocks; ++part) {
      for (int s = 0; s < kTokens; ++s) {
        split_digits<kPlanes>(view.digit(x) + s * view.stride + (first + part) * kE8Block * kPlanes, sums.digits[s]);
      }
      sum_block(rows, first + part, part, sums);
    }
    const int64_t group = first * kSubBlocks;
    const int64_t count = std::min<int64_t>(kPair * kSubBlocks, view.groups - group);
    Isa::Int scales[Isa::kLanes];
    columns_of(sums.scales, scales);
    for (int s = 0; s < kTokens; ++s) {
      Isa::Int dots[kPlanes][Isa::kLanes];
      for (int p = 0; p < kPlanes; ++p) {
        columns_of(sums.dots[s][p], dots[p]);
      }
      for (int64_t g = 0; g < count; ++g) {
        const int64_t skip = s * view.stride / 4 + group + g;
        Isa::Int digits[kPlanes];
        for (int p = 0; p < kPlanes; ++p) {
          digits[p] = dots[p][g];
        }
        const Isa::Float value =
            group_value<kPlanes>(digits, kE8Largest, data.sum[skip], kPlanes == 3 ? data.top[skip] : 0);
        const Isa::Float scale = Isa::multiply(_mm512_castsi512_ps(scales[g]), Isa::set_float(data.scale[skip]));
        acc[s] = Isa::fused(value, scale, acc[s]);
      }
    }
  }
  for (int s = 0; s < kTokens; ++s) {
    store_lanes(y + s * a.y_stride, acc[s], a.row_end - row);
  }
}

template <int kPlanes>
void e8_rows(const Product& a) {
  const XView view(a.spec);
  for (int64_t row = a.row_begin; row < a.row_end; row += Isa::kLanes) {
    int64_t s = 0;
    for (; s + 4 <= a.n; s += 4) {
      e8_tile<kPlanes, 4>(a, view, row, a.x + s * view.stride, a.y + s * a.y_stride + row);
    }
    for (; s + 2 <= a.n; s += 2) {
      e8_tile<kPlanes, 2>(a, view, row, a.x + s * view.stride, a.y + s * a.y_stride + row);
    }
    for (; s < a.n; ++s) {
      e8_tile<kPlanes, 1>(a, view, row, a.x + s * view.stride, a.y + s * a.y_stride + row);
    }
  }
}

void e8_matmul(const Product& a) {
  switch (a.spec.planes) {
    case 1:
      return e8_rows<1>(a);
    case 2:
      return e8_rows<2>(a);
    case 3:
      return e8_rows<3>(a);
  }
}

constexpr int64_t kFewestTile = 12;  // from here on unpacked columns win

void matmul(const Weight& w, const XSpec& spec, const std::byte* x, int64_t n, float* y, int64_t y_stride,
            int64_t row_begin, int64_t row_end, const Ahead& ahead) {
  const Product all{w, spec, x, n, y, y_stride, row_begin, row_end, ahead};
  if (w.format == FormatId::fp8_b128) {
    return fp8_matmul(all);
  }
  if (w.format == FormatId::e8_iq3 && n < kFewestTile) {
    return e8_matmul(all);
  }
  avx512_kernels()->matmul(w, spec, x, n, y, y_stride, row_begin, row_end, ahead);
}

}  // namespace
}  // namespace PICAFLOR_ISA

const KernelTable* vbmi_kernels() {
  static const KernelTable table = [] {
    KernelTable all = *avx512_kernels();
    all.isa = kAvx512;
    all.matmul = &matmul;
    return all;
  }();
  return &table;
}

}  // namespace picaflor
