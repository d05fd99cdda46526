// Attention and the indexer's selection: how rows, heads and keys are shared among threads.
// Must not know families, files or Python.
#include <algorithm>

#include "cpu/program_steps.h"

namespace picaflor {
namespace {

constexpr int64_t kRowBlock = 16;     // rows that share one decoding of kv_b
constexpr int64_t kDecodedRows = 8;   // rows of kv_b that are decoded at a time
constexpr int64_t kScoreKeys = 1024;  // keys that a thread scores at a time

}  // namespace

void IndexSelectStep::begin(Arena& arena) {
  selecting.clear();
  for (int64_t row = 0; row < rows(arena); ++row) {
    if (arena.batch.positions[static_cast<size_t>(batch_row(arena, row))] + 1 > top_k) {
      selecting.push_back(row);
    }
  }
}

void IndexSelectStep::run(Arena& arena, int thread) {
  const Range range = mine(arena, thread);
  for (int64_t row = range.begin; row < range.end; ++row) {
    out.at(row)[0] = -1;
  }
  const int64_t count = static_cast<int64_t>(selecting.size());
  for (int64_t first = 0; first < count; first += kScoreRows) {
    const int64_t last = std::min(first + kScoreRows, count);
    arena.pool->barrier();  // the counts above and the scores of the block before are done with
    int64_t item = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = selecting[static_cast<size_t>(i)];
      const int64_t from = batch_row(arena, row);
      const int64_t visible = arena.batch.positions[static_cast<size_t>(from)] + 1;
      for (int64_t begin = 0; begin < visible; begin += kScoreKeys, ++item) {
        if (item % arena.threads == thread) {
          arena.ops->index_scores({heads, head_dim, q.at(row), weights.at(row), keys, arena.table(from), begin,
                                   std::min(begin + kScoreKeys, visible), arena.scores(i - first)});
        }
      }
    }
    arena.pool->barrier();
    for (int64_t i = first + thread; i < last; i += arena.threads) {
      const int64_t row = selecting[static_cast<size_t>(i)];
      const int64_t visible = arena.batch.positions[static_cast<size_t>(batch_row(arena, row))] + 1;
      uint32_t* ranks = reinterpret_cast<uint32_t*>(arena.scores(kScoreRows + i - first));
      out.at(row)[0] = static_cast<int32_t>(top_k);
      choose_positions(arena.scores(i - first), visible, top_k, ranks, out.at(row) + 1);
    }
  }
}

void AttentionStep::split(const Arena& arena, int64_t units, int64_t heads) {
  const int64_t n = rows(arena);
  const int64_t wanted = arena.threads == 1 ? 1 : arena.threads * (n > 1 ? 2 : 1);
  row_block = std::min(kRowBlock, std::max<int64_t>(n, 1));
  head_group = std::min(kAttendHeads, heads);
  const auto items = [&] {
    row_blocks = (n + row_block - 1) / row_block;
    head_groups = (heads + head_group - 1) / head_group;
    return row_blocks * head_groups * units;
  };
  while (items() < wanted && head_group > 4) {
    head_group = (head_group + 1) / 2;
  }
  while (items() < wanted && row_block > 1) {
    row_block = (row_block + 1) / 2;
  }
  while (items() < wanted && head_group > 1) {
    head_group = (head_group + 1) / 2;
  }
  counter.store(0, std::memory_order_relaxed);
}

void AttentionStep::set_keys(const Arena& arena, int64_t row, Attend& a) const {
  const int64_t from = batch_row(arena, row);
  a.table = arena.table(from);
  a.visible = arena.batch.positions[static_cast<size_t>(from)] + 1;
  a.selection = nullptr;
  if (selection.data != nullptr && selection.at(row)[0] >= 0) {
    a.selected = selection.at(row)[0];
    a.selection = selection.at(row) + 1;
  }
}

// ---- MLA ----

int64_t MlaStep::scratch_floats() const {
  const int64_t width = latent.width;
  return kRowBlock * kAttendHeads * width + kDecodedRows * width + attend_scratch(kAttendHeads, width);
}

void MlaStep::begin(Arena& arena) { split(arena, 1, heads); }

