// The thread pool: workers wait for a generation number, spin for a while, then sleep on it.
// Must not know what it runs.
#include "cpu/pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace picaflor {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Wait until `word` is not `old`: spin, then sleep in the kernel.
void wait_change(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < 64; ++i) {
    if (word.load(std::memory_order_acquire) != old) {
      return;
    }
    pause_cpu();
  }
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != old) {
        return;
      }
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  while (word.load(std::memory_order_acquire) == old) {
    word.wait(old, std::memory_order_acquire);
  }
}

void advance(std::atomic<uint32_t>& word) {
  word.fetch_add(1, std::memory_order_acq_rel);
  word.notify_all();
}

// Thrown out of a barrier when another thread of the run has failed; never leaves Pool::run.
struct BarrierBroken {};

thread_local const void* running_in = nullptr;

}  // namespace

// The gate of the current run: its number, whether it is closed to late threads, how many workers are inside.
constexpr uint64_t kClosed = uint64_t{1} << 15;
constexpr uint64_t kInside = kClosed - 1;
constexpr int kNumberShift = 16;

struct Pool::State {
  explicit State(int count) : threads(count), owner(getpid()) {}

  uint32_t others() const { return static_cast<uint32_t>(threads - 1); }

  const int threads;
  const pid_t owner;
  std::mutex one_run;
  std::vector<std::thread> workers;
  const std::function<void(int)>* body = nullptr;
  uint64_t number = 0;  // of the current run
  std::atomic<bool> stopping{false};
  alignas(64) std::atomic<uint32_t> generation{0};  // changes when there is a new run, or an end
  alignas(64) std::atomic<uint64_t> gate{kClosed};
  std::atomic<uint32_t> left{0};               // workers that have finished the current run
  alignas(64) std::atomic<uint32_t> quiet{0};  // changes when the caller may stop waiting
  alignas(64) std::atomic<uint32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  std::atomic<bool> failed{false};
  std::mutex error_lock;
  std::exception_ptr error;

  void start() {
    workers.reserve(static_cast<size_t>(threads - 1));
    for (int thread = 1; thread < threads; ++thread) {
      workers.emplace_back([this, thread] { work(thread); });
    }
  }

  void stop() {
    stopping.store(true, std::memory_order_release);
    advance(generation);
    for (std::thread& worker : workers) {
      worker.join();
    }
  }

  void work(int thread) {
    running_in = this;
    uint32_t seen = 0;
    uint64_t last = 0;  // number of the run that this worker was in
    for (;;) {
      wait_change(generation, seen);
      seen = generation.load(std::memory_order_acquire);
      if (stopping.load(std::memory_order_acquire)) {
        return;
      }
      if (enter(last)) {
        call(thread);
        leave();
      }
    }
  }

  // Join the run at the gate, unless it is closed or was joined before.
  bool enter(uint64_t& last) {
    uint64_t now = gate.load(std::memory_order_acquire);
    do {
      if ((now & kClosed) != 0 || now >> kNumberShift == last) {
        return false;
      }
    } while (!gate.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    last = now >> kNumberShift;
    return true;
  }

  void leave() {
    const bool all = left.fetch_add(1, std::memory_order_acq_rel) + 1 == others();
    const uint64_t now = gate.fetch_sub(1, std::memory_order_acq_rel) - 1;
    if (all || ((now & kClosed) != 0 && (now & kInside) == 0)) {
      advance(quiet);
    }
  }

  void call(int thread) {
    try {
      (*body)(thread);
    } catch (const BarrierBroken&) {
      // the thread that failed has kept its exception
    } catch (...) {
      {
        const std::lock_guard<std::mutex> hold(error_lock);
        if (!error) {
          error = std::current_exception();
        }
      }
      failed.store(true, std::memory_order_release);
      advance(phase);
    }
  }

  void run(const std::function<void(int)>& task, bool wait_for_all) {
    body = &task;
    ++number;
    left.store(0, std::memory_order_relaxed);
    arrived.store(0, std::memory_order_relaxed);
    failed.store(false, std::memory_order_relaxed);
    error = nullptr;
    gate.store(number << kNumberShift, std::memory_order_release);
    advance(generation);
    const void* outer = std::exchange(running_in, this);
    call(0);
    running_in = outer;
    if (wait_for_all) {
      wait_until([this] { return left.load(std::memory_order_acquire) == others(); });
    }
    gate.fetch_or(kClosed, std::memory_order_acq_rel);
    wait_until([this] { return (gate.load(std::memory_order_acquire) & kInside) == 0; });
    if (error) {
      std::rethrow_exception(std::exchange(error, nullptr));
    }
  }

  // Every change that can make `ready` true is followed by one of `quiet`.
  template <typename Ready>
  void wait_until(Ready ready) {
    for (;;) {
      const uint32_t before = quiet.load(std::memory_order_acquire);
      if (ready()) {
        return;
      }
      wait_change(quiet, before);
    }
  }

  void barrier() {
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (failed.load(std::memory_order_acquire)) {
      throw BarrierBroken{};
    }
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == others()) {
      arrived.store(0, std::memory_order_relaxed);
      advance(phase);
      return;
    }
    wait_change(phase, now);
    if (failed.load(std::memory_order_acquire)) {
      throw BarrierBroken{};
    }
  }
};

Pool::Pool(int threads) {
  if (threads < 1) {
    throw std::invalid_argument("a pool needs at least 1 thread, got " + std::to_string(threads));
  }
  state_ = std::make_unique<State>(threads);
}

Pool::~Pool() {
  if (state_->owner != getpid()) {
    static_cast<void>(state_.release());  // a forked child has none of the threads: there is nothing to join
    return;
  }
  state_->stop();
}

int Pool::threads() const { return state_->threads; }

Pool::State& Pool::ready() {
  if (state_->owner != getpid()) {
    const int threads = state_->threads;
    static_cast<void>(state_.release());
    state_ = std::make_unique<State>(threads);
    running_in = nullptr;
  }
  if (running_in == state_.get()) {
    throw std::logic_error("Pool::run inside Pool::run");
  }
  return *state_;
}

void Pool::run(const std::function<void(int)>& body) { start(body, true); }

void Pool::run_open(const std::function<void(int)>& body) { start(body, false); }

void Pool::start(const std::function<void(int)>& body, bool wait_for_all) {
  if (state_->threads == 1) {
    body(0);
    return;
  }
  State& state = ready();
  const std::lock_guard<std::mutex> hold(state.one_run);
  if (state.workers.empty()) {
    state.start();
  }
  state.run(body, wait_for_all);
}

void Pool::barrier() {
  if (state_->threads > 1) {
    state_->barrier();
  }
}

void Stage::finish_one() {
  if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(items_)) {
    finished_.notify_all();
  }
}

void Stage::abandon() {
  broken_.store(true, std::memory_order_release);
  finished_.fetch_add(1, std::memory_order_acq_rel);
  finished_.notify_all();
}

void Stage::wait() {
  for (;;) {
    const uint32_t done = finished_.load(std::memory_order_acquire);
    if (broken_.load(std::memory_order_acquire)) {
      throw BarrierBroken{};
    }
    if (done >= static_cast<uint32_t>(items_)) {
      return;
    }
    wait_change(finished_, done);
  }
}

}  // namespace picaflor
