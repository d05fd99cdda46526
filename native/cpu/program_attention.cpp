// Attention and the indexer's selection: how rows, heads and keys are shared among threads.
// Must not know families, files or Python.
#include <algorithm>

#include "cpu/kernels_prepare.h"
#include "cpu/program_steps.h"

namespace picaflor {
namespace {

constexpr int64_t kRowBlock = 16;     // rows that share one decoding of kv_b
constexpr int64_t kDecodedRows = 8;   // rows of kv_b that are decoded at a time
constexpr int64_t kScoreKeys = 1024;  // keys that a thread scores at a time

int64_t visible_keys(const Arena& arena, const Step& step, int64_t row) {
  return arena.batch.positions[static_cast<size_t>(step.batch_row(arena, row))] + 1;
}

// Whether so many selecting rows are scored in pieces of their keys; else each row is one item.
bool shared_scores(const Arena& arena, int64_t selecting) {
  return selecting < 2 * arena.threads && selecting <= kScoreRows;
}

void score(const Arena& arena, const Step& step, const IndexSpec& spec, int64_t row, int64_t begin, int64_t end,
           float* out) {
  step.ops(arena).index_scores({spec.heads, spec.head_dim, spec.q.at(row), spec.weights.at(row), spec.keys,
                                arena.table(step.batch_row(arena, row)), begin, end, out});
}

}  // namespace

void IndexScoreStep::begin(Arena& arena) {
  pieces.clear();
  std::vector<int64_t> selecting;
  for (int64_t row = 0; row < rows(arena); ++row) {
    if (visible_keys(arena, *this, row) > spec.top_k) {
      selecting.push_back(row);
    }
  }
  if (!shared_scores(arena, static_cast<int64_t>(selecting.size()))) {
    return;
  }
  for (size_t line = 0; line < selecting.size(); ++line) {
    const int64_t row = selecting[line];
    const int64_t visible = visible_keys(arena, *this, row);
    for (int64_t begin = 0; begin < visible; begin += kScoreKeys) {
      pieces.push_back({row, static_cast<int64_t>(line), begin, std::min(begin + kScoreKeys, visible)});
    }
  }
}

void IndexScoreStep::run_item(Arena& arena, int64_t item, int) {
  const Piece& piece = pieces[static_cast<size_t>(item)];
  score(arena, *this, spec, piece.row, piece.begin, piece.end, arena.scores(piece.line));
}

void IndexChooseStep::begin(Arena& arena) {
  lines.assign(static_cast<size_t>(rows(arena)), -2);
  int64_t count = 0;
  for (int64_t row = 0; row < rows(arena); ++row) {
    if (visible_keys(arena, *this, row) > spec.top_k) {
      lines[static_cast<size_t>(row)] = count++;
    }
  }
  if (!shared_scores(arena, count)) {
    for (int64_t& line : lines) {
      line = std::min<int64_t>(line, -1);
    }
  }
}

void IndexChooseStep::run_item(Arena& arena, int64_t row, int thread) {
  int32_t* out = spec.out.at(row);
  const int64_t line = lines[static_cast<size_t>(row)];
  if (line == -2) {
    out[0] = -1;
    return;
  }
  const int64_t visible = visible_keys(arena, *this, row);
  float* scores = arena.scores(line >= 0 ? line : kScoreRows + 2 * thread);
  if (line < 0) {
    score(arena, *this, spec, row, 0, visible, scores);
  }
  uint32_t* ranks = reinterpret_cast<uint32_t*>(arena.scores(kScoreRows + 2 * thread + 1));
  out[0] = static_cast<int32_t>(spec.top_k);
  choose_positions(scores, visible, spec.top_k, ranks, out + 1);
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
  items();
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
        kernels(arena).decode_row(kv_b, head * (nope + value) + d + i, decoded + i * width);
      }
      for (int64_t row = block.begin; row < block.end; ++row) {
        const int64_t slot = (row - block.begin) * (group.end - group.begin) + (head - group.begin);
        const float* coefficients = q.at(row) + head * (nope + rope) + d;
        ops(arena).axpy_rows(decoded, width, count, coefficients, absorbed + slot * width, width);
      }
    }
  }
  if (rotated_rows(kv_b.format)) {  // once per sum, not per row of W
    for (int64_t slot = 0; slot < size / width; ++slot) {
      rotate_back(absorbed + slot * width, width);
    }
  }
}

// out[row][head][v] = W[head * (nope + value) + nope + v] . absorbed[row][head]
void MlaStep::expand(Arena& arena, Range block, Range group, float* absorbed, float* decoded) const {
  const int64_t width = latent.width;
  if (rotated_rows(kv_b.format)) {
    for (int64_t slot = 0; slot < (block.end - block.begin) * (group.end - group.begin); ++slot) {
      rotate(absorbed + slot * width, width);
    }
  }
  for (int64_t head = group.begin; head < group.end; ++head) {
    for (int64_t v = 0; v < value; v += kDecodedRows) {
      const int64_t count = std::min(kDecodedRows, value - v);
      for (int64_t i = 0; i < count; ++i) {
        kernels(arena).decode_row(kv_b, head * (nope + value) + nope + v + i, decoded + i * width);
      }
      for (int64_t row = block.begin; row < block.end; ++row) {
        const int64_t slot = (row - block.begin) * (group.end - group.begin) + (head - group.begin);
        ops(arena).dot_rows(decoded, width, count, absorbed + slot * width, width, out.at(row) + head * value + v);
      }
    }
  }
}

void MlaStep::run_item(Arena& arena, int64_t item, int thread) {
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
    ops(arena).attend(a);
  }
  expand(arena, block, group, absorbed, decoded);
}

// ---- GQA ----

void GqaStep::begin(Arena& arena) { split(arena, kv_heads, heads / kv_heads); }

void GqaStep::run_item(Arena& arena, int64_t item, int thread) {
  const int64_t n = rows(arena);
  const int64_t shared = heads / kv_heads;  // query heads per kv head
  Attend a;
  a.q_stride = head_dim;
  a.out_stride = head_dim;
  a.keys = keys;
  a.values = values;
  a.scale = scale;
  a.scratch = arena.scratch(thread);
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
    ops(arena).attend(a);
  }
}

}  // namespace picaflor
