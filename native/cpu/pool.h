// The thread pool: one body on every thread, barriers inside, bounded spin before sleep.
// Must not know what it runs.
#pragma once

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

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace picaflor
