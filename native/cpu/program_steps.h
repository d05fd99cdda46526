// The steps of a program but attention: each one operation over rows or output tiles.
// Must not know families, files or Python.
#pragma once

#include <cstring>

#include "cpu/program.h"

namespace picaflor {

struct EmbedStep final : RowStep {
  Weight table;
  RowsOf<float> out;
  void run_rows(Arena& arena, Range range, int thread) override;
};

struct NormStep final : RowStep {
  RowsOf<float> x, out;
  const float* weight = nullptr;
  const float* bias = nullptr;  // layernorm where set
  float eps = 0.0f;
  int64_t heads = 1;
  void run_rows(Arena& arena, Range range, int thread) override;
};

// Activations of a buffer in the form that some matrices need.
struct PrepareStep final : RowStep {
  RowsOf<float> x;
  XSpec spec;
  std::byte* out = nullptr;
  void run_rows(Arena& arena, Range range, int thread) override;
};

struct MatmulStep final : ItemStep {
  Weight weight;
  XSpec spec;
  const std::byte* x = nullptr;
  RowsOf<float> out;
  int64_t chunk = 0;                 // output rows that a thread takes at a time
  const MatmulStep* next = nullptr;  // its weights are needed after these
  int64_t items(const Arena& arena) const override { return rows(arena) == 0 ? 0 : (weight.rows + chunk - 1) / chunk; }
  void run_item(Arena& arena, int64_t item, int thread) override;
};

struct RopeStep final : RowStep {
  RowsOf<float> x;
  const RopeTable* table = nullptr;
  int64_t heads = 0, head_width = 0, start = 0, dims = 0;
  bool interleaved = false;
  void run_rows(Arena& arena, Range range, int thread) override;
};

struct AddStep final : RowStep {
  RowsOf<float> x, y;
  void run_rows(Arena& arena, Range range, int thread) override;
};

struct SiluMulStep final : RowStep {
  RowsOf<float> gate, up, out;
  void run_rows(Arena& arena, Range range, int thread) override;
};

struct KvWriteStep final : RowStep {
  RowsOf<float> x;
  int32_t plane = 0;
  void run_rows(Arena& arena, Range range, int thread) override;
};

struct RouterStep final : RowStep {
  RowsOf<float> logits, weights;
  RowsOf<int32_t> ids;
  const float* bias = nullptr;
  bool softmax = false;
  RouterChoice choice;
  void run_rows(Arena& arena, Range range, int thread) override;
};

struct SelectOutputsStep final : RowStep {
  RowsOf<float> x, out;
  void run_rows(Arena& arena, Range range, int thread) override;
};

// ---- program_attention.cpp ----

// What both steps of the indexer know. Rows with at most top_k keys select nothing.
struct IndexSpec {
  RowsOf<float> q, weights;
  Cached keys;
  RowsOf<int32_t> out;
  int64_t heads = 0, head_dim = 0, top_k = 0;
};

// Scores of the first rows that select, by pieces of their keys: where rows are too few to give every thread one.
struct IndexScoreStep final : ItemStep {
  struct Piece {
    int64_t row, line, begin, end;
  };
  IndexSpec spec;
  std::vector<Piece> pieces;
  void begin(Arena& arena) override;
  int64_t items(const Arena&) const override { return static_cast<int64_t>(pieces.size()); }
  void run_item(Arena& arena, int64_t item, int thread) override;
};

// The selection of every row; scores those rows that no thread has scored yet.
struct IndexChooseStep final : ItemStep {
  IndexSpec spec;
  std::vector<int64_t> lines;  // by row: the line of its scores, -1 not scored yet, -2 selects nothing
  void begin(Arena& arena) override;
  int64_t items(const Arena& arena) const override { return rows(arena); }
  void run_item(Arena& arena, int64_t item, int thread) override;
};

// Items of attention: blocks of rows times groups of heads.
struct AttentionStep : ItemStep {
  RowsOf<float> q, out;
  RowsOf<int32_t> selection;  // data null: none
  int64_t row_block = 1, head_group = 1, row_blocks = 0, head_groups = 0;
  float scale = 1.0f;

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
  int64_t items(const Arena&) const override { return row_blocks * head_groups; }
  void run_item(Arena& arena, int64_t item, int thread) override;
  int64_t scratch_floats() const;

 private:
  void absorb(Arena& arena, Range rows, Range group, float* absorbed, float* decoded) const;
  void expand(Arena& arena, Range rows, Range group, float* absorbed, float* decoded) const;
};

struct GqaStep final : AttentionStep {
  Cached keys, values;  // of token 0, kv head 0; width head_dim
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  void begin(Arena& arena) override;
  int64_t items(const Arena&) const override { return row_blocks * head_groups * kv_heads; }
  void run_item(Arena& arena, int64_t item, int thread) override;
  int64_t scratch_floats() const { return attend_scratch(kAttendHeads, head_dim); }
};

}  // namespace picaflor
