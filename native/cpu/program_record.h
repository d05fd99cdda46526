// Records operations into a Program: which steps, in which segment, where threads must wait for each other.
// Must not know families, files or Python. Sizes are checked by the caller (backends/cpu/recorder.py).
#pragma once

#include "cpu/program_steps.h"

namespace picaflor {

struct MlaSpec {
  Weight kv_b;
  int32_t latent = 0;
  int32_t rope_key = 0;
  int64_t heads = 0, nope = 0, rope = 0, value = 0;
  float scale = 1.0f;
};

struct GqaSpec {
  int32_t keys = 0;
  int32_t values = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1.0f;
};

class Builder {
 public:
  // `planes`: int8 planes of the activations, 2 standard, 3 exact.
  Builder(std::shared_ptr<Arena> arena, int32_t planes) : arena_(std::move(arena)), planes_(planes) { reset(); }
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  void embed(const Weight& table, View out);
  void rmsnorm(View x, const float* weight, View out, float eps, int64_t heads);
  void layernorm(View x, const float* weight, const float* bias, View out, float eps);
  void matmul(View x, const Weight& weight, View out);
  void rope(View x, int64_t heads, int64_t head_width, int64_t start, int64_t dims, double theta, bool interleaved);
  void add(View x, View y);
  void silu_mul(View gate, View up, View out);
  void kv_write(View x, int32_t plane);
  void index_select(View q, View weights, int32_t keys, View out, int64_t heads, int64_t head_dim, int64_t top_k);
  void mla(View q, View out, const MlaSpec& spec, const View* selection);
  void gqa(View q, View out, const GqaSpec& spec, const View* selection);
  void router(View logits, const float* bias, View ids, View weights, bool softmax, const RouterChoice& choice);
  void experts(View out);  // ends the segment; the caller computes `out` between segments
  void select_outputs(View x, View out);
  std::unique_ptr<Program> finish();

  bool after_outputs() const { return outputs_; }
  bool plain = false;  // operations recorded while it is set run by the scalar tables
  const std::shared_ptr<Arena>& arena() const { return arena_; }

 private:
  // What a step touches: a space (buffer, plane, prepared rows, scores) and columns of it.
  struct Access {
    int64_t space = 0;
    int64_t start = 0;
    int64_t width = 0;
    bool write = false;
    int domain = 0;  // > 0: row r by the thread of row r (1 batch rows, 2 output rows); 0: any thread any row
  };
  struct Ready {
    View view;
    XSpec spec;
    std::byte* data = nullptr;
  };

  void reset();
  Access reads(View view, bool own_rows = true) const;
  Access writes(View view, bool own_rows = true) const;
  Access plane_access(int32_t plane, bool write) const;
  void push(std::unique_ptr<Step> step, TimeClass time, const std::vector<Access>& accesses);
  void invalidate(const Access& access);
  const Ready& prepare(View x, const XSpec& spec);
  void link_matmuls();

  std::shared_ptr<Arena> arena_;
  int32_t planes_;
  bool outputs_ = false;
  std::vector<std::vector<std::unique_ptr<Step>>> segments_;
  std::vector<Access> pending_;  // since the last barrier
  std::vector<Ready> ready_;     // prepared rows that are still those of their buffer
};

}  // namespace picaflor
