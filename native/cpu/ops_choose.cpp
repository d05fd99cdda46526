// Choices by comparison: selected positions, routed experts, a sampled token. One code for every instruction set.
// Must not know threads, programs or Python.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu/ops.h"

namespace picaflor {
namespace {

// Unsigned numbers in the order of the floats; NaN is 0 and below all, both zeros are equal.
uint32_t rank(float x) {
  if (std::isnan(x)) {
    return 0;
  }
  if (x == 0.0f) {
    x = 0.0f;
  }
  uint32_t u = 0;
  std::memcpy(&u, &x, sizeof u);
  return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}

// Index of the largest rank among those not taken; the lowest on ties.
int64_t best_of(const uint32_t* ranks, const uint8_t* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!taken[i] && (best < 0 || ranks[i] > ranks[best])) {
      best = i;
    }
  }
  return best;
}

// taken[e] = 1 for experts outside the top_groups best groups.
void mask_groups(const RouterChoice& spec, const float* choice, std::vector<uint8_t>& taken) {
  const int64_t size = spec.experts / spec.groups;
  std::vector<uint32_t> ranks(static_cast<size_t>(spec.groups));
  for (int64_t g = 0; g < spec.groups; ++g) {
    float first = -std::numeric_limits<float>::infinity();
    float second = first;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (choice[e] > first) {
        second = first;
        first = choice[e];
      } else if (choice[e] > second) {
        second = choice[e];
      }
    }
    ranks[static_cast<size_t>(g)] = rank(size > 1 ? first + second : first);
  }
  std::fill(taken.begin(), taken.end(), uint8_t{1});
  std::vector<uint8_t> group_taken(static_cast<size_t>(spec.groups), 0);
  for (int64_t i = 0; i < spec.top_groups; ++i) {
    const int64_t g = best_of(ranks.data(), group_taken.data(), spec.groups);
    group_taken[static_cast<size_t>(g)] = 1;
    std::fill_n(taken.begin() + g * size, size, uint8_t{0});
  }
}

// Whole numbers below 2^43 of at most 24 binary digits, as floats, in their order: 0 for 0, 1 for 1; 29 bits.
constexpr uint32_t kOne = 0x3F800000u;  // the bits of 1

uint32_t token_key(float count) {
  uint32_t u = 0;
  std::memcpy(&u, &count, sizeof u);
  return u >= kOne ? u - (kOne - 1) : 0;
}

// Tokens that top-p keeps: all with keys above `least`, and of those with that very key the first `ties`.
struct TopP {
  uint32_t least = 0;
  int64_t ties = 0;
  int64_t mass = 0;  // the sum of the kept counts
};

// The fewest of the largest counts whose sum is at least `needed`, one at least. Finds the key of the smallest by sums
// over its first 11 bits, then the next 9 and the last 9.
TopP cut_at(const std::vector<float>& counts, int64_t needed) {
  needed = std::max<int64_t>(needed, 1);
  TopP cut;
  std::vector<int64_t> bins;
  for (const int shift : {18, 9, 0}) {
    bins.assign(2048, 0);
    const uint32_t prefix = cut.least;
    for (const float count : counts) {
      const uint32_t key = token_key(count);
      if (key >> shift >> 9 == prefix || shift == 18) {
        bins[shift == 18 ? key >> shift : key >> shift & 511u] += static_cast<int64_t>(count);
      }
    }
    uint32_t bin = 2047;
    while (bin > 0 && cut.mass + bins[bin] < needed) {
      cut.mass += bins[bin--];
    }
    cut.least = (prefix << 9) + bin;
  }
  const uint32_t bits = cut.least + (kOne - 1);
  float least = 0.0f;
  std::memcpy(&least, &bits, sizeof least);
  const int64_t tied = static_cast<int64_t>(least);
  cut.ties = (needed - cut.mass + tied - 1) / tied;
  cut.mass += cut.ties * tied;
  return cut;
}

}  // namespace

void choose_positions(const float* scores, int64_t n, int64_t top_k, uint32_t* scratch, int32_t* positions) {
  for (int64_t i = 0; i < n; ++i) {
    scratch[i] = rank(scores[i]);
  }
  std::nth_element(scratch, scratch + (top_k - 1), scratch + n, std::greater<>());
  const uint32_t threshold = scratch[top_k - 1];
  int64_t above = 0;
  for (int64_t i = 0; i < n; ++i) {
    above += rank(scores[i]) > threshold;
  }
  int64_t ties = top_k - above;
  int64_t found = 0;
  for (int64_t i = 0; i < n && found < top_k; ++i) {
    const uint32_t r = rank(scores[i]);
    if (r > threshold || (r == threshold && ties > 0)) {
      ties -= r == threshold;
      positions[found++] = static_cast<int32_t>(i);
    }
  }
}

void choose_experts(const RouterChoice& spec, const float* scores, const float* bias, float* scratch, int32_t* ids,
                    float* weights) {
  std::vector<uint32_t> ranks(static_cast<size_t>(spec.experts));
  std::vector<uint8_t> taken(static_cast<size_t>(spec.experts), 0);
  for (int64_t e = 0; e < spec.experts; ++e) {
    scratch[e] = bias ? scores[e] + bias[e] : scores[e];
    ranks[static_cast<size_t>(e)] = rank(scratch[e]);
  }
  if (spec.groups > 1) {
    mask_groups(spec, scratch, taken);
  }
  float sum = 0.0f;
  for (int64_t k = 0; k < spec.top_k; ++k) {
    const int64_t e = best_of(ranks.data(), taken.data(), spec.experts);
    taken[static_cast<size_t>(e)] = 1;
    ids[k] = static_cast<int32_t>(e);
    weights[k] = scores[e];
    sum = sum + scores[e];
  }
  for (int64_t k = 0; k < spec.top_k; ++k) {
    const float w = spec.normalise ? weights[k] / (sum + 1e-20f) : weights[k];
    weights[k] = w * spec.scale;
  }
}

int64_t argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i) {
    if (x[i] > x[best] || (std::isnan(x[best]) && !std::isnan(x[i]))) {
      best = i;
    }
  }
  return std::isnan(x[best]) ? 0 : best;
}

int64_t choose_token(const float* weights, int64_t n, double top_p, double uniform) {
  std::vector<float> counts(static_cast<size_t>(n));
  int64_t mass = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t count = static_cast<int64_t>(weights[i] * kTokenScale);
    counts[static_cast<size_t>(i)] = static_cast<float>(count);
    mass += count;
  }
  TopP cut{0, 0, mass};
  if (top_p < 1.0) {
    cut = cut_at(counts, static_cast<int64_t>(std::ceil(top_p * static_cast<double>(mass))));  // at most mass
  }
  const int64_t passed = std::min(static_cast<int64_t>(uniform * static_cast<double>(cut.mass)), cut.mass - 1);
  int64_t cumulative = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float count = counts[static_cast<size_t>(i)];
    const uint32_t key = token_key(count);
    if (key > cut.least || (key == cut.least && cut.ties-- > 0)) {
      cumulative += static_cast<int64_t>(count);
      if (cumulative > passed) {
        return i;
      }
    }
  }
  throw std::logic_error("no token was drawn");
}

}  // namespace picaflor
