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
  RowsAhead(const Product& a) : now_(a.weight), row_end_(a.row_end), later_(a.ahead) {
    lead_ = groups_of(kLeadBytes, row_bytes(a.weight));
  }

  // The codes that are asked for while `row` is read; null where there are none.
  const uint8_t* codes(int64_t row) const {
    const Place place = find(row + lead_);
    return place.weight == nullptr ? nullptr : place.weight->codes + place.row * row_bytes(*place.weight);
  }

  // Ask for the scales of the row that comes a tile later.
  PICAFLOR_INLINE void ask_scales(int64_t row) const {
    const Place place = find(row + Isa::kLanes);
    if (place.weight == nullptr || place.weight->scales == nullptr || place.weight->format == FormatId::fp8_b128) {
      return;
    }
    const int64_t nbytes = scale_row_bytes(*place.weight);
    const uint8_t* scales = place.weight->scales + place.row * nbytes;
    for (int64_t i = 0; i < nbytes; i += kLineBytes) {
      __builtin_prefetch(scales + i, 0, kMiddle);
    }
  }

 private:
  struct Place {
    const Weight* weight;
    int64_t row;
  };

  Place find(int64_t row) const {
    if (row < row_end_) {
      return {&now_, row};
    }
    row += later_.row_begin - row_end_;
    return {row < later_.row_end ? later_.weight : nullptr, row};
  }

  const Weight& now_;
  int64_t row_end_;
  const Ahead& later_;
  int64_t lead_;
};

// The digits of a prepared row in the order that 64 stored bytes meet them: [block][term][plane][64].
template <class Words, int kPlanes>
const int8_t* linear_digits(const int8_t* digits, int64_t blocks, Scratch& scratch) {
  static_assert(Words::kTerms == 2);
  auto* out = static_cast<int8_t*>(scratch.at_least(blocks * 2 * kPlanes * kBlock));
  const Isa::Int evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Isa::Int odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int p = 0; p < kPlanes; ++p) {
      const int64_t first = (block * 2 * kPlanes + p) * kBlock;  // the second half lies kPlanes blocks of digits later
      const int64_t second = first + kPlanes * kBlock;
      const Isa::Int a = Isa::load(digits + first);
      const Isa::Int b = Isa::load(digits + second);
      Isa::store(out + first, _mm512_permutex2var_epi32(a, evens, b));
      Isa::store(out + second, _mm512_permutex2var_epi32(a, odds, b));
    }
  }
  return out;
}

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

  TermWriter(const Product& a, const XView& view, Scratch& memory) : w_(a.weight), scale_(view.scale(a.x)) {
    const int64_t padded = round_up(view.groups, Isa::kLanes);
    auto* fix = static_cast<int32_t*>(memory.at_least(kParts * padded * 4));
    for (int part = 0; part < kParts; ++part) {
      const int32_t* sum = part == 0 ? view.sum(a.x) : view.top(a.x);
      for (int64_t g = 0; g < view.groups; ++g) {
        fix[part * padded + g] = -code_offset(w_.format) * sum[g];
      }
      fix_[part] = fix + part * padded;
    }
  }

  void row(int64_t row) {
    scales_ = w_.scales + row * scale_row_bytes(w_);
    if (one_scale_per_row(w_.format)) {
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
    if (w_.format == FormatId::int4_grouped) {
      return _mm512_loadu_ps(scales_ + group * 4);
    }
    if (w_.format == FormatId::mxfp4) {
      return _mm512_castsi512_ps(Isa::half_powers(scales_ + group));
    }
    return row_scale_;  // int4_row, the one other format of find_linear
  }

  const Weight& w_;
  const float* scale_;
  const int32_t* fix_[kParts];
  const uint8_t* scales_ = nullptr;
  Isa::Float row_scale_ = Isa::zero_float();
};

// Groups of kWidth words (of kSpan whole blocks, where kSpan > 1).
template <class Words, int kPlanes, int kWidth, int kSpan>
struct LinearRow {
  static constexpr int64_t kStep = kWidth * kSpan;  // blocks with sixteen groups
  static constexpr int64_t kDigits = Words::kTerms * kPlanes * kBlock;

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

  static void run(const uint8_t* codes, const int8_t* x, int64_t blocks, const uint8_t* ask,
                  const TermWriter<kPlanes>& terms, float* values, float* scales) {
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

template <class Words, int kPlanes, int kWidth, int kSpan>
void linear_gemv(const Product& a) {
  constexpr int kLanes = Isa::kLanes;
  thread_local Scratch x_memory;
  thread_local Scratch fix_memory;
  thread_local Scratch term_memory;
  const Weight& w = a.weight;
  const XView view(a.spec);
  const int64_t nbytes = row_bytes(w);
  const int64_t blocks = groups_of(nbytes, kLineBytes);
  const int8_t* digits = linear_digits<Words, kPlanes>(view.digit(a.x), round_up(blocks, kSpan), x_memory);
  const int64_t stride = round_up(view.groups, kLanes) + kLanes;  // rows at different places of the first cache
  auto* values = static_cast<float*>(term_memory.at_least(2 * kLanes * stride * 4));
  float* scales = values + kLanes * stride;
  const RowsAhead ahead(a);
  TermWriter<kPlanes> terms(a, view, fix_memory);

  for (int64_t row = a.row_begin; row < a.row_end; row += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, a.row_end - row);
    for (int64_t r = 0; r < count; ++r) {
      ahead.ask_scales(row + r);
      const uint8_t* codes = w.codes + (row + r) * nbytes;
      const uint8_t* ask = ahead.codes(row + r);
      terms.row(row + r);
      LinearRow<Words, kPlanes, kWidth, kSpan>::run(codes, digits, blocks, ask == nullptr ? codes : ask, terms,
                                                    values + r * stride, scales + r * stride);
    }
    store_lanes(a.y + row, chain_terms(values, scales, stride, view.groups), count);
  }
}

using LinearFn = void (*)(const Product&);

template <class Words, int kWidth, int kSpan>
LinearFn linear_of_planes(int32_t planes) {
  switch (planes) {
    case 1:
      return linear_gemv<Words, 1, kWidth, kSpan>;
    case 2:
      return linear_gemv<Words, 2, kWidth, kSpan>;
    case 3:
      return linear_gemv<Words, 3, kWidth, kSpan>;
  }
  return nullptr;
}

// The loop for one prepared row of this format; null where groups do not fill quarters of a cache line, or where the
// loop over tiles is as fast (int8 and int2 have no stream of scales that would break the order of addresses).
inline LinearFn find_linear(FormatId format, const XSpec& spec) {
  switch (format) {
    case FormatId::int4_row:
    case FormatId::int4_grouped:
      switch (spec.group) {
        case 32:
          return linear_of_planes<NibbleWords, 4, 1>(spec.planes);
        case 64:
          return linear_of_planes<NibbleWords, 8, 1>(spec.planes);
        case 128:
          return linear_of_planes<NibbleWords, 16, 1>(spec.planes);
        case 256:
          return linear_of_planes<NibbleWords, 16, 2>(spec.planes);
        default:
          return nullptr;
      }
    case FormatId::mxfp4:
      return linear_of_planes<Fp4Words, 4, 1>(spec.planes);
    case FormatId::int8_row:
    case FormatId::int2_row:
    case FormatId::int3_g64:
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
