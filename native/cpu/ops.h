// Float operations of one instruction set, as a table of functions. Every table computes the same bits.
// Must not know threads, programs or Python. docs/design/contracts.md section 2 defines each order of operations.
#pragma once

#include <cstdint>

namespace picaflor {

constexpr int64_t kBlockKeys = 256;  // keys are summed in blocks of this many positions
constexpr int64_t kAttendHeads = 8;  // heads that one Attend handles at most
constexpr int64_t kRopeDims = 1024;  // rotated values of a head at most

// Where the tokens of one sequence lie: position p is token (pages[p >> shift] << shift) + (p mod 2^shift) of a plane.
struct PageTable {
  const int32_t* pages = nullptr;
  int32_t shift = 0;

  int64_t token(int64_t position) const {
    const int64_t mask = (int64_t{1} << shift) - 1;
    return (static_cast<int64_t>(pages[position >> shift]) << shift) + (position & mask);
  }
};

// A quantity per token: `data` is token 0's first value, tokens are `stride` floats apart.
struct Cached {
  const float* data = nullptr;
  int64_t stride = 0;
  int64_t width = 0;
};

// Attention of one row for `heads` heads that read the same keys and values.
struct Attend {
  int64_t heads = 0;
  const float* q = nullptr;  // [heads][keys.width], q_stride apart
  int64_t q_stride = 0;
  const float* q2 = nullptr;  // second part of the score (MLA's rope part), or null
  int64_t q2_stride = 0;
  Cached keys, keys2, values;
  float scale = 1.0f;
  PageTable table;
  int64_t visible = 0;                 // positions 0 .. visible-1
  const int32_t* selection = nullptr;  // ascending positions, or null for all
  int64_t selected = 0;
  float* out = nullptr;  // [heads][values.width], out_stride apart; may be q
  int64_t out_stride = 0;
  float* scratch = nullptr;  // attend_scratch(heads, values.width) floats
};

inline int64_t attend_scratch(int64_t heads, int64_t value_width) { return heads * (kBlockKeys + 2 * value_width); }

// Indexer scores of one row for positions [begin, end): out[position].
struct IndexScores {
  int64_t heads = 0;
  int64_t head_dim = 0;
  const float* q = nullptr;        // [heads][head_dim]
  const float* weights = nullptr;  // [heads]
  Cached keys;
  PageTable table;
  int64_t begin = 0;
  int64_t end = 0;
  float* out = nullptr;
};

struct OpsTable {
  const char* isa;
  // out may be x in the norms
  void (*rmsnorm)(const float* x, const float* weight, float* out, int64_t n, float eps);
  void (*layernorm)(const float* x, const float* weight, const float* bias, float* out, int64_t n, float eps);
  // dims values of x in place; cos and sin have dims / 2; interleaved reads pairs (2j, 2j+1), else (j, j + dims/2)
  void (*rope)(float* x, const float* cos, const float* sin, int64_t dims, bool interleaved);
  void (*add)(float* x, const float* y, int64_t n);
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t n);
  // acc = fma(coefficients[d], w[d], acc) for d = 0 .. count-1, each over n columns
  void (*axpy_rows)(const float* w, int64_t w_stride, int64_t count, const float* coefficients, float* acc, int64_t n);
  // out[d] = chain16(w[d], x) for d = 0 .. count-1
  void (*dot_rows)(const float* w, int64_t w_stride, int64_t count, const float* x, int64_t n, float* out);
  void (*attend)(const Attend& a);
  void (*index_scores)(const IndexScores& s);
  // scores of all experts from their logits
  void (*sigmoid_scores)(const float* logits, float* out, int64_t n);
  void (*softmax_scores)(const float* logits, float* out, int64_t n);
  // out = exp(logit / temperature - top), 0 where the logit is not finite
  void (*sample_weights)(const float* logits, float temperature, float top, float* out, int64_t n);
  // the elements of a test: out[i] = exp(x[i])
  void (*exp_all)(const float* x, float* out, int64_t n);
};

const OpsTable* scalar_ops();
const OpsTable* avx2_ops();    // null where this build has none
const OpsTable* avx512_ops();  // null where this build has none

// ---- choices: comparisons only, the same code for every instruction set (ops_choose.cpp) ----

// The top_k largest of scores[n] (n > top_k), ties in position order, NaN below everything; positions ascend.
void choose_positions(const float* scores, int64_t n, int64_t top_k, uint32_t* scratch, int32_t* positions);

// backends.api.RouterSpec without the score function.
struct RouterChoice {
  int64_t experts = 0;
  int64_t top_k = 0;
  bool normalise = false;
  float scale = 1.0f;
  int64_t groups = 1;
  int64_t top_groups = 1;
};

// scratch: 2 * experts floats. ids and weights have top_k entries, in routing order.
void choose_experts(const RouterChoice& spec, const float* scores, const float* bias, float* scratch, int32_t* ids,
                    float* weights);

// The largest, lowest index on ties, NaN ignored; 0 where all are NaN.
int64_t argmax(const float* x, int64_t n);

// Weights of tokens count as whole numbers, floor(weight * 2^42), whose sums depend on no order. A weight is at most 1,
// so sums of so many fit 62 bits.
constexpr float kTokenScale = 4398046511104.0f;
constexpr int64_t kMostTokens = int64_t{1} << 20;

// One index from weights[n] (0 to 1, one of them 1; n at most kMostTokens): top-p cut, then inverse CDF in index order.
int64_t choose_token(const float* weights, int64_t n, double top_p, double uniform);

}  // namespace picaflor
