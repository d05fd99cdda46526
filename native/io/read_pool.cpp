#include "io/read_pool.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "io/read_at.h"

namespace picaflor {

namespace {

using Clock = std::chrono::steady_clock;

enum class Phase { kQueued, kRunning, kDone };

struct Job {
  Phase phase = Phase::kQueued;
  bool demand = false;
  std::vector<ReadRun> runs;
  ReadResult result;
};

void check_run(const ReadRun& run) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (run.fd < 0 || run.offset < 0 || run.nbytes < 0 || run.offset > kMost - run.nbytes) {
    throw std::invalid_argument("cannot read " + std::to_string(run.nbytes) + " bytes at " +
                                std::to_string(run.offset) + " of descriptor " + std::to_string(run.fd));
  }
  if (run.to == nullptr && run.nbytes > 0) throw std::invalid_argument("a read needs memory to write to");
}

// Read all of a run, again after a signal or a partial read. Returns the status; counts in `result` and `reads`.
ReadStatus read_run(const ReadFunction& read, const ReadRun& run, ReadResult& result, std::int64_t& reads) {
  std::int64_t done = 0;
  ReadStatus status = ReadStatus::kOk;
  while (done < run.nbytes) {
    const std::int64_t wanted = run.nbytes - done;
    const std::int64_t got =
        read(run.fd, static_cast<char*>(run.to) + done, static_cast<std::size_t>(wanted), run.offset + done);
    ++reads;
    if (got == -EINTR) continue;
    if (got < 0) {
      status = ReadStatus::kError;
      result.error = static_cast<int>(-got);
      break;
    }
    if (got == 0) {
      status = ReadStatus::kShort;
      break;
    }
    done += got;
  }
  result.nbytes += done;
  result.found = done;
  return status;
}

}  // namespace

struct ReadPool::State {
  const pid_t owner = getpid();
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::deque<std::uint64_t> demand;
  std::deque<std::uint64_t> ahead;
  std::unordered_map<std::uint64_t, Job> jobs;
  std::vector<std::thread> workers;
  std::uint64_t next = 1;
  bool closed = false;
  std::mutex closing;  // held while threads are joined, so that every close() returns after the last write
  ReadStats stats;
  int running = 0;
  Clock::time_point busy_since;

  void start(int threads, const ReadFunction& read) {
    while (std::ssize(workers) < threads) workers.emplace_back([this, &read] { serve(read); });
  }

  void serve(const ReadFunction& read) {
    std::unique_lock lock(mutex);
    while (true) {
      work.wait(lock, [this] { return closed || !demand.empty() || !ahead.empty(); });
      if (closed) return;
      std::deque<std::uint64_t>& queue = demand.empty() ? ahead : demand;
      const std::uint64_t ticket = queue.front();
      queue.pop_front();
      Job& job = jobs.at(ticket);  // references into an unordered_map outlive other insertions and removals
      job.phase = Phase::kRunning;
      const Clock::time_point begin = Clock::now();
      if (running++ == 0) busy_since = begin;
      lock.unlock();
      std::int64_t reads = 0;
      for (std::int64_t run = 0; run < std::ssize(job.runs); ++run) {
        job.result.run = run;
        job.result.status = read_run(read, job.runs[static_cast<std::size_t>(run)], job.result, reads);
        if (job.result.status != ReadStatus::kOk) break;
      }
      job.result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      lock.lock();
      job.phase = Phase::kDone;
      stats.nbytes += job.result.nbytes;
      stats.reads += reads;
      stats.jobs += 1;
      stats.seconds += job.result.seconds;
      if (--running == 0) stats.busy_seconds += std::chrono::duration<double>(Clock::now() - busy_since).count();
      done.notify_all();
    }
  }

  void unqueue(std::uint64_t ticket, bool was_demand) {
    std::deque<std::uint64_t>& queue = was_demand ? demand : ahead;
    queue.erase(std::find(queue.begin(), queue.end(), ticket));
  }
};

ReadPool::ReadPool(int threads) : ReadPool(threads, read_at) {}

ReadPool::ReadPool(int threads, ReadFunction read) : threads_(threads), read_(std::move(read)) {
  if (threads < 1) throw std::invalid_argument("a read pool needs 1 thread or more, not " + std::to_string(threads));
  state_ = std::make_unique<State>();
}

