// One positioned read from an open file: the only place that calls the operating system.
// Must not know jobs, threads or experts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace picaflor {

// Read up to `nbytes` bytes at `offset` into `to`. Returns the bytes read (0 at the end of the file) or -errno.
// Never moves the file's own position, so any number of threads may read one descriptor.
std::int64_t read_at(int fd, void* to, std::size_t nbytes, std::int64_t offset);

}  // namespace picaflor
