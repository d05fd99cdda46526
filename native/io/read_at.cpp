#include "io/read_at.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace picaflor {

std::int64_t read_at(int fd, void* to, std::size_t nbytes, std::int64_t offset) {
  // Linux stops at 2^31 - 4096 bytes and macOS refuses more than 2^31 - 1; the caller's loop asks again.
  constexpr std::size_t kMost = std::size_t{1} << 30;
  const ssize_t got = ::pread(fd, to, std::min(nbytes, kMost), static_cast<off_t>(offset));
  return got < 0 ? -static_cast<std::int64_t>(errno) : static_cast<std::int64_t>(got);
}

}  // namespace picaflor
