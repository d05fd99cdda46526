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

struct Pool::State {
  explicit State(int count) : threads(count), owner(getpid()) {}

  uint32_t others() const { return static_cast<uint32_t>(threads - 1); }

  const int threads;
  const pid_t owner;
  std::mutex one_run;
  std::vector<std::thread> workers;
  const std::function<void(int)>* body = nullptr;
  bool stopping = false;
  alignas(64) std::atomic<uint32_t> generation{0};
  alignas(64) std::atomic<uint32_t> done{0};       // counts the runs that all workers have finished
  alignas(64) std::atomic<uint32_t> remaining{0};  // workers still inside the current run
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
    stopping = true;
    advance(generation);
    for (std::thread& worker : workers) {
      worker.join();
    }
  }

  void work(int thread) {
    running_in = this;
    uint32_t seen = 0;
    for (;;) {
      wait_change(generation, seen);
      ++seen;  // a worker takes part in every run, so it can never miss one
      if (stopping) {
        return;
      }
      call(thread);
      if (remaining.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        advance(done);
      }
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

  void run(const std::function<void(int)>& task) {
    const uint32_t before = done.load(std::memory_order_relaxed);
    body = &task;
    arrived.store(0, std::memory_order_relaxed);
    failed.store(false, std::memory_order_relaxed);
    error = nullptr;
    remaining.store(others(), std::memory_order_relaxed);
    advance(generation);
    const void* outer = std::exchange(running_in, this);
    call(0);
    running_in = outer;
    wait_change(done, before);
    if (error) {
      std::rethrow_exception(std::exchange(error, nullptr));
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

void Pool::run(const std::function<void(int)>& body) {
  if (state_->threads == 1) {
    body(0);
    return;
  }
  if (state_->owner != getpid()) {
    const int threads = state_->threads;
    static_cast<void>(state_.release());
    state_ = std::make_unique<State>(threads);
    running_in = nullptr;
  }
  if (running_in == state_.get()) {
    throw std::logic_error("Pool::run inside Pool::run");
  }
  const std::lock_guard<std::mutex> hold(state_->one_run);
  if (state_->workers.empty()) {
    state_->start();
  }
  state_->run(body);
}

void Pool::barrier() {
  if (state_->threads > 1) {
    state_->barrier();
  }
}

}  // namespace picaflor
