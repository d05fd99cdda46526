// Memory of programs: anonymous mappings that cost nothing until they are touched.
// Must not know operations or Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace picaflor {

// `nbytes` of zeros (0 allowed), aligned to a memory page, freed with the object. Throws std::bad_alloc.
class Mapping {
 public:
  explicit Mapping(int64_t nbytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&&) = delete;

  std::byte* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }
  // Gives the memory behind the first `nbytes` back to the system; no more than there is.
  void shrink(int64_t nbytes);
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  int64_t nbytes_ = 0;
};

}  // namespace picaflor