ReadPool::~ReadPool() { close(); }

int ReadPool::threads() const { return threads_; }

ReadPool::State& ReadPool::state() const {
  if (state_->owner != getpid()) {
    // A forked child: the threads do not exist here and the mutex may be held for good. Leave the old state alone.
    static_cast<void>(state_.release());
    state_ = std::make_unique<State>();
  }
  return *state_;
}

std::uint64_t ReadPool::submit(std::span<const ReadRun> runs, std::span<const std::int64_t> bounds, bool demand) {
  for (const ReadRun& run : runs) check_run(run);
  if (bounds.empty() || bounds.front() != 0 || bounds.back() != std::ssize(runs) ||
      !std::is_sorted(bounds.begin(), bounds.end())) {
    throw std::invalid_argument("the bounds of the jobs do not ascend from 0 to the number of runs");
  }
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (s.closed) throw std::runtime_error("the read pool is closed");
  s.start(threads_, read_);
  const std::uint64_t first = s.next;
  for (std::size_t j = 0; j + 1 < bounds.size(); ++j) {
    const std::uint64_t ticket = s.next++;
    Job& job = s.jobs[ticket];
    job.demand = demand;
    job.runs.assign(runs.begin() + bounds[j], runs.begin() + bounds[j + 1]);
    job.result.ticket = ticket;
    (demand ? s.demand : s.ahead).push_back(ticket);
  }
  // Only as many threads wake as there are jobs, and none of them into a held mutex: the caller goes on computing.
  const std::size_t wake = std::min(bounds.size() - 1, s.workers.size());
  lock.unlock();
  for (std::size_t i = 0; i < wake; ++i) s.work.notify_one();
  return first;
}

std::vector<ReadResult> ReadPool::wait_any(std::span<const std::uint64_t> tickets, double seconds) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const auto settled = [&] {
    return std::any_of(tickets.begin(), tickets.end(), [&](std::uint64_t ticket) {
      const auto found = s.jobs.find(ticket);
      return found == s.jobs.end() || found->second.phase == Phase::kDone;
    });
  };
  constexpr double kForever = 1e6;
  if (seconds < 0 || seconds > kForever) {
    s.done.wait(lock, settled);
  } else if (!s.done.wait_for(lock, std::chrono::duration<double>(seconds), settled)) {
    return {};
  }
  std::vector<ReadResult> results;
  for (const std::uint64_t ticket : tickets) {
    const auto found = s.jobs.find(ticket);
    if (found != s.jobs.end() && found->second.phase == Phase::kDone) results.push_back(found->second.result);
  }
  return results;
}

void ReadPool::forget(std::uint64_t ticket) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.jobs.find(ticket);
  if (found != s.jobs.end() && found->second.phase == Phase::kDone) s.jobs.erase(found);
}

bool ReadPool::cancel(std::uint64_t ticket) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.jobs.find(ticket);
  if (found == s.jobs.end() || found->second.phase != Phase::kQueued) return false;
  s.unqueue(ticket, found->second.demand);
  s.jobs.erase(found);
  s.done.notify_all();
  return true;
}

void ReadPool::promote(std::uint64_t ticket) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.jobs.find(ticket);
  if (found == s.jobs.end() || found->second.phase != Phase::kQueued || found->second.demand) return;
  s.unqueue(ticket, false);
  found->second.demand = true;
  s.demand.push_back(ticket);
}

ReadStats ReadPool::stats() const {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.stats;
}

void ReadPool::close() {
  State& s = state();
  const std::lock_guard closing(s.closing);
  std::vector<std::thread> workers;
  {
    const std::lock_guard lock(s.mutex);
    s.closed = true;
    for (std::deque<std::uint64_t>* queue : {&s.demand, &s.ahead}) {
      for (const std::uint64_t ticket : *queue) {
        Job& job = s.jobs.at(ticket);
        job.phase = Phase::kDone;
        job.result.status = ReadStatus::kCancelled;
      }
      queue->clear();
    }
    workers.swap(s.workers);
    s.work.notify_all();
    s.done.notify_all();
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace picaflor
