// Integer-coded matrix times one prepared row, one matrix row after the other: memory is read in the order of its
// addresses, which its own prefetchers follow best. What sixteen rows' groups add waits in cache until the rows can be
// the lanes of a register. Must not know threads or files. Compiled for AVX-512 VNNI.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "cpu/kernels_words.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kLeadBytes = 8192;  // how far ahead of the loads lines are asked for

// Memory of one thread that only grows, aligned to cache lines.
class Scratch {
 public:
  void* at_least(int64_t nbytes) {
    if (nbytes > nbytes_) {
      memory_.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(nbytes), kAlign)));
      nbytes_ = nbytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t nbytes_ = 0;
};

// Where the lines come from that are asked for ahead of a row: the rows behind it, then the first ones of `ahead`.
class RowsAhead {
 public:
  RowsAhead(const Product& a) : now_(a.weight, 0), row_end_(a.row_end) {
    lead_ = groups_of(kLeadBytes, now_.nbytes);
    if (a.ahead.weight != nullptr) {
      later_ = Matrix(*a.ahead.weight, a.ahead.row_begin);
      later_rows_ = a.ahead.row_end - a.ahead.row_begin;
    }
  }

  // The codes that are asked for while `row` is read; null where there are none.
  PICAFLOR_INLINE const uint8_t* codes(int64_t row) const {
    row += lead_;
    if (row < row_end_) {
      return now_.codes + row * now_.nbytes;
    }
    row -= row_end_;
    return row < later_rows_ ? later_.codes + row * later_.nbytes : nullptr;
  }

  // Ask for the scales of the row that comes a tile later.
  PICAFLOR_INLINE void ask_scales(int64_t row) const {
    row += Isa::kLanes;
    if (row < row_end_) {
      return now_.ask_scales(row);
    }
    row -= row_end_;
    if (row < later_rows_) {
      later_.ask_scales(row);
    }
  }

 private:
  struct Matrix {
    const uint8_t* codes = nullptr;
    const uint8_t* scales = nullptr;
    int64_t nbytes = 0;        // of a row of codes
    int64_t scale_nbytes = 0;  // of the scales of a row; 0: not asked for

    Matrix() = default;
    Matrix(const Weight& w, int64_t row) : nbytes(row_bytes(w)) {
      codes = w.codes + row * nbytes;
      if (w.scales != nullptr && w.format != FormatId::fp8_b128) {
        scale_nbytes = scale_row_bytes(w);
        scales = w.scales + row * scale_nbytes;
      }
    }

    PICAFLOR_INLINE void ask_scales(int64_t row) const {
      for (int64_t i = 0; i < scale_nbytes; i += kLineBytes) {
        __builtin_prefetch(scales + row * scale_nbytes + i, 0, kMiddle);
      }
    }
  };

  const Matrix now_;
  const int64_t row_end_;
  Matrix later_;
  int64_t later_rows_ = 0;
  int64_t lead_;
};

