// The float operations on sixteen-lane values: included once per instruction set, by ops_<isa>.cpp.
// Must not know threads, programs or Python; uses no standard templates, so that nothing here is shared between sets.
#pragma once

#include "cpu/math16.h"
#include "cpu/ops.h"
#include "cpu/ops_attend.h"

namespace picaflor {
inline namespace PICAFLOR_ISA {

// ---- norms ----

static void rmsnorm(const float* x, const float* weight, float* out, int64_t n, float eps) {
  const float ms = chain16(x, x, n) / static_cast<float>(n);
  const V16 r = set16(1.0f / sqrt1(ms + eps));
  each16(n, [&](int64_t i, int64_t count) {
    store16(out + i, mul(mul(load16(x + i, count), r), load16(weight + i, count)), count);
  });
}

static void layernorm(const float* x, const float* weight, const float* bias, float* out, int64_t n, float eps) {
  const V16 mean = set16(sum16(x, n) / static_cast<float>(n));
  V16 acc = zero16();
  each16(n, [&](int64_t i, int64_t count) {
    const V16 d = sub(load16(x + i, count), mean);
    acc = select(first16(count), fma(d, d, acc), acc);
  });
  const float variance = tree16(acc) / static_cast<float>(n);
  const V16 r = set16(1.0f / sqrt1(variance + eps));
  each16(n, [&](int64_t i, int64_t count) {
    const V16 d = sub(load16(x + i, count), mean);
    store16(out + i, fma(mul(d, r), load16(weight + i, count), load16(bias + i, count)), count);
  });
}

// ---- elementwise ----

static void rope(float* x, const float* cos, const float* sin, int64_t dims, bool interleaved) {
  const int64_t half = dims / 2;
  float pairs[kRopeDims];  // interleaved pairs become halves first: outputs land on inputs that are still needed
  const float* from = x;
  if (interleaved) {
    for (int64_t j = 0; j < half; ++j) {
      pairs[j] = x[2 * j];
      pairs[half + j] = x[2 * j + 1];
    }
    from = pairs;
  }
  each16(half, [&](int64_t j, int64_t count) {
    const V16 a = load16(from + j, count);
    const V16 b = load16(from + half + j, count);
    const V16 c = load16(cos + j, count);
    const V16 s = load16(sin + j, count);
    store16(x + j, fma(a, c, neg(mul(b, s))), count);
    store16(x + half + j, fma(b, c, mul(a, s)), count);
  });
}

static void add_rows(float* x, const float* y, int64_t n) {
  each16(n, [&](int64_t i, int64_t count) { store16(x + i, add(load16(x + i, count), load16(y + i, count)), count); });
}

static void silu_mul(const float* gate, const float* up, float* out, int64_t n) {
  each16(n, [&](int64_t i, int64_t count) {
    store16(out + i, mul(silu(load16(gate + i, count)), load16(up + i, count)), count);
  });
}

static void exp_all(const float* x, float* out, int64_t n) {
  each16(n, [&](int64_t i, int64_t count) { store16(out + i, exp(load16(x + i, count)), count); });
}

// ---- rows of a decoded matrix ----

template <int kChunks>
PICAFLOR_INLINE void axpy_chunks(const float* w, int64_t w_stride, int64_t count, const float* coefficients,
                                 float* acc) {
  V16 sums[kChunks];
  for (int c = 0; c < kChunks; ++c) {
    sums[c] = load16(acc + 16 * c);
  }
  for (int64_t d = 0; d < count; ++d) {
    const V16 factor = set16(coefficients[d]);
    for (int c = 0; c < kChunks; ++c) {
      sums[c] = fma(factor, load16(w + d * w_stride + 16 * c), sums[c]);
    }
  }
  for (int c = 0; c < kChunks; ++c) {
    store16(acc + 16 * c, sums[c]);
  }
}

static void axpy_rows(const float* w, int64_t w_stride, int64_t count, const float* coefficients, float* acc,
                      int64_t n) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    axpy_chunks<4>(w + i, w_stride, count, coefficients, acc + i);
  }
  for (; i + 16 <= n; i += 16) {
    axpy_chunks<1>(w + i, w_stride, count, coefficients, acc + i);
  }
  if (i < n) {
    V16 sum = load16(acc + i, n - i);
    for (int64_t d = 0; d < count; ++d) {
      sum = fma(set16(coefficients[d]), load16(w + d * w_stride + i, n - i), sum);
    }
    store16(acc + i, sum, n - i);
  }
}

