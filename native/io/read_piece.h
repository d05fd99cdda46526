// One piece of a run on its way through the system: what to ask for next, and what an answer means.
// Must not know jobs, threads or how the system is called.
#pragma once

#include <cstddef>
#include <cstdint>

namespace picaflor {

enum class ReadStatus {
  kOk,
  kError,      // the system gave an error number
  kShort,      // the file ended early
  kCancelled,  // the pool was closed before all of the job had begun
};

// When a run's spare descriptor is read instead.
enum class SpareUse : std::uint8_t {
  kRefused,  // only where the system refuses the way of reading (EINVAL): the bytes were not asked for
  kFailed,   // after any failure: the spare is another copy of the file
};

// `nbytes` bytes at `offset` of an open file, to be written to `to`.
struct ReadRun {
  int fd = -1;
  std::int64_t offset = 0;
  std::int64_t nbytes = 0;
  void* to = nullptr;
  // 0: any offset will do. Else a power of two: only whole blocks of this size are read, to addresses that are its
  // multiples. `to` and `offset` must leave the same rest; the bytes around the run up to the blocks' ends are written.
  std::int64_t align = 0;
  int spare = -1;  // read without alignment where `fd` fails; -1: none
  SpareUse spare_use = SpareUse::kRefused;
};

// What the system is asked for.
struct ReadRequest {
  int fd = -1;
  void* to = nullptr;
  std::int64_t nbytes = 0;
  std::int64_t offset = 0;
};

// Bytes [first, first + nbytes) of a run. With `align`, first is 0 or offset + first is aligned, and so is the end
// unless it is the run's.
class ReadPiece {
 public:
  ReadPiece() = default;
  ReadPiece(const ReadRun& run, std::int64_t first, std::int64_t nbytes);

  // False when the piece has come to its end; `status`, `error` and `found` tell how.
  bool next(ReadRequest& request) const;

  // What the system answered: bytes, 0 at the end of the file, or -errno.
  void feed(std::int64_t got);

  ReadStatus status() const { return status_; }
  int error() const { return error_; }
  std::int64_t found() const;  // bytes of the piece that were read
  std::int64_t calls() const { return calls_; }
  bool used_spare() const { return on_spare_; }
  int spare_reason() const { return spare_reason_; }  // errno of the failure before the spare, 0 for an early end

 private:
  std::int64_t head() const;
  void fail(ReadStatus status, int error);

  ReadRun run_;
  std::int64_t first_ = 0;
  std::int64_t nbytes_ = 0;
  std::int64_t align_ = 0;
  std::int64_t done_ = 0;  // from the first block's start
  std::int64_t calls_ = 0;
  ReadStatus status_ = ReadStatus::kOk;
  int error_ = 0;
  int spare_reason_ = 0;
  bool on_spare_ = false;
  bool over_ = false;
};

}  // namespace picaflor
