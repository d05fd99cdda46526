// Choices by comparison: selected positions, routed experts, a sampled token. One code for every instruction set.
// Must not know threads, programs or Python.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
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
  std::vector<uint8_t> kept;
  if (top_p < 1.0) {
    double total = 0.0;
    std::vector<int64_t> heap;
    for (int64_t i = 0; i < n; ++i) {
      total += static_cast<double>(weights[i]);
      if (weights[i] > 0.0f) {
        heap.push_back(i);
      }
    }
    const auto later = [weights](int64_t a, int64_t b) {
      return weights[a] < weights[b] || (weights[a] == weights[b] && a > b);
    };
    std::make_heap(heap.begin(), heap.end(), later);
    kept.assign(static_cast<size_t>(n), 0);
    double cumulative = 0.0;
    do {
      std::pop_heap(heap.begin(), heap.end(), later);
      kept[static_cast<size_t>(heap.back())] = 1;
      cumulative += static_cast<double>(weights[heap.back()]);
      heap.pop_back();
    } while (!heap.empty() && cumulative < top_p * total);
  }
  const auto in = [&](int64_t i) { return weights[i] > 0.0f && (kept.empty() || kept[static_cast<size_t>(i)] != 0); };
  double mass = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    mass += in(i) ? static_cast<double>(weights[i]) : 0.0;
  }
  double cumulative = 0.0;
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (in(i)) {
      last = i;
      cumulative += static_cast<double>(weights[i]);
      if (cumulative > uniform * mass) {
        return i;
      }
    }
  }
  return last;
}

}  // namespace picaflor
