// Running a segment: threads walk the same phases, claim items, and go on when a phase's items are finished.
// Must not know families, files or Python.
#include <algorithm>
#include <chrono>
#include <utility>

#include "cpu/program.h"

namespace picaflor {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void Phase::add(Step* step) {
  if (auto* item_step = dynamic_cast<ItemStep*>(step)) {
    units_.emplace_back();
    units_.back().step = item_step;
    return;
  }
  auto* row_step = dynamic_cast<RowStep*>(step);
  for (Unit& unit : units_) {
    if (unit.step == nullptr && unit.outputs == step->outputs) {
      unit.row_steps.push_back(row_step);
      return;
    }
  }
  units_.emplace_back();
  units_.back().row_steps.push_back(row_step);
  units_.back().outputs = step->outputs;
}

void Phase::begin(Arena& arena) {
  int64_t total = 0;
  for (Unit& unit : units_) {
    unit.first = total;
    if (unit.step != nullptr) {
      unit.step->begin(arena);
      total += unit.step->items(arena);
      continue;
    }
    for (RowStep* step : unit.row_steps) {
      step->begin(arena);
    }
    unit.rows = unit.row_steps.front()->rows(arena);
    unit.block = std::max<int64_t>(1, unit.rows / (4 * arena.threads));
    total += (unit.rows + unit.block - 1) / unit.block;
  }
  stage_.reset(total);
}

template <typename Charge>
void Phase::run(Arena& arena, int thread, Charge charge) {
  stage_.work([&](int64_t item) {
    size_t index = units_.size() - 1;
    while (units_[index].first > item) {
      --index;
    }
    const Unit& unit = units_[index];
    const int64_t own = item - unit.first;
    if (unit.step != nullptr) {
      charge(unit.step->time);
      unit.step->run_item(arena, own, thread);
      return;
    }
    const Range range{own * unit.block, std::min((own + 1) * unit.block, unit.rows)};
    for (RowStep* step : unit.row_steps) {
      charge(step->time);
      step->run_rows(arena, range, thread);
    }
  });
}

Program::Program(std::shared_ptr<Arena> arena, std::vector<std::vector<std::unique_ptr<Step>>> segments)
    : arena_(std::move(arena)), segments_(std::move(segments)), phases_(segments_.size()) {
  for (size_t i = 0; i < segments_.size(); ++i) {
    for (const auto& step : segments_[i]) {
      if (phases_[i].empty() || step->barrier) {
        phases_[i].emplace_back();
      }
      phases_[i].back().add(step.get());
    }
  }
}

int64_t Program::barriers() const {
  int64_t count = 0;
  for (const auto& segment : segments_) {
    for (const auto& step : segment) {
      count += step->barrier;
    }
  }
  return count;
}

void Program::run_segment(int64_t segment, bool plain) {
  auto& phases = phases_.at(static_cast<size_t>(segment));
  Arena& arena = *arena_;
  arena.plain = plain;
  for (Phase& phase : phases) {
    phase.begin(arena);
  }
  TimeClass current = TimeClass::other;
  Clock::time_point since = Clock::now();
  const auto charge = [&](TimeClass next) {
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<size_t>(current)] += std::chrono::duration<double>(now - since).count();
    current = next;
    since = now;
  };
  arena.pool->run_open([&](int thread) {
    for (Phase& phase : phases) {
      phase.run(arena, thread, [&](TimeClass next) {
        if (thread == 0 && next != current) {
          charge(next);
        }
      });
    }
  });
  charge(TimeClass::other);
}

std::array<double, kTimeClasses> Program::take_seconds() { return std::exchange(seconds_, {}); }

}  // namespace picaflor
