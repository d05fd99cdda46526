#include "io/file_map.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <system_error>

namespace picaflor {

namespace {

constexpr std::size_t kMostMaps = 64;

// Ranges whose bus errors are ours. The handler reads them without a lock: `broken` is set last and cleared first.
struct Watched {
  std::atomic<std::uintptr_t> start{0};
  std::atomic<std::uintptr_t> end{0};
  std::atomic<std::atomic<bool>*> broken{nullptr};
};

std::array<Watched, kMostMaps> watched;
std::mutex watching;
struct sigaction before;
std::uintptr_t page_bytes = 4096;

std::system_error failed(const char* what) { return {errno, std::generic_category(), what}; }

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (Watched& range : watched) {
    std::atomic<bool>* broken = range.broken.load(std::memory_order_acquire);
    if (broken == nullptr || address < range.start || address >= range.end) continue;
    void* page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
    if (::mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) break;
    broken->store(true, std::memory_order_release);
    return;
  }
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else {
    ::signal(signal, SIG_DFL);  // the access is tried again and ends the process, as it would have
  }
}

void install_handler() {
  page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction ours{};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&ours.sa_mask);
  struct sigaction found{};
  ::sigaction(SIGBUS, nullptr, &found);
  if ((found.sa_flags & SA_SIGINFO) != 0 && found.sa_sigaction == on_bus_error) return;
  if (::sigaction(SIGBUS, &ours, &before) != 0) throw failed("installing a handler for bus errors");
}

std::size_t whole_pages(std::size_t nbytes) { return (nbytes + page_bytes - 1) / page_bytes * page_bytes; }

}  // namespace

FileMap::FileMap(std::span<const int> fds, std::span<const std::int64_t> nbytes) {
  if (fds.size() != nbytes.size()) throw std::invalid_argument("one size per file is needed");
  {
    const std::lock_guard lock(watching);
    install_handler();
  }
  for (const std::int64_t size : nbytes) {
    if (size < 0) throw std::invalid_argument("a file has no negative size");
    starts_.push_back(reserved_);
    sizes_.push_back(size);
    total_ += size;
    reserved_ += whole_pages(static_cast<std::size_t>(size)) + page_bytes;  // one page of zeros behind each
  }
  void* found = ::mmap(nullptr, reserved_ + page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) throw failed("reserving addresses for a map of files");
  base_ = static_cast<std::byte*>(found);
  try {
    for (const int fd : fds) {
      const int own = ::dup(fd);
      if (own < 0) throw failed("duplicating a descriptor");
      fds_.push_back(own);
    }
    if (cut() >= 0) throw std::system_error(EINVAL, std::generic_category(), "a file is shorter than it was");
    for (std::size_t file = 0; file < fds_.size(); ++file) place(file);
    watch();
  } catch (...) {
    ::munmap(base_, reserved_ + page_bytes);
    for (const int fd : fds_) ::close(fd);
    throw;
  }
}

FileMap::~FileMap() {
  watched[static_cast<std::size_t>(watched_)].broken.store(nullptr, std::memory_order_release);
  ::munmap(base_, reserved_ + page_bytes);
  for (const int fd : fds_) ::close(fd);
}

std::uint64_t FileMap::address(std::size_t file) const {
  return reinterpret_cast<std::uint64_t>(base_ + starts_.at(file));
}

int FileMap::cut() const {
  for (std::size_t file = 0; file < fds_.size(); ++file) {
    struct stat found{};
    if (::fstat(fds_[file], &found) != 0 || found.st_size < sizes_[file]) return static_cast<int>(file);
  }
  return -1;
}

void FileMap::renew() {
  for (std::size_t file = 0; file < fds_.size(); ++file) place(file);
  broken_.store(false, std::memory_order_release);
}

void FileMap::place(std::size_t file) const {
  if (sizes_[file] == 0) return;
  std::byte* at = base_ + starts_[file];
  const auto size = static_cast<std::size_t>(sizes_[file]);
  if (::mmap(at, size, PROT_READ, MAP_SHARED | MAP_FIXED, fds_[file], 0) == MAP_FAILED) throw failed("mapping a file");
#ifdef MADV_HUGEPAGE
  ::madvise(at, size, MADV_HUGEPAGE);  // a hint: file systems without large pages refuse it
#endif
}

void FileMap::watch() {
  const std::lock_guard lock(watching);
  for (std::size_t i = 0; i < kMostMaps; ++i) {
    if (watched[i].broken.load() != nullptr) continue;
    watched[i].start = reinterpret_cast<std::uintptr_t>(base_);
    watched[i].end = reinterpret_cast<std::uintptr_t>(base_) + reserved_;
    watched[i].broken.store(&broken_, std::memory_order_release);
    watched_ = static_cast<int>(i);
    return;
  }
  throw std::system_error(ENOMEM, std::generic_category(), "more than 64 maps of files at once");
}

}  // namespace picaflor
