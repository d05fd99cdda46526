// Anonymous private mappings.
// Must not know operations or Python.
#include "cpu/program_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <utility>

namespace picaflor {
namespace {

constexpr int64_t kSlack = 64;  // so many bytes behind the end are readable

}  // namespace

Mapping::Mapping(int64_t nbytes) : nbytes_(nbytes + kSlack) {
  void* memory = mmap(nullptr, static_cast<size_t>(nbytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::bad_alloc();
  }
  data_ = static_cast<std::byte*>(memory);
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    munmap(data_, static_cast<size_t>(nbytes_));
  }
}

void Mapping::shrink(int64_t nbytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t kept = (nbytes + kSlack + page - 1) / page * page;
  if (kept < nbytes_) {
    munmap(data_ + kept, static_cast<size_t>(nbytes_ - kept));
    nbytes_ = kept;
  }
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}

}  // namespace picaflor
