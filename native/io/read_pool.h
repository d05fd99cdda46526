// Threads that read runs of bytes from files into memory, and tickets to wait for.
// Must not know experts, slots or containers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "io/read_piece.h"

namespace picaflor {

enum class ReadEngine {
  kThreads,  // each thread makes one blocking call at a time
  kUring,    // one thread keeps a ring of calls under way
};

struct ReadOptions {
  ReadEngine engine = ReadEngine::kThreads;
  int depth = 8;                                     // calls under way at once: threads, or places in the ring
  std::int64_t piece_bytes = std::int64_t{1} << 20;  // runs are read in pieces of about this size, side by side
};

// What became of one job. The first run that fails ends the job; `run`, `found` and `error` speak of that run.
struct ReadResult {
  std::uint64_t ticket = 0;
  ReadStatus status = ReadStatus::kOk;
  int error = 0;            // errno, for kError
  std::int64_t run = 0;     // index of the failed run in its job
  std::int64_t found = 0;   // bytes of that run that were read
  std::int64_t nbytes = 0;  // bytes of the job that were read
  std::int64_t spares = 0;  // pieces that were read from the spare descriptor
  int spare_run = -1;       // the first run of which that is true
  int spare_error = 0;      // why: errno, 0 where the file ended early
  double seconds = 0;       // sum over its pieces of the time between call and answer
};

struct ReadStats {
  std::int64_t nbytes = 0;  // bytes read, of failed jobs too
  std::int64_t reads = 0;   // calls to the system
  std::int64_t jobs = 0;    // jobs finished, failed ones too
  std::int64_t spares = 0;  // pieces that were read from a spare descriptor
  double seconds = 0;       // sum over calls of the time between call and answer
  double busy_seconds = 0;  // time with at least one job under way, up to the last moment when there was none
};

// Reads up to `nbytes` bytes at `offset`; returns bytes or -errno, as read_at does. Tests put faults here.
using ReadFunction = std::function<std::int64_t(int fd, void* to, std::size_t nbytes, std::int64_t offset)>;

// All members may be called from any thread. A job's memory must stay valid until its result came back from
// `wait_any`, `cancel` returned true for it, or `close` returned: after that no thread writes to it.
// After fork the child has an empty pool; tickets of the parent are unknown there.
class ReadPool {
 public:
  // Threads start with the first job. With kUring a refusal by the kernel is thrown then (std::system_error): ask
  // uring_error() first.
  explicit ReadPool(int threads);
  explicit ReadPool(const ReadOptions& options);
  ReadPool(const ReadOptions& options, ReadFunction read);  // threads only
  ~ReadPool();
  ReadPool(const ReadPool&) = delete;
  ReadPool& operator=(const ReadPool&) = delete;

  const ReadOptions& options() const;

  // Job j reads runs [bounds[j], bounds[j + 1]): their pieces are begun in order, several of them side by side. Returns
  // the ticket of job 0; the others follow it by one. Demand jobs start before all others, each kind in order of
  // submission. Throws std::invalid_argument for a run outside what a file can hold or off its alignment, and
  // std::runtime_error when closed; nothing is submitted then.
  std::uint64_t submit(std::span<const ReadRun> runs, std::span<const std::int64_t> bounds, bool demand);

  // Wait until one of the tickets is finished or unknown, or `seconds` have passed (negative: no limit). Returns the
  // results of all finished ones; they stay known until `forget`, so that a caller who is interrupted can ask again.
  // Empty: time is up, or a ticket was unknown (cancelled, or forgotten by another caller).
  std::vector<ReadResult> wait_any(std::span<const std::uint64_t> tickets, double seconds);

  // Drop the result of a finished job. Anything else is left alone.
  void forget(std::uint64_t ticket);

  // Take a job back that has not begun: true, and its memory is free at once. False: running, finished or unknown.
  bool cancel(std::uint64_t ticket);

  // Let what a job has not begun start with the demand jobs, behind those that wait already.
  void promote(std::uint64_t ticket);

  ReadStats stats() const;

  // Cancel what has not begun, wait for what has, end the threads. Results can still be taken. Idempotent.
  void close();

 private:
  struct State;
  State& state() const;

  ReadOptions options_;
  ReadFunction read_;
  mutable std::unique_ptr<State> state_;
};

}  // namespace picaflor