static void dot_rows(const float* w, int64_t w_stride, int64_t count, const float* x, int64_t n, float* out) {
  int64_t d = 0;
  for (; d + kTileKeys <= count; d += kTileKeys) {
    const float* rows[kTileKeys];
    for (int k = 0; k < kTileKeys; ++k) {
      rows[k] = w + (d + k) * w_stride;
    }
    dots<kTileKeys, 1>(rows, x, 0, n, out + d);
  }
  for (; d < count; ++d) {
    out[d] = chain16(w + d * w_stride, x, n);
  }
}

// ---- indexer ----

static void index_scores(const IndexScores& s) {
  const float inv_dim = 1.0f / sqrt1(static_cast<float>(s.head_dim));
  const float inv_heads = 1.0f / sqrt1(static_cast<float>(s.heads));
  const auto group = [&](auto tile, int64_t position) {
    constexpr int kKeys = decltype(tile)::value;
    const float* keys[kKeys];
    float sums[kKeys];
    float dot[kKeys * kTileHeads];
    for (int k = 0; k < kKeys; ++k) {
      keys[k] = s.keys.data + s.table.token(position + k) * s.keys.stride;
      sums[k] = 0.0f;
    }
    const auto weigh = [&](int64_t head, int heads) {
      for (int h = 0; h < heads; ++h) {
        for (int k = 0; k < kKeys; ++k) {
          const float z = dot[h * kKeys + k] * inv_dim;
          sums[k] = fma1(s.weights[head + h], z < 0.0f ? 0.0f : z, sums[k]);  // NaN stays
        }
      }
    };
    int64_t head = 0;
    for (; head + kTileHeads <= s.heads; head += kTileHeads) {
      dots<kKeys, kTileHeads>(keys, s.q + head * s.head_dim, s.head_dim, s.head_dim, dot);
      weigh(head, kTileHeads);
    }
    for (; head < s.heads; ++head) {
      dots<kKeys, 1>(keys, s.q + head * s.head_dim, s.head_dim, s.head_dim, dot);
      weigh(head, 1);
    }
    for (int k = 0; k < kKeys; ++k) {
      s.out[position + k] = sums[k] * inv_heads;
    }
  };
  int64_t position = s.begin;
  for (; position + kTileKeys <= s.end; position += kTileKeys) {
    group(Tile<kTileKeys>{}, position);
  }
  for (; position < s.end; ++position) {
    group(Tile<1>{}, position);
  }
}

// ---- scores of a router, weights of a sampled token ----

static void sigmoid_scores(const float* logits, float* out, int64_t n) {
  each16(n, [&](int64_t i, int64_t count) { store16(out + i, sigmoid(load16(logits + i, count)), count); });
}

static void softmax_scores(const float* logits, float* out, int64_t n) {
  float top = logits[0];
  for (int64_t i = 1; i < n; ++i) {
    top = logits[i] > top ? logits[i] : top;
  }
  each16(n,
         [&](int64_t i, int64_t count) { store16(out + i, exp(sub(load16(logits + i, count), set16(top))), count); });
  const V16 total = set16(sum16(out, n));
  each16(n, [&](int64_t i, int64_t count) { store16(out + i, div(load16(out + i, count), total), count); });
}

static void sample_weights(const float* logits, float temperature, float top, float* out, int64_t n) {
  const V16 t = set16(temperature);
  each16(n, [&](int64_t i, int64_t count) {
    const V16 logit = load16(logits + i, count);
    const M16 finite = eq(sub(logit, logit), zero16());  // infinity and NaN give NaN
    store16(out + i, select(finite, exp(sub(div(logit, t), set16(top))), zero16()), count);
  });
}

constexpr OpsTable kOps = {
#if defined(__AVX512F__)
    "avx512",
#elif defined(__AVX2__) && defined(__FMA__)
    "avx2",
#else
    "scalar",
#endif
    rmsnorm,  layernorm,    rope,           add_rows,       silu_mul,       axpy_rows, dot_rows,
    attend,   index_scores, sigmoid_scores, softmax_scores, sample_weights, exp_all,
};

}  // namespace PICAFLOR_ISA
}  // namespace picaflor