// Sums of the runs of kWidth words in kWidth registers: sixteen of them, in order.
template <int kWidth>
PICAFLOR_INLINE Isa::Int sums_of_runs(const Isa::Int* q) {
  const auto pairs = [](Isa::Int a, Isa::Int b) __attribute__((always_inline)) {
    return Isa::add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  // Lane i of 128 bits: the sum of its four words, of each of the four registers.
  const auto quads = [&](const Isa::Int* r) __attribute__((always_inline)) {
    const Isa::Int ab = pairs(r[0], r[1]);
    const Isa::Int cd = pairs(r[2], r[3]);
    return Isa::add(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  };
  const auto lanes = [](Isa::Int a, Isa::Int b) __attribute__((always_inline)) {
    return Isa::add(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  };
  if constexpr (kWidth == 4) {
    const Isa::Int order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, quads(q));
  } else if constexpr (kWidth == 8) {
    const Isa::Int order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return _mm512_permutexvar_epi32(order, lanes(quads(q), quads(q + 4)));
  } else {
    return lanes(lanes(quads(q), quads(q + 4)), lanes(quads(q + 8), quads(q + 12)));
  }
}

// What sixteen groups' sums of one row become: the terms of the chain over groups, value and product of the scales.
template <int kPlanes>
class TermWriter {
 public:
  static constexpr int kParts = kPlanes == 3 ? 2 : 1;

  TermWriter(const Product& a, const XView& view, Scratch& memory)
      : format_(a.weight.format),
        stored_(a.weight.scales),
        nbytes_(scale_row_bytes(a.weight)),
        scale_(view.scale(a.x)) {
    const int64_t padded = round_up(view.groups, Isa::kLanes);
    auto* fix = static_cast<int32_t*>(memory.at_least(kParts * padded * 4));
    for (int part = 0; part < kParts; ++part) {
      const int32_t* sum = part == 0 ? view.sum(a.x) : view.top(a.x);
      for (int64_t g = 0; g < view.groups; ++g) {
        fix[part * padded + g] = -code_offset(format_) * sum[g];
      }
      fix_[part] = fix + part * padded;
    }
  }

  void row(int64_t row) {
    scales_ = stored_ + row * nbytes_;
    if (one_scale_per_row(format_)) {
      row_scale_ = Isa::set_float(float_at(scales_, 0));
    }
  }

  // From group `group` on; reads up to 60 bytes behind the scales.
  PICAFLOR_INLINE void write(int64_t group, Isa::Int low, Isa::Int top, float* values, float* scales) const {
    Isa::Float value = Isa::to_float(Isa::add(low, Isa::load(fix_[0] + group)));
    if constexpr (kParts == 2) {
      const Isa::Float high = Isa::to_float(Isa::add(top, Isa::load(fix_[1] + group)));
      value = Isa::fused(high, Isa::set_float(65536.0f), value);
    }
    Isa::store_float(values + group, value);
    Isa::store_float(scales + group, Isa::multiply(stored_scales(group), Isa::load_float(scale_ + group)));
  }

 private:
  PICAFLOR_INLINE Isa::Float stored_scales(int64_t group) const {
    if (format_ == FormatId::int4_grouped || format_ == FormatId::int3_g64) {
      return _mm512_loadu_ps(scales_ + group * 4);
    }
    if (format_ == FormatId::mxfp4) {
      return _mm512_castsi512_ps(Isa::half_powers(scales_ + group));
    }
    return row_scale_;  // int4_row, the one other format of find_linear
  }

  const FormatId format_;
  const uint8_t* const stored_;
  const int64_t nbytes_;
  const float* const scale_;
  const int32_t* fix_[kParts];
  const uint8_t* scales_ = nullptr;
  Isa::Float row_scale_ = Isa::zero_float();
};

// A row whose groups are kWidth words (kSpan whole blocks of 64 bytes, where kSpan > 1).
template <class Words, int kPlanes_, int kWidth, int kSpan>
struct LinearRow {
  static_assert(Words::kTerms == 2);
  static constexpr int kPlanes = kPlanes_;
  static constexpr int64_t kStep = kWidth * kSpan;  // blocks with sixteen groups
  static constexpr int64_t kDigits = Words::kTerms * kPlanes * kBlock;

  // The digits of a prepared row in the order that blocks meet them: [block][term][plane][64].
  static const int8_t* arrange(const int8_t* digits, int64_t nbytes, Scratch& scratch) {
    const int64_t blocks = round_up(groups_of(nbytes, kLineBytes), kSpan);
    auto* out = static_cast<int8_t*>(scratch.at_least(blocks * kDigits));
    const Isa::Int evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const Isa::Int odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    for (int64_t block = 0; block < blocks; ++block) {
      for (int p = 0; p < kPlanes; ++p) {
        const int64_t first = block * kDigits + p * kBlock;  // the second half lies kPlanes blocks of digits later
        const int64_t second = first + kPlanes * kBlock;
        const Isa::Int a = Isa::load(digits + first);
        const Isa::Int b = Isa::load(digits + second);
        Isa::store(out + first, _mm512_permutex2var_epi32(a, evens, b));
        Isa::store(out + second, _mm512_permutex2var_epi32(a, odds, b));
      }
    }
    return out;
  }

  // The sums of kSpan blocks' words times their digits, `count` of them real; with three planes the top ones apart.
  PICAFLOR_INLINE static void dot(const uint8_t* codes, const int8_t* x, int64_t count, Isa::Int* top, Isa::Int* low) {
    Isa::Int terms[kSpan][Words::kTerms];
    for (int i = 0; i < kSpan; ++i) {
      const Isa::Int words = i < count ? _mm512_loadu_si512(codes + i * kLineBytes) : Isa::zero();
      Words::template unpack<false>(&words, 0, terms[i]);
    }
    const auto add = [&](Isa::Int sum, int p) __attribute__((always_inline)) {
      for (int i = 0; i < kSpan; ++i) {
        for (int k = 0; k < Words::kTerms; ++k) {
          sum = _mm512_dpbusd_epi32(sum, terms[i][k], Isa::load(x + i * kDigits + (k * kPlanes + p) * kBlock));
        }
      }
      return sum;
    };
    if constexpr (kPlanes == 3) {
      *top = add(Isa::zero(), 0);
    }
    *low = kPlanes == 1 ? add(Isa::zero(), 0) : add(Isa::times256(add(Isa::zero(), kPlanes - 2)), kPlanes - 1);
  }

  // Sixteen groups' sums from `blocks` blocks on.
  template <bool kWhole>
  PICAFLOR_INLINE static void sums(const uint8_t* codes, const int8_t* x, int64_t blocks, const uint8_t* ask,
                                   Isa::Int* low_sums, Isa::Int* top_sums) {
    Isa::Int top[kWidth];
    Isa::Int low[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      const int64_t left = kWhole ? kSpan : blocks - i * kSpan;
      top[i] = low[i] = Isa::zero();
      for (int s = 0; s < kSpan; ++s) {
        __builtin_prefetch(ask + (i * kSpan + s) * kLineBytes, 0, kMiddle);
      }
      if (kWhole || left > 0) {
        dot(codes + i * kSpan * kLineBytes, x + i * kSpan * kDigits, left, &top[i], &low[i]);
      }
    }
    *low_sums = sums_of_runs<kWidth>(low);
    *top_sums = kPlanes == 3 ? sums_of_runs<kWidth>(top) : Isa::zero();
  }

  // Values and scales of all groups of a row, while the lines at `ask` are asked for.
  static void run(const uint8_t* codes, const int8_t* x, int64_t nbytes, const uint8_t* ask,
                  const TermWriter<kPlanes>& terms, float* values, float* scales) {
    const int64_t blocks = groups_of(nbytes, kLineBytes);
    Isa::Int low;
    Isa::Int top;
    int64_t block = 0;
    int64_t group = 0;
    for (; block + kStep <= blocks; block += kStep, group += Isa::kLanes) {
      sums<true>(codes + block * kLineBytes, x + block * kDigits, kStep, ask + block * kLineBytes, &low, &top);
      terms.write(group, low, top, values, scales);
    }
    if (block < blocks) {
      sums<false>(codes + block * kLineBytes, x + block * kDigits, blocks - block, ask + block * kLineBytes, &low,
                  &top);
      terms.write(group, low, top, values, scales);
    }
  }
};

// A row of int3: eight groups, three lines of memory, are met at a time. Their low bits are sorted into even and odd
// bytes, so that all three registers hold eight bytes of each group: [lane][group of the lane, that plus 4][8].
template <int kPlanes_>
struct LinearInt3Row {
  static constexpr int kPlanes = kPlanes_;
  static constexpr int kTerms = Int3Words::kTerms;
  static constexpr int64_t kGroups = 8;
  static constexpr int64_t kBytes = kGroups * kInt3BlockBytes;
  static constexpr int64_t kDigits = kTerms * kPlanes * kBlock;

  // [eight groups][term][plane][lane][half][8]; zeros behind the last group.
  static const int8_t* arrange(const int8_t* digits, int64_t nbytes, Scratch& scratch) {
    const int64_t groups = nbytes / kInt3BlockBytes;
    const int64_t padded = round_up(groups, kGroups);
    auto* out = static_cast<int8_t*>(scratch.at_least(padded / kGroups * kDigits));
    const Isa::Int pairs = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    alignas(64) int64_t eights[kTerms];
    for (int64_t group = 0; group < padded; ++group) {
      const int64_t inside = group % kGroups;
      int8_t* to = out + group / kGroups * kDigits + inside % 4 * 16 + inside / 4 * 8;
      for (int p = 0; p < kPlanes; ++p) {
        const Isa::Int block = group < groups ? Isa::load(digits + (group * kPlanes + p) * kBlock) : Isa::zero();
        Isa::store(eights, _mm512_permutexvar_epi32(pairs, block));
        for (int k = 0; k < kTerms; ++k) {
          std::memcpy(to + (k * kPlanes + p) * kBlock, eights + k, 8);
        }
      }
    }
    return out;
  }

  // Even bytes of low bits, odd ones and high bits of the `nbytes` bytes at `codes`.
  template <bool kWhole>
  PICAFLOR_INLINE static void load(const uint8_t* codes, int64_t nbytes, Isa::Int* even, Isa::Int* odd,
                                   Isa::Int* high) {
    const auto line = [&](int64_t i) __attribute__((always_inline)) {
      if constexpr (kWhole) {
        return _mm512_loadu_si512(codes + i * kLineBytes);
      } else {
        const int64_t words = std::clamp<int64_t>(nbytes / 4 - i * Isa::kLanes, 0, Isa::kLanes);
        return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << words) - 1), codes + i * kLineBytes);
      }
    };
    const Isa::Int a = line(0);
    const Isa::Int b = line(1);
    const Isa::Int c = line(2);
    // Blocks of six words: four of low bits, two of high bits.
    const Isa::Int low_first = _mm512_setr_epi32(0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21);
    const Isa::Int low_last = _mm512_setr_epi32(8, 9, 10, 11, 14, 15, 16, 17, 20, 21, 22, 23, 26, 27, 28, 29);
    const Isa::Int high_first = _mm512_setr_epi32(4, 5, 4, 5, 10, 11, 10, 11, 16, 17, 16, 17, 22, 23, 22, 23);
    const Isa::Int high_last = _mm512_setr_epi32(12, 13, 12, 13, 18, 19, 18, 19, 24, 25, 24, 25, 30, 31, 30, 31);
    const Isa::Int split = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const Isa::Int first = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(a, low_first, b), split);
    const Isa::Int last = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(b, low_last, c), split);
    *even = _mm512_unpacklo_epi64(first, last);
    *odd = _mm512_unpackhi_epi64(first, last);
    *high =
        _mm512_unpacklo_epi64(_mm512_permutex2var_epi32(a, high_first, b), _mm512_permutex2var_epi32(b, high_last, c));
  }

  // Sums of eight groups, two words each; with three planes those of the top digits apart.
  template <bool kWhole>
  PICAFLOR_INLINE static void dot(const uint8_t* codes, const int8_t* x, int64_t nbytes, Isa::Int* low, Isa::Int* top) {
    Isa::Int t[5] = {};
    load<kWhole>(codes, nbytes, &t[0], &t[1], &t[4]);
    Isa::Int terms[kTerms];
    Int3Words::unpack<true>(t, 0, terms);
    const auto plane = [&](int p) __attribute__((always_inline)) {
      Isa::Int slots[2] = {Isa::zero(), Isa::zero()};
      for (int k = 0; k < kTerms; ++k) {
        Isa::Int& sum = slots[Int3Words::slot(k)];
        sum = _mm512_dpbusd_epi32(sum, terms[k], Isa::load(x + (k * kPlanes + p) * kBlock));
      }
      return Isa::template finish<2, Int3Words::kShift>(Isa::zero(), slots);
    };
    *top = kPlanes == 3 ? plane(0) : Isa::zero();
    *low = kPlanes == 1 ? plane(0) : Isa::add(Isa::times256(plane(kPlanes - 2)), plane(kPlanes - 1));
  }

  // Sixteen groups in order, from two registers of eight.
  PICAFLOR_INLINE static Isa::Int in_order(Isa::Int first, Isa::Int last) {
    const Isa::Int evens = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 16, 20, 24, 28, 18, 22, 26, 30);
    const Isa::Int odds = Isa::add(evens, Isa::set(1));
    return Isa::add(_mm512_permutex2var_epi32(first, evens, last), _mm512_permutex2var_epi32(first, odds, last));
  }

  template <bool kWhole>
  PICAFLOR_INLINE static void sums(const uint8_t* codes, const int8_t* x, int64_t nbytes, const uint8_t* ask,
                                   Isa::Int* low_sums, Isa::Int* top_sums) {
    Isa::Int low[2] = {Isa::zero(), Isa::zero()};
    Isa::Int top[2] = {Isa::zero(), Isa::zero()};
    for (int i = 0; i < 2; ++i) {
      for (int64_t line = 0; line < kBytes; line += kLineBytes) {
        __builtin_prefetch(ask + i * kBytes + line, 0, kMiddle);
      }
      if (kWhole || nbytes > i * kBytes) {
        dot<kWhole>(codes + i * kBytes, x + i * kDigits, nbytes - i * kBytes, &low[i], &top[i]);
      }
    }
    *low_sums = in_order(low[0], low[1]);
    *top_sums = kPlanes == 3 ? in_order(top[0], top[1]) : Isa::zero();
  }

  static void run(const uint8_t* codes, const int8_t* x, int64_t nbytes, const uint8_t* ask,
                  const TermWriter<kPlanes>& terms, float* values, float* scales) {
    Isa::Int low;
    Isa::Int top;
    int64_t group = 0;
    while (nbytes >= 2 * kBytes) {
      sums<true>(codes, x, nbytes, ask, &low, &top);
      terms.write(group, low, top, values, scales);
      codes += 2 * kBytes;
      ask += 2 * kBytes;
      x += 2 * kDigits;
      nbytes -= 2 * kBytes;
      group += Isa::kLanes;
    }
    if (nbytes > 0) {
      sums<false>(codes, x, nbytes, ask, &low, &top);
      terms.write(group, low, top, values, scales);
    }
  }
};

