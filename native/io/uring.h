// A ring of reads shared with the kernel (io_uring), by system calls alone.
// Must not know jobs or runs. One thread uses a ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "io/read_piece.h"

namespace picaflor {

// 0 if this process may use io_uring, else the errno of the refusal (ENOSYS where the system has none).
int uring_error();

class Uring {
 public:
  // Room for `entries` reads under way. Throws std::system_error if the kernel refuses.
  explicit Uring(unsigned entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Put a read into the ring; `tag` comes back with its answer. At most `entries` may be under way.
  void push(const ReadRequest& request, std::uint64_t tag);

  // Hand what was pushed to the kernel and wait until at least one answer is there.
  void enter();

  // Take the next answer, if one is there: bytes or -errno.
  bool take(std::uint64_t& tag, std::int64_t& got);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace picaflor
