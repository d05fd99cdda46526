// The steps of a program but attention.
// Must not know families, files or Python.
#include "cpu/program_steps.h"

#include <algorithm>

#include "cpu/kernels_prepare.h"

namespace picaflor {

void EmbedStep::run_rows(Arena& arena, Range range, int) {
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t token = arena.batch.tokens[static_cast<size_t>(batch_row(arena, row))];
    if (token < 0 || token >= table.rows) {
      std::memset(out.at(row), 0, static_cast<size_t>(out.width) * sizeof(float));
    } else {
      kernels(arena).decode_row(table, token, out.at(row));
      if (rotated_rows(table.format)) {
        rotate_back(out.at(row), table.cols);
      }
    }
  }
}

void NormStep::run_rows(Arena& arena, Range range, int) {
  const int64_t part = x.width / heads;
  for (int64_t row = range.begin; row < range.end; ++row) {
    if (bias != nullptr) {
      ops(arena).layernorm(x.at(row), weight, bias, out.at(row), part, eps);
      continue;
    }
    for (int64_t head = 0; head < heads; ++head) {
      ops(arena).rmsnorm(x.at(row) + head * part, weight, out.at(row) + head * part, part, eps);
    }
  }
}

void PrepareStep::run_rows(Arena& arena, Range range, int) {
  const int64_t stride = x_stride(spec);
  for (int64_t row = range.begin; row < range.end; ++row) {
    kernels(arena).prepare_x(spec, x.at(row), out + row * stride);
  }
}

void MatmulStep::run_item(Arena& arena, int64_t item, int) {
  const int64_t begin = item * chunk;
  const int64_t end = std::min(begin + chunk, weight.rows);
  const int64_t coming = begin + arena.threads * chunk;  // what this thread most likely takes next
  Ahead ahead;
  if (coming < weight.rows) {
    ahead = {&weight, coming, std::min(coming + chunk, weight.rows)};
  } else if (next != nullptr) {
    ahead = {&next->weight, 0, std::min(next->chunk, next->weight.rows)};
  }
  kernels(arena).matmul(weight, spec, x, rows(arena), out.data, out.stride, begin, end, ahead);
}

void RopeStep::run_rows(Arena& arena, Range range, int) {
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t position = arena.batch.positions[static_cast<size_t>(batch_row(arena, row))];
    float* first = x.at(row) + start;
    for (int64_t head = 0; head < heads; ++head) {
      ops(arena).rope(first + head * head_width, table->cos(position), table->sin(position), dims, interleaved);
    }
  }
}

void AddStep::run_rows(Arena& arena, Range range, int) {
  for (int64_t row = range.begin; row < range.end; ++row) {
    ops(arena).add(x.at(row), y.at(row), x.width);
  }
}

void SiluMulStep::run_rows(Arena& arena, Range range, int) {
  for (int64_t row = range.begin; row < range.end; ++row) {
    ops(arena).silu_mul(gate.at(row), up.at(row), out.at(row), out.width);
  }
}

void KvWriteStep::run_rows(Arena& arena, Range range, int) {
  float* base = arena.plane_data(plane);
  const int64_t stride = arena.plane_width(plane);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t from = batch_row(arena, row);
    const int64_t token = arena.table(from).token(arena.batch.positions[static_cast<size_t>(from)]);
    std::memcpy(base + token * stride, x.at(row), static_cast<size_t>(x.width) * sizeof(float));
  }
}

void RouterStep::run_rows(Arena& arena, Range range, int thread) {
  float* scores = arena.scratch(thread);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const auto score = softmax ? ops(arena).softmax_scores : ops(arena).sigmoid_scores;
    score(logits.at(row), scores, choice.experts);
    choose_experts(choice, scores, bias, scores + choice.experts, ids.at(row), weights.at(row));
  }
}

void SelectOutputsStep::run_rows(Arena& arena, Range range, int) {
  for (int64_t row = range.begin; row < range.end; ++row) {
    std::memcpy(out.at(row), x.at(batch_row(arena, row)), static_cast<size_t>(x.width) * sizeof(float));
  }
}

}  // namespace picaflor
