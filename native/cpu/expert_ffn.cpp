// One MoE call: pairs of (row, choice) are sorted by expert; each part of the experts is computed in phases, work is
// taken from counters, outputs are added at the end in routing order.
// Must not know who holds the experts or Python.
#include "cpu/expert_ffn.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/kernels_layout.h"

namespace picaflor {
namespace {

constexpr int64_t kGatherRows = 128;    // prepared rows that a thread puts side by side
constexpr int64_t kFewPairs = 256;      // pairs of a part where a batch has fewer rows
constexpr int64_t kMostItemRows = 256;  // weight rows of one piece of work
constexpr int64_t kFewestItemRows = 64;
constexpr int64_t kItemStep = 32;  // rows that every instruction set likes
constexpr int64_t kItemsPerThread = 8;
constexpr int32_t kNone = -1;              // the id of no expert
constexpr int64_t kAloneFloats = 1 << 16;  // below this many values waking other threads costs more than it saves

Weight placed(const SlotMatrix& matrix, uint64_t address) {
  Weight weight;
  weight.format = matrix.format;
  weight.rows = matrix.rows;
  weight.cols = matrix.cols;
  weight.group = matrix.group;
  weight.codes = reinterpret_cast<const uint8_t*>(address + static_cast<uint64_t>(matrix.codes));
  weight.scales = reinterpret_cast<const uint8_t*>(address + static_cast<uint64_t>(matrix.scales));
  return weight;
}

// Pairs that one part holds at most.
int64_t most_pairs(const ExpertSizes& sizes) {
  return std::max(sizes.max_rows, std::min(kFewPairs, sizes.max_rows * sizes.top_k));
}

XSpec spec_of(const SlotMatrix& matrix, int32_t planes) { return x_spec(placed(matrix, 0), planes); }

}  // namespace

ExpertFfn::ExpertFfn(std::shared_ptr<Pool> pool, const KernelTable* kernels, const ExpertSizes& sizes)
    : pool_(std::move(pool)),
      kernels_(kernels),
      sizes_(sizes),
      part_pairs_(most_pairs(sizes)),
      inner_(part_pairs_ * sizes.inner_max * 4),
      up_(part_pairs_ * sizes.inner_max * 4),
      outputs_(sizes.max_rows * sizes.top_k * sizes.hidden * 4) {
  if (sizes.planes < 1 || sizes.planes > 3 || sizes.hidden < 1 || sizes.inner_max < 1 || sizes.max_rows < 1 ||
      sizes.top_k < 1) {
    throw std::invalid_argument("experts: planes must be 1, 2 or 3, and every size at least 1");
  }
}

void ExpertFfn::check_matrix(const SlotMatrix& matrix, const char* name, int64_t rows, int64_t cols) const {
  check_weight(placed(matrix, 64));
  if (matrix.rows != rows || matrix.cols != cols || matrix.codes < 0 || matrix.scales < 0) {
    throw std::invalid_argument(std::string("expert matrix ") + name + " is [" + std::to_string(matrix.rows) + ", " +
                                std::to_string(matrix.cols) + "] at " + std::to_string(matrix.codes) + ", needs [" +
                                std::to_string(rows) + ", " + std::to_string(cols) + "]");
  }
}

void ExpertFfn::check_layout(const SlotLayout& layout) const {
  const int64_t inner = layout.gate.rows;
  if (inner > sizes_.inner_max) {
    throw std::invalid_argument("expert has inner size " + std::to_string(inner) + ", at most " +
                                std::to_string(sizes_.inner_max) + " was announced");
  }
  check_matrix(layout.gate, "gate", inner, sizes_.hidden);
  check_matrix(layout.up, "up", inner, sizes_.hidden);
  check_matrix(layout.down, "down", sizes_.hidden, inner);
}

int32_t ExpertFfn::add_layer(const std::vector<SlotLayout>& experts) {
  Layer layer;
  for (const SlotLayout& layout : experts) {
    const auto found = std::find(layer.layouts.begin(), layer.layouts.end(), layout);
    if (found == layer.layouts.end()) {
      check_layout(layout);
      layer.layout_of.push_back(static_cast<int32_t>(layer.layouts.size()));
      layer.layouts.push_back(layout);
    } else {
      layer.layout_of.push_back(static_cast<int32_t>(found - layer.layouts.begin()));
    }
  }
  for (const SlotLayout& layout : layer.layouts) {
    prepared(spec_of(layout.gate, sizes_.planes));
    prepared(spec_of(layout.up, sizes_.planes));
    down_stride_ = std::max(down_stride_, x_stride(spec_of(layout.down, sizes_.planes)));
  }
  for (const PreparedRows& rows : prepared_) {
    x_bytes_ = std::max(x_bytes_, x_stride(rows.spec));
  }
  inner_digits_ = std::make_unique<Mapping>(part_pairs_ * down_stride_);
  gather_ = std::make_unique<Mapping>(pool_->threads() * std::min(kGatherRows, sizes_.max_rows) * x_bytes_);
  layers_.push_back(std::move(layer));
  layer_ = nullptr;
  return static_cast<int32_t>(layers_.size()) - 1;
}

ExpertFfn::PreparedRows& ExpertFfn::prepared(const XSpec& spec) {
  for (PreparedRows& rows : prepared_) {
    if (rows.spec == spec) {
      return rows;
    }
  }
  prepared_.push_back({spec, std::make_unique<Mapping>(sizes_.max_rows * x_stride(spec)), false});
  return prepared_.back();
}

void ExpertFfn::sort_pairs(const int32_t* ids) {
  const int64_t pairs = rows_ * sizes_.top_k;
  chosen_of_.assign(layer_->layout_of.size(), -1);
  chosen_.clear();
  for (int64_t i = 0; i < pairs; ++i) {
    if (ids[i] == kNone) {
      continue;
    }
    if (ids[i] < 0 || ids[i] >= static_cast<int64_t>(chosen_of_.size())) {
      throw std::invalid_argument("row " + std::to_string(i / sizes_.top_k) + " chose expert " +
                                  std::to_string(ids[i]) + " of " + std::to_string(chosen_of_.size()));
    }
    int32_t& index = chosen_of_[static_cast<size_t>(ids[i])];
    if (index < 0) {
      index = static_cast<int32_t>(chosen_.size());
      chosen_.push_back({ids[i], 0, 0, false});
    }
    ++chosen_[static_cast<size_t>(index)].pairs;
  }
  int64_t first = 0;
  for (Chosen& expert : chosen_) {
    if (expert.pairs > rows_) {
      throw std::invalid_argument("a row chose expert " + std::to_string(expert.id) + " twice");
    }
    expert.first = first;
    first += expert.pairs;
    expert.pairs = 0;
  }
  pair_row_.resize(static_cast<size_t>(pairs));
  pair_place_.resize(static_cast<size_t>(pairs));
  for (int64_t i = 0; i < pairs; ++i) {
    if (ids[i] == kNone) {
      pair_place_[static_cast<size_t>(i)] = kNone;
      continue;
    }
    Chosen& expert = chosen_[static_cast<size_t>(chosen_of_[static_cast<size_t>(ids[i])])];
    const int64_t place = expert.first + expert.pairs++;
    pair_row_[static_cast<size_t>(place)] = static_cast<int32_t>(i / sizes_.top_k);
    pair_place_[static_cast<size_t>(i)] = static_cast<int32_t>(place);
  }
}

const std::vector<int32_t>& ExpertFfn::begin(int32_t layer, const float* x, int64_t x_stride, const int32_t* ids,
                                             int64_t rows) {
  layer_ = nullptr;
  if (layer < 0 || layer >= static_cast<int32_t>(layers_.size())) {
    throw std::invalid_argument("layer " + std::to_string(layer) + " of " + std::to_string(layers_.size()));
  }
  if (rows < 0 || rows > sizes_.max_rows) {
    throw std::invalid_argument(std::to_string(rows) + " rows, at most " + std::to_string(sizes_.max_rows));
  }
  const Layer& begun = layers_[static_cast<size_t>(layer)];
  layer_ = &begun;
  x_ = x;
  x_stride_ = x_stride;
  rows_ = rows;
  try {
    sort_pairs(ids);
  } catch (...) {
    layer_ = nullptr;
    throw;
  }
  for (PreparedRows& prepared : prepared_) {
    prepared.valid = false;
  }
  distinct_.clear();
  for (const Chosen& expert : chosen_) {
    distinct_.push_back(expert.id);
  }
  return distinct_;
}

// Prepares x for every need of the given parts that has not been met since `begin`.
void ExpertFfn::prepare_rows(const std::vector<Part>& parts) {
  std::vector<PreparedRows*> missing;
  for (const Part& part : parts) {
    for (const Work& work : part.works) {
      for (const XSpec* spec : {&work.gate_x, &work.up_x}) {
        PreparedRows& rows = prepared(*spec);
        if (!rows.valid) {
          rows.valid = true;
          missing.push_back(&rows);
        }
      }
    }
  }
  const auto prepare = [&](const PreparedRows& rows, int64_t row) {
    kernels_->prepare_x(rows.spec, x_ + row * x_stride_, rows.memory->data() + row * x_stride(rows.spec));
  };
  const int64_t jobs = static_cast<int64_t>(missing.size()) * rows_;
  run_alone_or_shared(jobs, jobs * sizes_.hidden <= kAloneFloats,
                      [&](int64_t job) { prepare(*missing[static_cast<size_t>(job / rows_)], job % rows_); });
}

// job(item) for every item, on this thread alone or on all.
void ExpertFfn::run_alone_or_shared(int64_t items, bool alone, const std::function<void(int64_t)>& job) {
  if (alone) {
    for (int64_t item = 0; item < items; ++item) {
      job(item);
    }
    return;
  }
  Stage stage;
  stage.reset(items);
  pool_->run_open([&](int) { stage.work(job); });
}

// Row ranges: enough of them for all threads, not smaller than a few tiles.
void ExpertFfn::cut(Part& part) const {
  int64_t inner = 0;
  int64_t outer = 0;
  for (const Work& work : part.works) {
    inner += work.gate.rows;
    outer += work.down.rows;
  }
  const auto step_for = [&](int64_t rows) {
    const int64_t fair = round_up(rows / (pool_->threads() * kItemsPerThread) + 1, kItemStep);
    return std::clamp(fair, kFewestItemRows, kMostItemRows);
  };
  const int64_t inner_step = step_for(inner);
  const int64_t outer_step = step_for(outer);
  for (const Work& work : part.works) {
    for (int64_t row = 0; row < work.gate.rows; row += inner_step) {
      part.inner.push_back({&work, row, std::min(row + inner_step, work.gate.rows)});
    }
    for (int64_t row = 0; row < work.down.rows; row += outer_step) {
      part.outer.push_back({&work, row, std::min(row + outer_step, work.down.rows)});
    }
  }
}

std::vector<ExpertFfn::Part> ExpertFfn::plan(const int32_t* ids, const uint64_t* addresses, int64_t count) {
  std::vector<Part> parts;
  for (int64_t i = 0; i < count; ++i) {
    const bool known = ids[i] >= 0 && ids[i] < static_cast<int64_t>(chosen_of_.size());
    const int32_t index = known ? chosen_of_[static_cast<size_t>(ids[i])] : -1;
    if (index < 0 || addresses[i] == 0) {
      throw std::invalid_argument("expert " + std::to_string(ids[i]) + " was not asked for or has no address");
    }
    const Chosen& expert = chosen_[static_cast<size_t>(index)];
    const SlotLayout& layout = layer_->layouts[static_cast<size_t>(layer_->layout_of[static_cast<size_t>(ids[i])])];
    if (parts.empty() || parts.back().pairs + expert.pairs > part_pairs_) {
      parts.emplace_back();
    }
    Part& part = parts.back();
    Work work;
    work.id = ids[i];
    work.gate = placed(layout.gate, addresses[i]);
    work.up = placed(layout.up, addresses[i]);
    work.down = placed(layout.down, addresses[i]);
    work.gate_x = x_spec(work.gate, sizes_.planes);
    work.up_x = x_spec(work.up, sizes_.planes);
    work.down_x = x_spec(work.down, sizes_.planes);
    work.first = expert.first;
    work.pairs = expert.pairs;
    work.slot = part.pairs;
    part.pairs += expert.pairs;
    part.works.push_back(work);
  }
  for (Part& part : parts) {
    cut(part);
  }
  return parts;
}

// `pairs` prepared rows side by side, from pair `pair` of an expert on.
const std::byte* ExpertFfn::gathered(const Work& work, const XSpec& spec, int64_t pair, int64_t pairs, int thread) {
  const int64_t stride = x_stride(spec);
  const std::byte* all = prepared(spec).memory->data();
  const int32_t* rows = pair_row_.data() + work.first + pair;
  if (rows[pairs - 1] - rows[0] == pairs - 1) {
    return all + rows[0] * stride;
  }
  std::byte* out = gather_->data() + thread * std::min(kGatherRows, sizes_.max_rows) * x_bytes_;
  for (int64_t s = 0; s < pairs; ++s) {
    std::copy_n(all + rows[s] * stride, stride, out + s * stride);
  }
  return out;
}

void ExpertFfn::inner_item(const Item& item, const Ahead& ahead, int thread) {
  const Work& work = *item.work;
  const int64_t width = sizes_.inner_max;
  for (int64_t pair = 0; pair < work.pairs; pair += kGatherRows) {
    const int64_t pairs = std::min(kGatherRows, work.pairs - pair);
    float* gate = inner_.as<float>() + (work.slot + pair) * width;
    float* up = up_.as<float>() + (work.slot + pair) * width;
    const std::byte* x = gathered(work, work.gate_x, pair, pairs, thread);
    kernels_->matmul(work.gate, work.gate_x, x, pairs, gate, width, item.begin, item.end,
                     {&work.up, item.begin, item.end});
    if (work.up_x != work.gate_x) {
      x = gathered(work, work.up_x, pair, pairs, thread);
    }
    kernels_->matmul(work.up, work.up_x, x, pairs, up, width, item.begin, item.end, ahead);
    for (int64_t s = 0; s < pairs; ++s) {
      float* h = gate + s * width + item.begin;
      kernels_->silu_mul(h, up + s * width + item.begin, h, item.end - item.begin);
    }
  }
}

void ExpertFfn::prepare_pair(const Part& part, int64_t slot) {
  const auto after = std::upper_bound(part.works.begin(), part.works.end(), slot,
                                      [](int64_t value, const Work& work) { return value < work.slot; });
  const Work& work = *(after - 1);
  // Pairs of one expert lie x_stride(down_x) apart from the expert's first place on.
  std::byte* out = inner_digits(work.slot) + (slot - work.slot) * x_stride(work.down_x);
  kernels_->prepare_x(work.down_x, inner_.as<float>() + slot * sizes_.inner_max, out);
}

void ExpertFfn::outer_item(const Item& item, const Ahead& ahead) {
  const Work& work = *item.work;
  float* y = outputs_.as<float>() + work.first * sizes_.hidden;
  kernels_->matmul(work.down, work.down_x, inner_digits(work.slot), work.pairs, y, sizes_.hidden, item.begin, item.end,
                   ahead);
}

void ExpertFfn::run_part(const Part& part, Stages& stages, int thread) {
  const int64_t threads = pool_->threads();
  const auto inner_count = static_cast<int64_t>(part.inner.size());
  const auto outer_count = static_cast<int64_t>(part.outer.size());
  // What the caches should hear of: the item that comes after this one on the same thread, at best.
  const auto ahead_of = [&](int64_t inner, int64_t outer) {
    if (inner < inner_count) {
      const Item& later = part.inner[static_cast<size_t>(inner)];
      return Ahead{&later.work->gate, later.begin, later.end};
    }
    if (outer < outer_count) {
      const Item& later = part.outer[static_cast<size_t>(outer)];
      return Ahead{&later.work->down, later.begin, later.end};
    }
    return Ahead{};
  };
  stages.inner.work(
      [&](int64_t i) { inner_item(part.inner[static_cast<size_t>(i)], ahead_of(i + threads, thread), thread); });
  stages.pairs.work([&](int64_t i) { prepare_pair(part, i); });
  stages.outer.work(
      [&](int64_t i) { outer_item(part.outer[static_cast<size_t>(i)], ahead_of(inner_count, i + threads)); });
}

void ExpertFfn::run(const int32_t* ids, const uint64_t* addresses, int64_t count) {
  if (layer_ == nullptr) {
    throw std::invalid_argument("experts were given before a call was begun");
  }
  if (count == 0) {
    return;
  }
  const std::vector<Part> parts = plan(ids, addresses, count);
  prepare_rows(parts);
  std::vector<Stages> stages(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    stages[i].inner.reset(static_cast<int64_t>(parts[i].inner.size()));
    stages[i].pairs.reset(parts[i].pairs);
    stages[i].outer.reset(static_cast<int64_t>(parts[i].outer.size()));
  }
  pool_->run_open([&](int thread) {
    for (size_t i = 0; i < parts.size(); ++i) {
      run_part(parts[i], stages[i], thread);
    }
  });
  for (const Part& part : parts) {
    for (const Work& work : part.works) {
      chosen_[static_cast<size_t>(chosen_of_[static_cast<size_t>(work.id)])].done = true;
    }
  }
}

void ExpertFfn::check_done() const {
  if (layer_ == nullptr) {
    throw std::invalid_argument("experts were finished before a call was begun");
  }
  for (const Chosen& expert : chosen_) {
    if (!expert.done) {
      throw std::invalid_argument("expert " + std::to_string(expert.id) + " was not computed");
    }
  }
}

void ExpertFfn::pairs(float* out) {
  check_done();
  const auto copy_row = [&](int64_t row) {
    for (int64_t i = row * sizes_.top_k; i < (row + 1) * sizes_.top_k; ++i) {
      const int32_t place = pair_place_[static_cast<size_t>(i)];
      if (place != kNone) {
        std::copy_n(outputs_.as<float>() + place * sizes_.hidden, sizes_.hidden, out + i * sizes_.hidden);
      }
    }
  };
  layer_ = nullptr;
  run_alone_or_shared(rows_, rows_ * sizes_.top_k * sizes_.hidden <= kAloneFloats, copy_row);
}

void ExpertFfn::finish(const float* weights, float* out, int64_t out_stride) {
  check_done();
  const auto add_row = [&](int64_t row) {
    float* sum = out + row * out_stride;
    std::fill_n(sum, sizes_.hidden, 0.0f);
    for (int64_t i = row * sizes_.top_k; i < (row + 1) * sizes_.top_k; ++i) {
      const int32_t place = pair_place_[static_cast<size_t>(i)];
      if (place == kNone) {
        continue;
      }
      const float* y = outputs_.as<float>() + place * sizes_.hidden;
      kernels_->add_scaled(weights[i], y, sum, sizes_.hidden);
    }
  };
  layer_ = nullptr;
  run_alone_or_shared(rows_, rows_ * sizes_.top_k * sizes_.hidden <= kAloneFloats, add_row);
}

int64_t ExpertFfn::row_bytes() const {
  int64_t total = 2 * sizes_.inner_max * 4 + down_stride_ + sizes_.top_k * sizes_.hidden * 4;
  for (const PreparedRows& rows : prepared_) {
    total += x_stride(rows.spec);
  }
  return total;
}

void ExpertFfn::limit_rows(int64_t rows) {
  if (rows < 1 || rows > sizes_.max_rows) {
    throw std::invalid_argument("a limit of " + std::to_string(rows) + " rows, from 1 to " +
                                std::to_string(sizes_.max_rows) + " are there");
  }
  layer_ = nullptr;
  sizes_.max_rows = rows;
  part_pairs_ = most_pairs(sizes_);
  inner_.shrink(part_pairs_ * sizes_.inner_max * 4);
  up_.shrink(part_pairs_ * sizes_.inner_max * 4);
  outputs_.shrink(rows * sizes_.top_k * sizes_.hidden * 4);
  if (inner_digits_ != nullptr) {
    inner_digits_->shrink(part_pairs_ * down_stride_);
  }
  for (const PreparedRows& prepared : prepared_) {
    prepared.memory->shrink(rows * x_stride(prepared.spec));
  }
}

int64_t ExpertFfn::workspace_bytes() const {
  int64_t total = inner_.nbytes() + up_.nbytes() + outputs_.nbytes();
  total += inner_digits_ == nullptr ? 0 : inner_digits_->nbytes();
  total += gather_ == nullptr ? 0 : gather_->nbytes();
  for (const PreparedRows& rows : prepared_) {
    total += rows.memory->nbytes();
  }
  return total;
}

}  // namespace picaflor