// The chains of a tile: values and scales have one row every `stride` floats.
inline Isa::Float chain_terms(const float* values, const float* scales, int64_t stride, int64_t groups) {
  constexpr int kLanes = Isa::kLanes;
  const uint8_t* rows[2][kLanes];
  for (int r = 0; r < kLanes; ++r) {
    rows[0][r] = reinterpret_cast<const uint8_t*>(values + r * stride);
    rows[1][r] = reinterpret_cast<const uint8_t*>(scales + r * stride);
  }
  Isa::Float y = Isa::zero_float();
  int64_t group = 0;
  Isa::Int value[kLanes];
  Isa::Int scale[kLanes];
  const auto chain = [&](int64_t count) __attribute__((always_inline)) {
    Isa::load_words(rows[0], group * 4, value);
    Isa::load_words(rows[1], group * 4, scale);
#pragma GCC unroll 16
    for (int64_t g = 0; g < count; ++g) {
      y = Isa::fused(_mm512_castsi512_ps(value[g]), _mm512_castsi512_ps(scale[g]), y);
    }
  };
  for (; group + kLanes <= groups; group += kLanes) {
    chain(kLanes);
  }
  if (group < groups) {
    chain(groups - group);
  }
  return y;
}

template <class Row>
void linear_gemv(const Product& a) {
  constexpr int kLanes = Isa::kLanes;
  thread_local Scratch x_memory;
  thread_local Scratch fix_memory;
  thread_local Scratch term_memory;
  const Weight& w = a.weight;
  const XView view(a.spec);
  const int64_t nbytes = row_bytes(w);
  const int8_t* digits = Row::arrange(view.digit(a.x), nbytes, x_memory);
  const int64_t stride = round_up(view.groups, kLanes) + kLanes;  // rows at different places of the first cache
  auto* values = static_cast<float*>(term_memory.at_least(2 * kLanes * stride * 4));
  float* scales = values + kLanes * stride;
  const RowsAhead ahead(a);
  TermWriter<Row::kPlanes> terms(a, view, fix_memory);

  for (int64_t row = a.row_begin; row < a.row_end; row += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, a.row_end - row);
    for (int64_t r = 0; r < count; ++r) {
      ahead.ask_scales(row + r);
      const uint8_t* codes = w.codes + (row + r) * nbytes;
      const uint8_t* ask = ahead.codes(row + r);
      terms.row(row + r);
      Row::run(codes, digits, nbytes, ask == nullptr ? codes : ask, terms, values + r * stride, scales + r * stride);
    }
    store_lanes(a.y + row, chain_terms(values, scales, stride, view.groups), count);
  }
}

