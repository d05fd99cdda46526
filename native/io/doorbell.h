// Wakes a thread that waits on a ring of reads: a counter of the kernel that becomes readable.
// Must not know jobs.
#pragma once

#include <cstdint>

#include "io/read_piece.h"

namespace picaflor {

class Doorbell {
 public:
  // Throws std::system_error where the system has none (any but Linux).
  Doorbell();
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // Answer the read that waits, or the next one.
  void ring() const;

  // The read to put into the ring; one at a time.
  ReadRequest request() { return {fd_, &count_, sizeof(count_), -1}; }

 private:
  int fd_ = -1;
  std::uint64_t count_ = 0;
};

}  // namespace picaflor
