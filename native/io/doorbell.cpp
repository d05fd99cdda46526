#include "io/doorbell.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

#ifdef __linux__
#include <sys/eventfd.h>
#endif

namespace picaflor {

Doorbell::Doorbell() {
#ifdef __linux__
  fd_ = ::eventfd(0, EFD_CLOEXEC);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
#else
  throw std::system_error(ENOSYS, std::generic_category(), "eventfd");
#endif
}

Doorbell::~Doorbell() {
  if (fd_ >= 0) ::close(fd_);
}

void Doorbell::ring() const {
  const std::uint64_t one = 1;
  while (::write(fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

}  // namespace picaflor