// absorbed[row][head] = sum over d of q_nope[d] * W[head * (nope + value) + d]
void MlaStep::absorb(Arena& arena, Range block, Range group, float* absorbed, float* decoded) const {
  const int64_t width = latent.width;
  const int64_t size = (block.end - block.begin) * (group.end - group.begin) * width;
  std::memset(absorbed, 0, static_cast<size_t>(size) * sizeof(float));
  for (int64_t head = group.begin; head < group.end; ++head) {
    for (int64_t d = 0; d < nope; d += kDecodedRows) {
      const int64_t count = std::min(kDecodedRows, nope - d);
      for (int64_t i = 0; i < count; ++i) {
        arena.kernels->decode_row(kv_b, head * (nope + value) + d + i, decoded + i * width);
      }
      for (int64_t row = block.begin; row < block.end; ++row) {
        const int64_t slot = (row - block.begin) * (group.end - group.begin) + (head - group.begin);
        const float* coefficients = q.at(row) + head * (nope + rope) + d;
        arena.ops->axpy_rows(decoded, width, count, coefficients, absorbed + slot * width, width);
      }
    }
  }
}

// out[row][head][v] = W[head * (nope + value) + nope + v] . absorbed[row][head]
void MlaStep::expand(Arena& arena, Range block, Range group, const float* absorbed, float* decoded) const {
  const int64_t width = latent.width;
  for (int64_t head = group.begin; head < group.end; ++head) {
    for (int64_t v = 0; v < value; v += kDecodedRows) {
      const int64_t count = std::min(kDecodedRows, value - v);
      for (int64_t i = 0; i < count; ++i) {
        arena.kernels->decode_row(kv_b, head * (nope + value) + nope + v + i, decoded + i * width);
      }
      for (int64_t row = block.begin; row < block.end; ++row) {
        const int64_t slot = (row - block.begin) * (group.end - group.begin) + (head - group.begin);
        arena.ops->dot_rows(decoded, width, count, absorbed + slot * width, width, out.at(row) + head * value + v);
      }
    }
  }
}

void MlaStep::run(Arena& arena, int thread) {
  const int64_t n = rows(arena);
  const int64_t width = latent.width;
  float* absorbed = arena.scratch(thread);
  float* decoded = absorbed + kRowBlock * kAttendHeads * width;
  Attend a;
  a.q_stride = width;
  a.q2_stride = nope + rope;
  a.keys = latent;
  a.keys2 = rope_key;
  a.values = latent;
  a.scale = scale;
  a.out_stride = width;
  a.scratch = decoded + kDecodedRows * width;
  for (;;) {
    const int64_t item = counter.fetch_add(1, std::memory_order_relaxed);
    if (item >= row_blocks * head_groups) {
      return;
    }
    const int64_t first_row = item / head_groups * row_block;
    const int64_t first_head = item % head_groups * head_group;
    const Range block{first_row, std::min(first_row + row_block, n)};
    const Range group{first_head, std::min(first_head + head_group, heads)};
    a.heads = group.end - group.begin;
    absorb(arena, block, group, absorbed, decoded);
    for (int64_t row = block.begin; row < block.end; ++row) {
      float* clat = absorbed + (row - block.begin) * a.heads * width;
      a.q = clat;
      a.out = clat;
      a.q2 = q.at(row) + first_head * (nope + rope) + nope;
      set_keys(arena, row, a);
      arena.ops->attend(a);
    }
    expand(arena, block, group, absorbed, decoded);
  }
}

// ---- GQA ----

void GqaStep::begin(Arena& arena) { split(arena, kv_heads, heads / kv_heads); }

void GqaStep::run(Arena& arena, int thread) {
  const int64_t n = rows(arena);
  const int64_t shared = heads / kv_heads;  // query heads per kv head
  Attend a;
  a.q_stride = head_dim;
  a.out_stride = head_dim;
  a.keys = keys;
  a.values = values;
  a.scale = scale;
  a.scratch = arena.scratch(thread);
  for (;;) {
    const int64_t item = counter.fetch_add(1, std::memory_order_relaxed);
    if (item >= row_blocks * head_groups * kv_heads) {
      return;
    }
    const int64_t kv_head = item % kv_heads;
    const int64_t first = item / kv_heads % head_groups * head_group;
    const int64_t first_row = item / kv_heads / head_groups * row_block;
    const int64_t head = kv_head * shared + first;
    a.heads = std::min(head_group, shared - first);
    a.keys.data = keys.data + kv_head * head_dim;
    a.values.data = values.data + kv_head * head_dim;
    for (int64_t row = first_row; row < std::min(first_row + row_block, n); ++row) {
      a.q = q.at(row) + head * head_dim;
      a.out = out.at(row) + head * head_dim;
      set_keys(arena, row, a);
      arena.ops->attend(a);
    }
  }
}

}  // namespace picaflor
