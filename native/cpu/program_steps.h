// The steps of a program but attention: each one operation over rows or output tiles.
// Must not know families, files or Python.
#pragma once

#include <cstring>

#include "cpu/program.h"

namespace picaflor {

struct EmbedStep final : Step {
  Weight table;
  RowsOf<float> out;
  void run(Arena& arena, int thread) override;
};

struct NormStep final : Step {
  RowsOf<float> x, out;
  const float* weight = nullptr;
  const float* bias = nullptr;  // layernorm where set
  float eps = 0.0f;
  int64_t heads = 1;
  void run(Arena& arena, int thread) override;
};

// Activations of a buffer in the form that some matrices need.
struct PrepareStep final : Step {
  RowsOf<float> x;
  XSpec spec;
  std::byte* out = nullptr;
  void run(Arena& arena, int thread) override;
};

struct MatmulStep final : Step {
  Weight weight;
  XSpec spec;
  const std::byte* x = nullptr;
  RowsOf<float> out;
  int64_t chunk = 0;                 // output rows that a thread takes at a time
  const MatmulStep* next = nullptr;  // its weights are needed after these
  std::atomic<int64_t> counter{0};
  void begin(Arena&) override { counter.store(0, std::memory_order_relaxed); }
  void run(Arena& arena, int thread) override;
};

struct RopeStep final : Step {
  RowsOf<float> x;
  const RopeTable* table = nullptr;
  int64_t heads = 0, head_width = 0, start = 0, dims = 0;
  bool interleaved = false;
  void run(Arena& arena, int thread) override;
};

struct AddStep final : Step {
  RowsOf<float> x, y;
  void run(Arena& arena, int thread) override;
};

struct SiluMulStep final : Step {
  RowsOf<float> gate, up, out;
  void run(Arena& arena, int thread) override;
};

struct KvWriteStep final : Step {
  RowsOf<float> x;
  int32_t plane = 0;
  void run(Arena& arena, int thread) override;
};

struct RouterStep final : Step {
  RowsOf<float> logits, weights;
  RowsOf<int32_t> ids;
  const float* bias = nullptr;
  bool softmax = false;
  RouterChoice choice;
  void run(Arena& arena, int thread) override;
};

struct SelectOutputsStep final : Step {
  RowsOf<float> x, out;
  void run(Arena& arena, int thread) override;
};

// ---- program_attention.cpp ----

struct IndexSelectStep final : Step {
  RowsOf<float> q, weights;
  Cached keys;
  RowsOf<int32_t> out;
  int64_t heads = 0, head_dim = 0, top_k = 0;
  std::vector<int64_t> selecting;  // rows with more than top_k keys, found in begin
  void begin(Arena& arena) override;
  void run(Arena& arena, int thread) override;
};

// Work items of attention: blocks of rows times groups of heads, taken by threads as they come.
struct AttentionStep : Step {
  RowsOf<float> q, out;
  RowsOf<int32_t> selection;  // data null: none
  int64_t row_block = 1, head_group = 1, row_blocks = 0, head_groups = 0;
  float scale = 1.0f;
  std::atomic<int64_t> counter{0};

 protected:
  // Shrink blocks until every thread has work; `heads` per unit, `units` independent units of them.
  void split(const Arena& arena, int64_t units, int64_t heads);
  void set_keys(const Arena& arena, int64_t row, Attend& a) const;
};

struct MlaStep final : AttentionStep {
  Weight kv_b;
  Cached latent, rope_key;
  int64_t heads = 0, nope = 0, rope = 0, value = 0;
  void begin(Arena& arena) override;
  void run(Arena& arena, int thread) override;
  int64_t scratch_floats() const;

 private:
  void absorb(Arena& arena, Range rows, Range group, float* absorbed, float* decoded) const;
  void expand(Arena& arena, Range rows, Range group, const float* absorbed, float* decoded) const;
};

struct GqaStep final : AttentionStep {
  Cached keys, values;  // of token 0, kv head 0; width head_dim
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  void begin(Arena& arena) override;
  void run(Arena& arena, int thread) override;
  int64_t scratch_floats() const { return attend_scratch(kAttendHeads, head_dim); }
};

}  // namespace picaflor
