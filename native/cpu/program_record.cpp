// Records operations into a Program.
// Must not know families, files or Python.
#include "cpu/program_record.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace picaflor {
namespace {

constexpr int64_t kPlaneSpace = int64_t{1} << 32;
constexpr int64_t kPreparedSpace = int64_t{1} << 33;
constexpr int64_t kScoreSpace = int64_t{1} << 34;
constexpr int64_t kSmallChunk = 32768;  // weights: a smaller piece is not worth a thread's turn

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Output rows per turn: about four turns per thread, none tiny, every thread at least one.
int64_t chunk_rows(const Weight& weight, int64_t tile, int threads) {
  if (threads == 1) {
    return weight.rows;
  }
  const int64_t fair = round_up((weight.rows + threads - 1) / threads, tile);
  const int64_t quarter = round_up((weight.rows + 4 * threads - 1) / (4 * threads), tile);
  const int64_t smallest = round_up((kSmallChunk + weight.cols - 1) / weight.cols, tile);
  return std::min(fair, std::max(quarter, smallest));
}

}  // namespace

void Builder::reset() {
  outputs_ = false;
  segments_.clear();
  segments_.emplace_back();
  pending_.clear();
  ready_.clear();
}

Builder::Access Builder::reads(View view, bool own_rows) const {
  return {view.storage, view.start, view.width, false, own_rows ? (outputs_ ? 2 : 1) : 0};
}

Builder::Access Builder::writes(View view, bool own_rows) const {
  Access access = reads(view, own_rows);
  access.write = true;
  return access;
}

Builder::Access Builder::plane_access(int32_t plane, bool write) const {
  return {kPlaneSpace + plane, 0, arena_->plane_width(plane), write, write ? (outputs_ ? 2 : 1) : 0};
}

void Builder::invalidate(const Access& access) {
  const auto overlaps = [&](const Ready& ready) {
    return ready.view.storage == access.space && ready.view.start < access.start + access.width &&
           access.start < ready.view.start + ready.view.width;
  };
  ready_.erase(std::remove_if(ready_.begin(), ready_.end(), overlaps), ready_.end());
}

void Builder::push(std::unique_ptr<Step> step, TimeClass time, const std::vector<Access>& accesses) {
  const auto conflict = [](const Access& a, const Access& b) {
    const bool overlap = a.space == b.space && a.start < b.start + b.width && b.start < a.start + a.width;
    const bool same_thread = a.domain != 0 && a.domain == b.domain;
    return overlap && (a.write || b.write) && !same_thread;
  };
  for (const Access& now : accesses) {
    for (const Access& before : pending_) {
      step->barrier = step->barrier || conflict(now, before);
    }
  }
  if (step->barrier) {
    pending_.clear();
  }
  pending_.insert(pending_.end(), accesses.begin(), accesses.end());
  for (const Access& now : accesses) {
    if (now.write) {
      invalidate(now);
    }
    if (!outputs_) {
      arena_->mark_full(now.space);
    }
  }
  step->outputs = outputs_;
  step->plain = plain;
  step->time = outputs_ ? TimeClass::head : time;
  segments_.back().push_back(std::move(step));
}

void Builder::embed(const Weight& table, View out) {
  auto step = std::make_unique<EmbedStep>();
  step->table = table;
  step->out = arena_->f32(out);
  push(std::move(step), TimeClass::other, {writes(out)});
}

void Builder::rmsnorm(View x, const float* weight, View out, float eps, int64_t heads) {
  auto step = std::make_unique<NormStep>();
  step->x = arena_->f32(x);
  step->out = arena_->f32(out);
  step->weight = weight;
  step->eps = eps;
  step->heads = heads;
  push(std::move(step), TimeClass::other, {reads(x), writes(out)});
}

void Builder::layernorm(View x, const float* weight, const float* bias, View out, float eps) {
  auto step = std::make_unique<NormStep>();
  step->x = arena_->f32(x);
  step->out = arena_->f32(out);
  step->weight = weight;
  step->bias = bias;
  step->eps = eps;
  push(std::move(step), TimeClass::other, {reads(x), writes(out)});
}

const Builder::Ready& Builder::prepare(View x, const XSpec& spec) {
  for (const Ready& ready : ready_) {
    if (ready.view.storage == x.storage && ready.view.start == x.start && ready.view.width == x.width &&
        ready.spec == spec) {
      return ready;
    }
  }
  auto step = std::make_unique<PrepareStep>();
  step->x = arena_->f32(x);
  step->spec = spec;
  step->out = arena_->prepared(x, spec, outputs_);
  std::byte* data = step->out;
  Access out{kPreparedSpace + reinterpret_cast<int64_t>(data), 0, 1, true, outputs_ ? 2 : 1};
  push(std::move(step), TimeClass::matmul, {reads(x), out});
  ready_.push_back({x, spec, data});
  return ready_.back();
}

void Builder::matmul(View x, const Weight& weight, View out) {
  const XSpec spec = x_spec(weight, planes_);
  const Ready ready = prepare(x, spec);
  auto step = std::make_unique<MatmulStep>();
  step->weight = weight;
  step->spec = spec;
  step->x = ready.data;
  step->out = arena_->f32(out);
  step->chunk = chunk_rows(weight, arena_->kernels->tile_rows, arena_->threads);
  const Access in{kPreparedSpace + reinterpret_cast<int64_t>(ready.data), 0, 1, false, 0};
  push(std::move(step), TimeClass::matmul, {in, writes(out, false)});
}

