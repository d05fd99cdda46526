#include "io/read_pool.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
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

#include "io/doorbell.h"
#include "io/read_at.h"
#include "io/uring.h"

namespace picaflor {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMostAlign = 4096;

enum class Phase { kQueued, kRunning, kDone };

struct Job {
  Phase phase = Phase::kQueued;
  bool demand = false;
  bool failed = false;
  std::vector<ReadRun> runs;
  std::size_t next_run = 0;     // the piece to begin next
  std::int64_t next_first = 0;  // where in that run it starts
  int under_way = 0;
  ReadResult result;

  bool all_begun() const { return failed || next_run == runs.size(); }
};

// A piece under way, and whose it is.
struct Active {
  std::uint64_t ticket = 0;
  std::int64_t run = 0;
  std::int64_t first = 0;
  ReadPiece piece;
  Clock::time_point begin;
};

void check_run(const ReadRun& run) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() - kMostAlign;
  if (run.fd < 0 || run.offset < 0 || run.nbytes < 0 || run.offset > kMost - run.nbytes) {
    throw std::invalid_argument("cannot read " + std::to_string(run.nbytes) + " bytes at " +
                                std::to_string(run.offset) + " of descriptor " + std::to_string(run.fd));
  }
  if (run.to == nullptr && run.nbytes > 0) throw std::invalid_argument("a read needs memory to write to");
  if (run.align == 0) return;
  const auto align = static_cast<std::uint64_t>(run.align);
  if (run.align < 0 || run.align > kMostAlign || !std::has_single_bit(align)) {
    throw std::invalid_argument("alignment " + std::to_string(run.align) + " is no power of two up to 4096");
  }
  if ((reinterpret_cast<std::uint64_t>(run.to) - static_cast<std::uint64_t>(run.offset)) % align != 0) {
    throw std::invalid_argument("memory and file offset of a read differ modulo " + std::to_string(run.align));
  }
}

}  // namespace

struct ReadPool::State {
  explicit State(const ReadOptions& wanted) : options(wanted) {}

  const pid_t owner = getpid();
  const ReadOptions options;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::deque<std::uint64_t> demand;  // jobs with pieces that have not begun
  std::deque<std::uint64_t> ahead;
  std::unordered_map<std::uint64_t, Job> jobs;
  std::vector<std::thread> workers;
  std::unique_ptr<Uring> ring;
  std::unique_ptr<Doorbell> bell;
  std::uint64_t next = 1;
  bool closed = false;
  std::mutex closing;  // held while threads are joined, so that every close() returns after the last write
  ReadStats stats;
  int running = 0;  // pieces under way
  Clock::time_point busy_since;

  void start(const ReadFunction& read) {
    if (options.engine == ReadEngine::kThreads) {
      while (std::ssize(workers) < options.depth) workers.emplace_back([this, &read] { serve(read); });
    } else if (workers.empty()) {
      auto bell_made = std::make_unique<Doorbell>();
      ring = std::make_unique<Uring>(static_cast<unsigned>(options.depth) + 1);
      bell = std::move(bell_made);
      workers.emplace_back([this] { serve_ring(); });
    }
  }

  // With the lock held: is there a piece to begin?
  bool waiting() const { return !demand.empty() || !ahead.empty(); }

  // With the lock held: begin the next piece, demand first.
  Active take() {
    std::deque<std::uint64_t>& queue = demand.empty() ? ahead : demand;
    Active active;
    active.ticket = queue.front();
    Job& job = jobs.at(active.ticket);
    const ReadRun& run = job.runs[job.next_run];
    const std::int64_t first = job.next_first;
    std::int64_t end = run.nbytes;
    if (end - first > options.piece_bytes) {
      // Later pieces start at whole blocks of the file.
      end = (run.offset + first + options.piece_bytes) / kMostAlign * kMostAlign - run.offset;
    }
    active.run = static_cast<std::int64_t>(job.next_run);
    active.first = first;
    active.piece = ReadPiece(run, first, end - first);
    job.next_first = end;
    if (end == run.nbytes) {
      ++job.next_run;
      job.next_first = 0;
    }
    if (job.all_begun()) queue.pop_front();
    job.phase = Phase::kRunning;
    ++job.under_way;
    active.begin = Clock::now();
    if (running++ == 0) busy_since = active.begin;
    return active;
  }

