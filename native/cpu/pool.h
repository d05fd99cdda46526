// The thread pool: one body on every thread, barriers inside, bounded spin before sleep.
// Must not know what it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace picaflor {

class Pool {
 public:
  // `threads` >= 1, the caller's included: it runs as thread 0.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const;

  // Run body(thread) on every thread; returns when all have returned. One run at a time; the first exception of any
  // thread is rethrown here after all are done. Safe after fork (workers are restarted in the child).
  void run(const std::function<void(int)>& body);

  // Inside body: wait until every thread of the run has arrived.
  void barrier();

  // Like run, but threads that are late, because the system runs something else, are not waited for: body must divide
  // its work by Stage and call no barrier. Thread 0 always takes part; others join if they come before it is done.
  void run_open(const std::function<void(int)>& body);

 private:
  struct State;
  State& ready();
  void start(const std::function<void(int)>& body, bool wait_for_all);

  std::unique_ptr<State> state_;
};

// A number of items that threads claim one by one. All later work waits until every item is finished, not until every
// thread has been here; a thread that comes late finds nothing to do and goes on.
class Stage {
 public:
  // Not while a run uses the stage.
  void reset(int64_t items) {
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    broken_.store(false, std::memory_order_relaxed);
  }

  // Call f(item) for items until none is left, then wait for those of other threads. An exception of f leaves on this
  // thread, and ends the run on the others.
  template <typename F>
  void work(F f) {
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= items_) {
        break;
      }
      try {
        f(item);
      } catch (...) {
        abandon();
        throw;
      }
      finish_one();
    }
    wait();
  }

 private:
  void finish_one();
  void abandon();
  void wait();

  int64_t items_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> finished_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace picaflor