using LinearFn = void (*)(const Product&);

// Row: a template over the number of planes.
template <template <int> class Row>
LinearFn linear_of_planes(int32_t planes) {
  switch (planes) {
    case 1:
      return linear_gemv<Row<1>>;
    case 2:
      return linear_gemv<Row<2>>;
    case 3:
      return linear_gemv<Row<3>>;
  }
  return nullptr;
}

template <int kPlanes>
using Int4Groups32 = LinearRow<NibbleWords, kPlanes, 4, 1>;
template <int kPlanes>
using Int4Groups64 = LinearRow<NibbleWords, kPlanes, 8, 1>;
template <int kPlanes>
using Int4Groups128 = LinearRow<NibbleWords, kPlanes, 16, 1>;
template <int kPlanes>
using Int4Groups256 = LinearRow<NibbleWords, kPlanes, 16, 2>;
template <int kPlanes>
using Fp4Groups32 = LinearRow<Fp4Words, kPlanes, 4, 1>;

// The loop for one prepared row of this format; null where groups do not fill quarters of a cache line, or where the
// loop over tiles is as fast (int8 and int2 have no stream of scales that would break the order of addresses).
inline LinearFn find_linear(FormatId format, const XSpec& spec) {
  switch (format) {
    case FormatId::int4_row:
    case FormatId::int4_grouped:
      switch (spec.group) {
        case 32:
          return linear_of_planes<Int4Groups32>(spec.planes);
        case 64:
          return linear_of_planes<Int4Groups64>(spec.planes);
        case 128:
          return linear_of_planes<Int4Groups128>(spec.planes);
        case 256:
          return linear_of_planes<Int4Groups256>(spec.planes);
        default:
          return nullptr;
      }
    case FormatId::mxfp4:
      return linear_of_planes<Fp4Groups32>(spec.planes);
    case FormatId::int3_g64:
      return linear_of_planes<LinearInt3Row>(spec.planes);
    case FormatId::int8_row:
    case FormatId::int2_row:
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
