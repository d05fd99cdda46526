#include "io/direct.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <memory>

#include "io/read_at.h"

namespace picaflor {

namespace {

constexpr std::int64_t kMost = 4096;

// 0: the file system does not tell; -1: it says that it cannot.
std::int64_t told_alignment(int fd) {
#ifdef STATX_DIOALIGN
  struct statx found{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) != 0) return 0;
  if ((found.stx_mask & STATX_DIOALIGN) == 0) return 0;
  if (found.stx_dio_offset_align == 0) return -1;
  return std::max(found.stx_dio_offset_align, found.stx_dio_mem_align);
#else
  static_cast<void>(fd);
  return 0;
#endif
}

// 0, or the errno of a read of one block.
int try_block(int fd, std::int64_t align) {
  const auto size = static_cast<std::size_t>(align);
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kMost, kMost), &std::free);
  if (!memory) return ENOMEM;
  // One block into the middle of the memory, so that a larger need of alignment shows.
  const std::size_t shift = align < kMost ? size : 0;
  std::int64_t got = 0;
  do {
    got = read_at(fd, static_cast<char*>(memory.get()) + shift, size, 0);
  } while (got == -EINTR);
  return got < 0 ? static_cast<int>(-got) : 0;
}

}  // namespace

DirectProbe probe_direct(int fd) {
  const std::int64_t told = told_alignment(fd);
  if (told < 0 || told > kMost || (told > 0 && !std::has_single_bit(static_cast<std::uint64_t>(told)))) {
    return {0, EINVAL};
  }
  int error = 0;
  for (const std::int64_t align : {std::int64_t{512}, kMost}) {
    const std::int64_t wanted = told > 0 ? told : align;
    error = try_block(fd, wanted);
    if (error == 0) return {wanted, 0};
    if (told > 0 || error != EINVAL) break;
  }
  return {0, error};
}

}  // namespace picaflor