  // With the lock held: a piece has come to its end.
  void finish(const Active& active) {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - active.begin).count();
    const ReadPiece& piece = active.piece;
    Job& job = jobs.at(active.ticket);
    ReadResult& result = job.result;
    result.nbytes += piece.found();
    result.seconds += seconds;
    if (piece.used_spare()) note_spare(result, active);
    if (piece.status() != ReadStatus::kOk) note_failure(active.ticket, job, active);
    stats.nbytes += piece.found();
    stats.reads += piece.calls();
    stats.spares += piece.used_spare() ? 1 : 0;
    stats.seconds += seconds;
    if (--running == 0) stats.busy_seconds += std::chrono::duration<double>(now - busy_since).count();
    if (--job.under_way == 0 && job.all_begun()) {
      job.phase = Phase::kDone;
      stats.jobs += 1;
      done.notify_all();
    }
  }

  static void note_spare(ReadResult& result, const Active& active) {
    if (result.spares++ == 0 || active.run < result.spare_run) {
      result.spare_run = static_cast<int>(active.run);
      result.spare_error = active.piece.spare_reason();
    }
  }

  // The failure that comes first in the job is the one that is told; nothing more of the job is begun.
  void note_failure(std::uint64_t ticket, Job& job, const Active& active) {
    ReadResult& result = job.result;
    const std::int64_t found = active.first + active.piece.found();
    const bool earlier = !job.failed || active.run < result.run || (active.run == result.run && found < result.found);
    if (!job.all_begun()) unqueue(ticket, job.demand);
    job.failed = true;
    if (!earlier) return;
    result.status = active.piece.status();
    result.error = active.piece.error();
    result.run = active.run;
    result.found = found;
  }

  void serve(const ReadFunction& read) {
    std::unique_lock lock(mutex);
    while (true) {
      work.wait(lock, [this] { return closed || waiting(); });
      if (closed) return;
      Active active = take();
      lock.unlock();
      ReadRequest request;
      while (active.piece.next(request)) {
        active.piece.feed(read(request.fd, request.to, static_cast<std::size_t>(request.nbytes), request.offset));
      }
      lock.lock();
      finish(active);
    }
  }

  void serve_ring() {
    const auto depth = static_cast<std::size_t>(options.depth);
    std::vector<Active> actives(depth);
    std::vector<std::size_t> unused;
    for (std::size_t i = 0; i < depth; ++i) unused.push_back(depth - 1 - i);
    ring->push(bell->request(), depth);
    ReadRequest request;
    while (true) {
      {
        const std::lock_guard lock(mutex);
        if (closed && unused.size() == depth) return;
        while (!closed && !unused.empty() && waiting()) {
          const std::size_t place = unused.back();
          actives[place] = take();
          if (actives[place].piece.next(request)) {
            unused.pop_back();
            ring->push(request, place);
          } else {
            finish(actives[place]);
          }
        }
      }
      ring->enter();
      std::uint64_t tag = 0;
      std::int64_t got = 0;
      while (ring->take(tag, got)) {
        if (tag == depth) {
          ring->push(bell->request(), depth);
          continue;
        }
        Active& active = actives[tag];
        active.piece.feed(got);
        if (active.piece.next(request)) {
          ring->push(request, tag);
          continue;
        }
        unused.push_back(tag);
        const std::lock_guard lock(mutex);
        finish(active);
      }
    }
  }

  // After the lock was let go: `pieces` more can begin.
  void wake(std::size_t pieces) {
    if (bell) return bell->ring();
    const std::size_t count = std::min(pieces, workers.size());
    for (std::size_t i = 0; i < count; ++i) work.notify_one();
  }

  void unqueue(std::uint64_t ticket, bool was_demand) {
    std::deque<std::uint64_t>& queue = was_demand ? demand : ahead;
    const auto found = std::find(queue.begin(), queue.end(), ticket);
    if (found != queue.end()) queue.erase(found);
  }
};

ReadPool::ReadPool(int threads) : ReadPool(ReadOptions{.depth = threads}) {}

ReadPool::ReadPool(const ReadOptions& options) : ReadPool(options, read_at) {}

ReadPool::ReadPool(const ReadOptions& options, ReadFunction read) : options_(options), read_(std::move(read)) {
  constexpr int kMostDepth = 4096;
  if (options.depth < 1 || options.depth > kMostDepth) {
    throw std::invalid_argument("a read pool needs a depth of 1 to 4096, not " + std::to_string(options.depth));
  }
  if (options.piece_bytes < 2 * kMostAlign) {
    throw std::invalid_argument("pieces of " + std::to_string(options.piece_bytes) +
                                " bytes; at least 8192 are needed");
  }
  state_ = std::make_unique<State>(options_);
}

ReadPool::~ReadPool() { close(); }

const ReadOptions& ReadPool::options() const { return options_; }

ReadPool::State& ReadPool::state() const {
  if (state_->owner != getpid()) {
    // A forked child: the threads do not exist here and the mutex may be held for good. Leave the old state alone.
    static_cast<void>(state_.release());
    state_ = std::make_unique<State>(options_);
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
  s.start(read_);
  const std::uint64_t first = s.next;
  std::int64_t pieces = 0;
  for (std::size_t j = 0; j + 1 < bounds.size(); ++j) {
    const std::uint64_t ticket = s.next++;
    Job& job = s.jobs[ticket];
    job.demand = demand;
    job.runs.assign(runs.begin() + bounds[j], runs.begin() + bounds[j + 1]);
    job.result.ticket = ticket;
    if (job.runs.empty()) {
      job.phase = Phase::kDone;
      ++s.stats.jobs;
      continue;
    }
    for (const ReadRun& run : job.runs) pieces += run.nbytes / options_.piece_bytes + 1;
    (demand ? s.demand : s.ahead).push_back(ticket);
  }
  // Only as many threads wake as there are pieces, and none of them into a held mutex: the caller goes on computing.
  lock.unlock();
  if (pieces > 0) s.wake(static_cast<std::size_t>(pieces));
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
  if (found == s.jobs.end() || found->second.demand || found->second.phase == Phase::kDone) return;
  Job& job = found->second;
  job.demand = true;
  if (job.all_begun()) return;
  s.unqueue(ticket, false);
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
        job.failed = true;
        job.result.status = ReadStatus::kCancelled;
        job.result.run = 0;
        job.result.found = 0;
        if (job.under_way == 0) job.phase = Phase::kDone;
      }
      queue->clear();
    }
    workers.swap(s.workers);
    s.work.notify_all();
    s.done.notify_all();
  }
  if (s.bell) s.bell->ring();
  for (std::thread& worker : workers) worker.join();
}

}  // namespace picaflor
