// Running a segment: every thread walks the same steps and meets the others at the recorded barriers.
// Must not know families, files or Python.
#include <chrono>
#include <utility>

#include "cpu/program.h"

namespace picaflor {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Program::Program(std::shared_ptr<Arena> arena, std::vector<std::vector<std::unique_ptr<Step>>> segments)
    : arena_(std::move(arena)), segments_(std::move(segments)) {}

int64_t Program::barriers() const {
  int64_t count = 0;
  for (const auto& segment : segments_) {
    for (const auto& step : segment) {
      count += step->barrier;
    }
  }
  return count;
}

void Program::run_segment(int64_t segment) {
  const auto& steps = segments_.at(static_cast<size_t>(segment));
  Arena& arena = *arena_;
  for (const auto& step : steps) {
    step->begin(arena);
  }
  TimeClass current = TimeClass::other;
  Clock::time_point since = Clock::now();
  const auto charge = [&](TimeClass next) {
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<size_t>(current)] += std::chrono::duration<double>(now - since).count();
    current = next;
    since = now;
  };
  arena.pool->run([&](int thread) {
    for (const auto& step : steps) {
      if (step->barrier) {
        arena.pool->barrier();
      }
      if (thread == 0 && step->time != current) {
        charge(step->time);
      }
      step->run(arena, thread);
    }
  });
  charge(TimeClass::other);
}

std::array<double, kTimeClasses> Program::take_seconds() { return std::exchange(seconds_, {}); }

}  // namespace picaflor