void Builder::rope(View x, int64_t heads, int64_t head_width, int64_t start, int64_t dims, double theta,
                   bool interleaved) {
  if (dims > kRopeDims) {
    throw std::invalid_argument("rope over " + std::to_string(dims) + " values, at most " + std::to_string(kRopeDims) +
                                " are possible");
  }
  auto step = std::make_unique<RopeStep>();
  step->x = arena_->f32(x);
  step->table = arena_->rope(dims, theta);
  step->heads = heads;
  step->head_width = head_width;
  step->start = start;
  step->dims = dims;
  step->interleaved = interleaved;
  push(std::move(step), TimeClass::other, {writes(x)});
}

void Builder::add(View x, View y) {
  auto step = std::make_unique<AddStep>();
  step->x = arena_->f32(x);
  step->y = arena_->f32(y);
  push(std::move(step), TimeClass::other, {reads(y), writes(x)});
}

void Builder::silu_mul(View gate, View up, View out) {
  auto step = std::make_unique<SiluMulStep>();
  step->gate = arena_->f32(gate);
  step->up = arena_->f32(up);
  step->out = arena_->f32(out);
  push(std::move(step), TimeClass::other, {reads(gate), reads(up), writes(out)});
}

void Builder::kv_write(View x, int32_t plane) {
  auto step = std::make_unique<KvWriteStep>();
  step->x = arena_->f32(x);
  step->plane = plane;
  push(std::move(step), TimeClass::attention, {reads(x), plane_access(plane, true)});
}

void Builder::index_select(View q, View weights, int32_t keys, View out, int64_t heads, int64_t head_dim,
                           int64_t top_k) {
  arena_->reserve_scores();
  const IndexSpec spec{
      arena_->f32(q), arena_->f32(weights), arena_->plane(keys, head_dim), arena_->i32(out), heads, head_dim, top_k};
  auto score = std::make_unique<IndexScoreStep>();
  score->spec = spec;
  const std::vector<Access> inputs{reads(q, false), reads(weights, false), plane_access(keys, false)};
  std::vector<Access> accesses = inputs;
  accesses.push_back({kScoreSpace, 0, 1, true, 0});
  push(std::move(score), TimeClass::attention, accesses);
  auto choose = std::make_unique<IndexChooseStep>();
  choose->spec = spec;
  accesses.push_back(writes(out, false));
  push(std::move(choose), TimeClass::attention, accesses);
}

void Builder::mla(View q, View out, const MlaSpec& spec, const View* selection) {
  auto step = std::make_unique<MlaStep>();
  step->q = arena_->f32(q);
  step->out = arena_->f32(out);
  step->kv_b = spec.kv_b;
  step->latent = arena_->plane(spec.latent, arena_->plane_width(spec.latent));
  step->rope_key = arena_->plane(spec.rope_key, arena_->plane_width(spec.rope_key));
  step->heads = spec.heads;
  step->nope = spec.nope;
  step->rope = spec.rope;
  step->value = spec.value;
  step->scale = spec.scale;
  arena_->reserve_scratch(step->scratch_floats());
  std::vector<Access> accesses{reads(q, false), writes(out, false), plane_access(spec.latent, false),
                               plane_access(spec.rope_key, false)};
  if (selection != nullptr) {
    step->selection = arena_->i32(*selection);
    accesses.push_back(reads(*selection, false));
  }
  push(std::move(step), TimeClass::attention, accesses);
}

void Builder::gqa(View q, View out, const GqaSpec& spec, const View* selection) {
  auto step = std::make_unique<GqaStep>();
  step->q = arena_->f32(q);
  step->out = arena_->f32(out);
  step->keys = arena_->plane(spec.keys, spec.head_dim);
  step->values = arena_->plane(spec.values, spec.head_dim);
  step->heads = spec.heads;
  step->kv_heads = spec.kv_heads;
  step->head_dim = spec.head_dim;
  step->scale = spec.scale;
  arena_->reserve_scratch(step->scratch_floats());
  std::vector<Access> accesses{reads(q, false), writes(out, false), plane_access(spec.keys, false),
                               plane_access(spec.values, false)};
  if (selection != nullptr) {
    step->selection = arena_->i32(*selection);
    accesses.push_back(reads(*selection, false));
  }
  push(std::move(step), TimeClass::attention, accesses);
}

void Builder::router(View logits, const float* bias, View ids, View weights, bool softmax, const RouterChoice& choice) {
  auto step = std::make_unique<RouterStep>();
  step->logits = arena_->f32(logits);
  step->ids = arena_->i32(ids);
  step->weights = arena_->f32(weights);
  step->bias = bias;
  step->softmax = softmax;
  step->choice = choice;
  arena_->reserve_scratch(2 * choice.experts);
  push(std::move(step), TimeClass::router, {reads(logits), writes(ids), writes(weights)});
}

void Builder::experts(View out) {
  if (!outputs_) {
    arena_->mark_full(out.storage);
  }
  invalidate(writes(out));
  pending_.clear();
  segments_.emplace_back();
}

void Builder::select_outputs(View x, View out) {
  const Access in = reads(x, false);
  outputs_ = true;
  ready_.clear();
  auto step = std::make_unique<SelectOutputsStep>();
  step->x = arena_->f32(x);
  step->out = arena_->f32(out);
  push(std::move(step), TimeClass::head, {in, writes(out)});
}

// Each matmul knows the one after it, so that its weights can be on their way.
void Builder::link_matmuls() {
  MatmulStep* last = nullptr;
  for (auto& segment : segments_) {
    for (auto& step : segment) {
      if (auto* matmul = dynamic_cast<MatmulStep*>(step.get())) {
        if (last != nullptr) {
          last->next = matmul;
        }
        last = matmul;
      }
    }
    last = nullptr;  // experts come between segments
  }
}

std::unique_ptr<Program> Builder::finish() {
  link_matmuls();
  auto program = std::make_unique<Program>(arena_, std::move(segments_));
  reset();
  return program;
}

}  // namespace picaflor
