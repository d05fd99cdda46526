// Whole files mapped for reading, side by side in one range of addresses, with readable memory behind each.
// Must not know experts. A page that cannot be had any more (the file was cut, the drive failed) reads as zeros and
// breaks the map, instead of ending the process: whoever read from it asks `broken` before using what was computed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace picaflor {

class FileMap {
 public:
  // Descriptors are duplicated. Throws std::system_error, also for a file that is shorter than `nbytes`.
  FileMap(std::span<const int> fds, std::span<const std::int64_t> nbytes);
  ~FileMap();
  FileMap(const FileMap&) = delete;
  FileMap& operator=(const FileMap&) = delete;

  // Where a file begins, page-aligned.
  std::uint64_t address(std::size_t file) const;
  std::int64_t nbytes() const { return total_; }

  // Whether a page could not be had since the last `renew`.
  bool broken() const { return broken_.load(std::memory_order_acquire); }

  // The first file that is shorter than it was, -1 for none.
  int cut() const;

  // Map all files again: addresses stay. Nothing may read meanwhile.
  void renew();

 private:
  void place(std::size_t file) const;
  void watch();

  std::vector<int> fds_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::size_t> starts_;
  std::byte* base_ = nullptr;
  std::size_t reserved_ = 0;
  std::int64_t total_ = 0;
  int watched_ = -1;
  std::atomic<bool> broken_{false};
};

}  // namespace picaflor
