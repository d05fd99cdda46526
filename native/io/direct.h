// Whether an open file can be read past the page cache, and in blocks of which size.
// Must not know pools or experts.
#pragma once

#include <cstdint>

namespace picaflor {

struct DirectProbe {
  std::int64_t align = 0;  // block size in bytes, a power of two up to 4096; 0: it cannot
  int error = 0;           // errno of the refusal
};

// `fd` was opened with O_DIRECT. Asks the file system (statx), else tries 512 and 4096 bytes; what it says is tried
// once at the file's start.
DirectProbe probe_direct(int fd);

}  // namespace picaflor
