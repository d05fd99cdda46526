#include "io/uring.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define PICAFLOR_HAS_URING 1
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace picaflor {

#ifdef PICAFLOR_HAS_URING

namespace {

// These numbers are the same on every architecture.
constexpr long kSetup = 425;
constexpr long kEnter = 426;

int setup(unsigned entries, io_uring_params& params) { return static_cast<int>(::syscall(kSetup, entries, &params)); }

// A mapping of a ring's memory.
class Shared {
 public:
  Shared(int fd, std::size_t nbytes, std::int64_t offset) : nbytes_(nbytes) {
    void* found = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (found == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mapping an io_uring");
    data_ = static_cast<char*>(found);
  }
  ~Shared() { ::munmap(data_, nbytes_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  char* data_ = nullptr;
  std::size_t nbytes_;
};

struct Descriptor {
  int fd;
  ~Descriptor() { ::close(fd); }
};

int open_ring(unsigned entries, io_uring_params& params) {
  const int fd = setup(entries, params);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "io_uring_setup");
  return fd;
}

std::size_t submission_bytes(const io_uring_params& p) { return p.sq_off.array + p.sq_entries * sizeof(std::uint32_t); }
std::size_t completion_bytes(const io_uring_params& p) { return p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe); }

}  // namespace

struct Uring::State {
  io_uring_params params{};
  Descriptor ring;
  Shared submissions;
  Shared completions;
  Shared entries;
  unsigned pushed = 0;

  explicit State(unsigned count)
      : ring{open_ring(count, params)},
        submissions(ring.fd, submission_bytes(params), IORING_OFF_SQ_RING),
        completions(ring.fd, completion_bytes(params), IORING_OFF_CQ_RING),
        entries(ring.fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {}
};

int uring_error() {
  io_uring_params params{};
  const int fd = setup(1, params);
  if (fd < 0) return errno;
  ::close(fd);
  return 0;
}

Uring::Uring(unsigned entries) : state_(std::make_unique<State>(entries)) {}
Uring::~Uring() = default;

void Uring::push(const ReadRequest& request, std::uint64_t tag) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  State& s = *state_;
  auto* tail = s.submissions.at<unsigned>(s.params.sq_off.tail);
  const unsigned mask = *s.submissions.at<unsigned>(s.params.sq_off.ring_mask);
  const unsigned place = *tail & mask;
  io_uring_sqe entry{};
  entry.opcode = IORING_OP_READ;
  entry.fd = request.fd;
  entry.addr = reinterpret_cast<std::uint64_t>(request.to);
  entry.len = static_cast<unsigned>(std::min(request.nbytes, kMost));
  entry.off = static_cast<std::uint64_t>(request.offset);
  entry.user_data = tag;
  s.entries.at<io_uring_sqe>(0)[place] = entry;
  s.submissions.at<unsigned>(s.params.sq_off.array)[place] = place;
  __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
  ++s.pushed;
}

void Uring::enter() {
  State& s = *state_;
  const long taken = ::syscall(kEnter, s.ring.fd, s.pushed, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
  if (taken >= 0) {
    s.pushed -= static_cast<unsigned>(taken);
  } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
    throw std::system_error(errno, std::generic_category(), "io_uring_enter");
  }
}

bool Uring::take(std::uint64_t& tag, std::int64_t& got) {
  State& s = *state_;
  auto* head = s.completions.at<unsigned>(s.params.cq_off.head);
  const auto* tail = s.completions.at<unsigned>(s.params.cq_off.tail);
  if (*head == __atomic_load_n(tail, __ATOMIC_ACQUIRE)) return false;
  const unsigned mask = *s.completions.at<unsigned>(s.params.cq_off.ring_mask);
  const io_uring_cqe& answer = s.completions.at<io_uring_cqe>(s.params.cq_off.cqes)[*head & mask];
  tag = answer.user_data;
  got = answer.res;
  __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
  return true;
}

#else

struct Uring::State {};
int uring_error() { return ENOSYS; }
Uring::Uring(unsigned) { throw std::system_error(ENOSYS, std::generic_category(), "io_uring"); }
Uring::~Uring() = default;
void Uring::push(const ReadRequest&, std::uint64_t) {}
void Uring::enter() {}
bool Uring::take(std::uint64_t&, std::int64_t&) { return false; }

#endif

}  // namespace picaflor
