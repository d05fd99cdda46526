// Attention of one row over one sequence's pages, in blocks of 256 positions; part of ops_impl.h.
// Must not know threads, programs or Python; uses no standard templates.
#pragma once

#include "cpu/math16.h"
#include "cpu/ops.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

// Tile shapes by register count: keys x heads of a score, heads x column chunks of a weighted sum.
#if defined(__AVX512F__)
constexpr int kTileKeys = 4, kTileHeads = 4, kTileChunks = 4;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kTileKeys = 2, kTileHeads = 2, kTileChunks = 2;
#else
constexpr int kTileKeys = 1, kTileHeads = 1, kTileChunks = 1;
#endif

template <int kValue>
struct Tile {
  static constexpr int value = kValue;
};

// Run f(i, count) for each run of 16 elements; count is 16 but for the last.
template <typename F>
PICAFLOR_INLINE void each16(int64_t n, F f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    f(i, int64_t{16});
  }
  if (i < n) {
    f(i, n - i);
  }
}

// out[i] = tree16(v[i]) for kCount values.
template <int kCount>
PICAFLOR_INLINE void trees(const V16* v, float* out) {
#if defined(__AVX512F__)
  if constexpr (kCount == 16) {
    // Each level adds the same pairs as tree16 does, for two values at once. Lane 4 L + g of the result belongs to
    // the value that entered as 4 g + L, so value 4 L + g enters there.
    V16 t8[8];
    for (int i = 0; i < 8; ++i) {
      const int a = 2 * i, b = 2 * i + 1;
      const V16 x = v[4 * (a % 4) + a / 4], y = v[4 * (b % 4) + b / 4];
      t8[i] = add(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
    }
    V16 t4[4];
    for (int i = 0; i < 4; ++i) {
      const V16 x = t8[2 * i], y = t8[2 * i + 1];
      t4[i] = add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
    }
    V16 t2[2];
    for (int i = 0; i < 2; ++i) {
      const V16 x = t4[2 * i], y = t4[2 * i + 1];
      t2[i] = add(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
    }
    store16(out, add(_mm512_shuffle_ps(t2[0], t2[1], 0x88), _mm512_shuffle_ps(t2[0], t2[1], 0xDD)));
    return;
  }
#endif
  for (int i = 0; i < kCount; ++i) {
    out[i] = tree16(v[i]);
  }
}

// out[h * kKeys + k] = chain16(q[h], keys[k])
template <int kKeys, int kHeads>
PICAFLOR_INLINE void dots(const float* const* keys, const float* q, int64_t q_stride, int64_t n, float* out) {
  V16 acc[kHeads * kKeys];
  for (int i = 0; i < kHeads * kKeys; ++i) {
    acc[i] = zero16();
  }
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    V16 key[kKeys];
    for (int k = 0; k < kKeys; ++k) {
      key[k] = load16(keys[k] + i);
    }
    for (int h = 0; h < kHeads; ++h) {
      const V16 query = load16(q + h * q_stride + i);
      for (int k = 0; k < kKeys; ++k) {
        acc[h * kKeys + k] = fma(query, key[k], acc[h * kKeys + k]);
      }
    }
  }
  if (i < n) {
    const M16 rest = first16(n - i);
    for (int h = 0; h < kHeads; ++h) {
      const V16 query = load16(q + h * q_stride + i, n - i);
      for (int k = 0; k < kKeys; ++k) {
        V16& sum = acc[h * kKeys + k];
        sum = select(rest, fma(query, load16(keys[k] + i, n - i), sum), sum);
      }
    }
  }
  trees<kHeads * kKeys>(acc, out);
}

// The keys of one block: their rows in each plane.
struct Block {
  int64_t count = 0;
  const float* keys[kBlockKeys];
  const float* keys2[kBlockKeys];
  const float* values[kBlockKeys];
};

// Fill the next block that has keys; false at the end. `cursor` counts positions, or entries of the selection.
static bool next_block(const Attend& a, int64_t& cursor, Block& block) {
  const int64_t end = a.selection ? a.selected : a.visible;
  if (cursor >= end) {
    return false;
  }
  const int64_t number = (a.selection ? a.selection[cursor] : cursor) / kBlockKeys;
  block.count = 0;
  for (; cursor < end; ++cursor) {
    const int64_t position = a.selection ? a.selection[cursor] : cursor;
    if (position / kBlockKeys != number) {
      break;
    }
    const int64_t token = a.table.token(position);
    block.keys[block.count] = a.keys.data + token * a.keys.stride;
    block.keys2[block.count] = a.q2 ? a.keys2.data + token * a.keys2.stride : nullptr;
    block.values[block.count] = a.values.data + token * a.values.stride;
    ++block.count;
  }
  return true;
}

template <int kKeys, int kHeads>
PICAFLOR_INLINE void score_tile(const Attend& a, const Block& block, int64_t t, int64_t head, float* scores) {
  float sums[kHeads * kKeys];
  dots<kKeys, kHeads>(block.keys + t, a.q + head * a.q_stride, a.q_stride, a.keys.width, sums);
  if (a.q2) {
    float more[kHeads * kKeys];
    dots<kKeys, kHeads>(block.keys2 + t, a.q2 + head * a.q2_stride, a.q2_stride, a.keys2.width, more);
    for (int i = 0; i < kHeads * kKeys; ++i) {
      sums[i] = sums[i] + more[i];
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int k = 0; k < kKeys; ++k) {
      scores[(head + h) * kBlockKeys + t + k] = sums[h * kKeys + k] * a.scale;
    }
  }
}

static void score_block(const Attend& a, const Block& block, float* scores) {
  int64_t t = 0;
  const auto all_heads = [&](auto tile) {
    constexpr int kKeys = decltype(tile)::value;
    int64_t head = 0;
    for (; head + kTileHeads <= a.heads; head += kTileHeads) {
      score_tile<kKeys, kTileHeads>(a, block, t, head, scores);
    }
    for (; head < a.heads; ++head) {
      score_tile<kKeys, 1>(a, block, t, head, scores);
    }
  };
  for (; t + kTileKeys <= block.count; t += kTileKeys) {
    all_heads(Tile<kTileKeys>{});
  }
  for (; t < block.count; ++t) {
    all_heads(Tile<1>{});
  }
}

PICAFLOR_INLINE float largest(const float* x, int64_t n) {
  const V16 lowest = set16(-__builtin_inff());
  V16 top = lowest;
  each16(n, [&](int64_t i, int64_t count) {
    const V16 v = select(first16(count), load16(x + i, count), lowest);
    top = max(v, top);
  });
  float lanes[16];
  store16(lanes, top);
  float best = lanes[0];
  for (int i = 1; i < 16; ++i) {
    best = lanes[i] > best ? lanes[i] : best;
  }
  return best;
}

// out[h][column .. column + 16 kChunks) = sum over keys of p[h][t] * values[t], t ascending from 0
template <int kHeads, int kChunks>
PICAFLOR_INLINE void weigh_tile(const Block& block, const float* p, int64_t column, float* out, int64_t out_stride) {
  V16 acc[kHeads * kChunks];
  for (int i = 0; i < kHeads * kChunks; ++i) {
    acc[i] = zero16();
  }
  for (int64_t t = 0; t < block.count; ++t) {
    V16 value[kChunks];
    for (int c = 0; c < kChunks; ++c) {
      value[c] = load16(block.values[t] + column + 16 * c);
    }
    for (int h = 0; h < kHeads; ++h) {
      const V16 factor = set16(p[h * kBlockKeys + t]);
      for (int c = 0; c < kChunks; ++c) {
        acc[h * kChunks + c] = fma(factor, value[c], acc[h * kChunks + c]);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int c = 0; c < kChunks; ++c) {
      store16(out + h * out_stride + column + 16 * c, acc[h * kChunks + c]);
    }
  }
}

PICAFLOR_INLINE void weigh_rest(const Block& block, const float* p, int64_t column, int64_t count, float* out) {
  V16 acc = zero16();
  for (int64_t t = 0; t < block.count; ++t) {
    acc = fma(set16(p[t]), load16(block.values[t] + column, count), acc);
  }
  store16(out + column, acc, count);
}

template <int kHeads>
PICAFLOR_INLINE void weigh_heads(const Block& block, const float* p, int64_t width, float* out) {
  int64_t column = 0;
  for (; column + 16 * kTileChunks <= width; column += 16 * kTileChunks) {
    weigh_tile<kHeads, kTileChunks>(block, p, column, out, width);
  }
  for (; column + 16 <= width; column += 16) {
    weigh_tile<kHeads, 1>(block, p, column, out, width);
  }
  if (column < width) {
    for (int h = 0; h < kHeads; ++h) {
      weigh_rest(block, p + h * kBlockKeys, column, width - column, out + h * width);
    }
  }
}

// The running softmax of one head.
struct Merged {
  float m = 0.0f;
  float l = 0.0f;
};

// total = total merged with the block's sum; both [width]
PICAFLOR_INLINE void merge(Merged& total, float m, float l, const float* block_sum, float* sum, int64_t width) {
  const float top = total.m > m ? total.m : m;
  const float keep = exp1(total.m - top);
  const float take = exp1(m - top);
  total.l = fma1(total.l, keep, l * take);
  total.m = top;
  const V16 keeps = set16(keep);
  const V16 takes = set16(take);
  each16(width, [&](int64_t i, int64_t count) {
    store16(sum + i, fma(load16(sum + i, count), keeps, mul(load16(block_sum + i, count), takes)), count);
  });
}

// Scores become exp(score - m) in place; m and the plain sum are returned.
PICAFLOR_INLINE Merged soften(float* scores, int64_t n) {
  const float m = largest(scores, n);
  const V16 top = set16(m);
  each16(n, [&](int64_t i, int64_t count) { store16(scores + i, exp(sub(load16(scores + i, count), top)), count); });
  return {m, sum16(scores, n)};
}

static void attend(const Attend& a) {
  const int64_t width = a.values.width;
  float* scores = a.scratch;                    // [heads][kBlockKeys]
  float* sums = scores + a.heads * kBlockKeys;  // [heads][width]
  float* block_sums = sums + a.heads * width;   // [heads][width]
  Merged total[kAttendHeads];
  Merged part[kAttendHeads];
  Block block;
  int64_t cursor = 0;
  for (bool first = true; next_block(a, cursor, block); first = false) {
    score_block(a, block, scores);
    for (int64_t h = 0; h < a.heads; ++h) {
      part[h] = soften(scores + h * kBlockKeys, block.count);
    }
    float* into = first ? sums : block_sums;
    int64_t head = 0;
    for (; head + kTileHeads <= a.heads; head += kTileHeads) {
      weigh_heads<kTileHeads>(block, scores + head * kBlockKeys, width, into + head * width);
    }
    for (; head < a.heads; ++head) {
      weigh_heads<1>(block, scores + head * kBlockKeys, width, into + head * width);
    }
    for (int64_t h = 0; h < a.heads; ++h) {
      if (first) {
        total[h] = part[h];
      } else {
        merge(total[h], part[h].m, part[h].l, block_sums + h * width, sums + h * width, width);
      }
    }
  }
  for (int64_t h = 0; h < a.heads; ++h) {
    const V16 l = set16(total[h].l);
    each16(width, [&](int64_t i, int64_t count) {
      store16(a.out + h * a.out_stride + i, div(load16(sums + h * width + i, count), l), count);
    });
  }
}

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
