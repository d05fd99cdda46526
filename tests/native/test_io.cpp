// The read pool: right bytes, every way a read can fail, order, cancellation, fork, closing.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/read_at.h"
#include "io/read_pool.h"
#include "io/uring.h"

using picaflor::ReadPool;
using picaflor::ReadResult;
using picaflor::ReadRun;
using picaflor::ReadStatus;

namespace {

int failures = 0;

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                           \
    }                                                                       \
  } while (false)

template <typename Body>
bool refuses(Body body) {
  try {
    body();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// Byte i of the file is a mix of i, so that a shifted or repeated read shows.
unsigned char expected_byte(std::size_t i) { return static_cast<unsigned char>((i * 2654435761u) >> 13); }

struct File {
  std::string path = "/tmp/picaflor_io_XXXXXX";
  int fd = -1;

  explicit File(std::size_t nbytes) {
    fd = ::mkstemp(path.data());
    std::vector<unsigned char> content(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) content[i] = expected_byte(i);
    if (::write(fd, content.data(), nbytes) != static_cast<ssize_t>(nbytes)) std::abort();
  }
  ~File() {
    ::close(fd);
    ::unlink(path.c_str());
  }
};

bool holds(const std::vector<unsigned char>& memory, std::size_t at, std::size_t offset, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; ++i) {
    if (memory[at + i] != expected_byte(offset + i)) return false;
  }
  return true;
}

std::uint64_t submit_one(ReadPool& pool, const std::vector<ReadRun>& runs, bool demand = true) {
  const std::vector<std::int64_t> bounds{0, static_cast<std::int64_t>(runs.size())};
  return pool.submit(runs, bounds, demand);
}

ReadResult wait_one(ReadPool& pool, std::uint64_t ticket) {
  const std::vector<std::uint64_t> tickets{ticket};
  const std::vector<ReadResult> results = pool.wait_any(tickets, -1);
  if (results.size() != 1) std::abort();
  pool.forget(ticket);
  return results[0];
}

// A gate that holds every read until it is opened, and notes which offsets were read in which order.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int inside = 0;
  std::vector<std::int64_t> order;

  std::int64_t read(int fd, void* to, std::size_t nbytes, std::int64_t offset) {
    std::unique_lock lock(mutex);
    order.push_back(offset);
    ++inside;
    changed.notify_all();
    changed.wait(lock, [this] { return open; });
    lock.unlock();
    return picaflor::read_at(fd, to, nbytes, offset);
  }
  void wait_inside(int count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return inside >= count; });
  }
  void release() {
    const std::lock_guard lock(mutex);
    open = true;
    changed.notify_all();
  }
};

picaflor::ReadFunction through(Gate& gate) {
  return [&gate](int fd, void* to, std::size_t n, std::int64_t offset) { return gate.read(fd, to, n, offset); };
}

void test_bytes() {
  const File file(1 << 20);
  ReadPool pool(3);
  std::vector<unsigned char> memory(4096, 0xEE);
  const std::vector<ReadRun> runs{{file.fd, 1001, 500, memory.data() + 10},
                                  {file.fd, 7, 0, nullptr},
                                  {file.fd, (1 << 20) - 100, 100, memory.data() + 600},
                                  {file.fd, 0, 64, memory.data() + 1000}};
  const std::vector<std::int64_t> bounds{0, 3, 3, 4};
  const std::uint64_t first = pool.submit(runs, bounds, true);
  CHECK(wait_one(pool, first).status == ReadStatus::kOk);
  CHECK(wait_one(pool, first + 1).nbytes == 0);
  CHECK(wait_one(pool, first + 2).nbytes == 64);
  CHECK(holds(memory, 10, 1001, 500));
  CHECK(holds(memory, 600, (1 << 20) - 100, 100));
  CHECK(holds(memory, 1000, 0, 64));
  CHECK(memory[9] == 0xEE && memory[510] == 0xEE && memory[599] == 0xEE && memory[700] == 0xEE);
  CHECK(memory[1064] == 0xEE);
  CHECK(pool.stats().nbytes == 664 && pool.stats().jobs == 3 && pool.stats().reads == 3);
  CHECK(pool.stats().seconds > 0);
  CHECK(pool.stats().busy_seconds > 0);
}

void test_many_waited_together() {
  const File file(1 << 16);
  ReadPool pool(4);
  std::vector<unsigned char> memory(1 << 16);
  std::vector<ReadRun> runs;
  std::vector<std::int64_t> bounds{0};
  for (std::int64_t j = 0; j < 256; ++j) {
    runs.push_back({file.fd, j * 256, 256, memory.data() + j * 256});
    bounds.push_back(j + 1);
  }
  const std::uint64_t first = pool.submit(runs, bounds, true);
  std::vector<std::uint64_t> open;
  for (std::uint64_t j = 0; j < 256; ++j) open.push_back(first + j);
  std::size_t seen = 0;
  while (!open.empty()) {
    for (const ReadResult& result : pool.wait_any(open, -1)) {
      CHECK(result.status == ReadStatus::kOk && result.nbytes == 256);
      CHECK(std::erase(open, result.ticket) == 1);
      pool.forget(result.ticket);
      ++seen;
    }
  }
  CHECK(seen == 256);
  CHECK(holds(memory, 0, 0, 1 << 16));
}

void test_short() {
  const File file(1000);
  ReadPool pool(1);
  std::vector<unsigned char> memory(2000, 0xEE);
  const ReadResult result = wait_one(pool, submit_one(pool, {{file.fd, 0, 10, memory.data()},
                                                             {file.fd, 900, 200, memory.data() + 100},
                                                             {file.fd, 0, 10, memory.data() + 500}}));
  CHECK(result.status == ReadStatus::kShort && result.run == 1 && result.found == 100 && result.nbytes == 110);
  CHECK(memory[500] == 0xEE);  // nothing is read behind the failed run
  const ReadResult beyond = wait_one(pool, submit_one(pool, {{file.fd, 5000, 1, memory.data()}}));
  CHECK(beyond.status == ReadStatus::kShort && beyond.run == 0 && beyond.found == 0);
}

void test_errors() {
  const File file(1000);
  std::vector<unsigned char> memory(1000);
  ReadPool pool(1);
  const ReadResult closed = wait_one(pool, submit_one(pool, {{1 << 20, 0, 8, memory.data()}}));
  CHECK(closed.status == ReadStatus::kError && closed.error == EBADF && closed.run == 0);
  const int folder = ::open("/tmp", O_RDONLY);
  const ReadResult directory = wait_one(pool, submit_one(pool, {{folder, 0, 8, memory.data()}}));
  CHECK(directory.status == ReadStatus::kError && directory.error == EISDIR);
  ::close(folder);
  // A disk error in the middle of the second run, after a signal and a partial read.
  int calls = 0;
  ReadPool faulty({.depth = 1}, [&](int fd, void* to, std::size_t n, std::int64_t offset) -> std::int64_t {
    ++calls;
    if (calls == 2) return -EINTR;
    if (calls == 4) return -EIO;
    return picaflor::read_at(fd, to, std::min<std::size_t>(n, 60), offset);
  });
  const ReadResult disk =
      wait_one(faulty, submit_one(faulty, {{file.fd, 0, 60, memory.data()}, {file.fd, 60, 100, memory.data() + 60}}));
  CHECK(disk.status == ReadStatus::kError && disk.error == EIO && disk.run == 1 && disk.found == 60);
  CHECK(disk.nbytes == 120 && calls == 4 && faulty.stats().reads == 4);
  const ReadResult again = wait_one(faulty, submit_one(faulty, {{file.fd, 5, 200, memory.data()}}));
  CHECK(again.status == ReadStatus::kOk && holds(memory, 0, 5, 200));  // the thread lives on, in pieces of 60
}

void test_refusals() {
  const File file(1000);
  ReadPool pool(1);
  std::vector<unsigned char> memory(16);
  unsigned char* to = memory.data();
  constexpr std::int64_t kMost = INT64_MAX;
  CHECK(refuses([&] { submit_one(pool, {{-1, 0, 8, to}}); }));
  CHECK(refuses([&] { submit_one(pool, {{file.fd, -1, 8, to}}); }));
  CHECK(refuses([&] { submit_one(pool, {{file.fd, 0, -8, to}}); }));
  CHECK(refuses([&] { submit_one(pool, {{file.fd, kMost - 7, 8, to}}); }));
  CHECK(refuses([&] { submit_one(pool, {{file.fd, 0, 8, nullptr}}); }));
  const std::vector<ReadRun> one{{file.fd, 0, 8, to}};
  const std::vector<std::vector<std::int64_t>> bad{{}, {1}, {0}, {0, 2}, {0, 1, 0, 1}, {1, 1}, {0, 2, 1}};
  for (const std::vector<std::int64_t>& bounds : bad) {
    CHECK(refuses([&] { pool.submit(one, bounds, true); }));
  }
  CHECK(refuses([] { const ReadPool none(0); }));
  CHECK(pool.stats().jobs == 0);
}

void test_demand_first() {
  const File file(1000);
  Gate gate;
  std::vector<unsigned char> memory(1000);
  ReadPool pool({.depth = 1}, through(gate));
  const std::uint64_t running = submit_one(pool, {{file.fd, 0, 1, memory.data()}}, false);
  gate.wait_inside(1);
  std::vector<std::uint64_t> tickets{running};
  for (const std::int64_t offset : {1, 2, 3}) {
    tickets.push_back(submit_one(pool, {{file.fd, offset, 1, memory.data() + offset}}, false));
  }
  for (const std::int64_t offset : {11, 12}) {
    tickets.push_back(submit_one(pool, {{file.fd, offset, 1, memory.data() + offset}}, true));
  }
  pool.promote(tickets[3]);  // offset 3
  pool.promote(running);
  pool.promote(999);
  gate.release();
  for (const std::uint64_t ticket : tickets) wait_one(pool, ticket);
  CHECK((gate.order == std::vector<std::int64_t>{0, 11, 12, 3, 1, 2}));
}

void test_cancel() {
  const File file(1000);
  Gate gate;
  std::vector<unsigned char> memory(1000, 0xEE);
  ReadPool pool({.depth = 1}, through(gate));
  const std::uint64_t running = submit_one(pool, {{file.fd, 0, 1, memory.data()}});
  gate.wait_inside(1);
  const std::uint64_t waiting = submit_one(pool, {{file.fd, 1, 1, memory.data() + 1}});
  const std::uint64_t ahead = submit_one(pool, {{file.fd, 2, 1, memory.data() + 2}}, false);
  CHECK(!pool.cancel(running));
  CHECK(pool.cancel(waiting) && !pool.cancel(waiting));
  CHECK(pool.cancel(ahead));
  gate.release();
  CHECK(wait_one(pool, running).status == ReadStatus::kOk);
  CHECK(!pool.cancel(running));
  const std::vector<std::uint64_t> unknown{waiting};
  CHECK(pool.wait_any(unknown, -1).empty());  // at once: it will never come
  CHECK(memory[0] == expected_byte(0) && memory[1] == 0xEE && memory[2] == 0xEE);
}

void test_wait_times_out_and_shares() {
  const File file(1000);
  Gate gate;
  std::vector<unsigned char> memory(1000);
  ReadPool pool({.depth = 1}, through(gate));
  const std::vector<std::uint64_t> ticket{submit_one(pool, {{file.fd, 0, 1, memory.data()}})};
  CHECK(pool.wait_any(ticket, 0).empty());
  CHECK(pool.wait_any(ticket, 0.01).empty());
  // Two callers wait for one ticket: both get it, and again until it is forgotten; a running job is not forgotten.
  std::atomic<int> got = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] { got += static_cast<int>(pool.wait_any(ticket, -1).size()); });
  }
  gate.wait_inside(1);
  pool.forget(ticket[0]);
  gate.release();
  for (std::thread& caller : callers) caller.join();
  CHECK(got == 2);
  CHECK(pool.wait_any(ticket, 0).size() == 1);
  pool.forget(ticket[0]);
  CHECK(pool.wait_any(ticket, -1).empty());
}

void test_close() {
  const File file(1000);
  Gate gate;
  std::vector<unsigned char> memory(1000, 0xEE);
  ReadPool pool({.depth = 1}, through(gate));
  const std::uint64_t running = submit_one(pool, {{file.fd, 0, 1, memory.data()}});
  gate.wait_inside(1);
  const std::uint64_t waiting = submit_one(pool, {{file.fd, 1, 1, memory.data() + 1}});
  std::thread opener([&] {
    const std::vector<std::uint64_t> ticket{waiting};
    const std::vector<ReadResult> results = pool.wait_any(ticket, -1);
    CHECK(results.size() == 1 && results[0].status == ReadStatus::kCancelled);
    gate.release();
  });
  pool.close();
  CHECK(memory[0] == expected_byte(0) && memory[1] == 0xEE);
  opener.join();
  CHECK(wait_one(pool, running).status == ReadStatus::kOk);
  pool.close();
  bool refused = false;
  try {
    submit_one(pool, {{file.fd, 0, 1, memory.data()}});
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused);
}

void test_fork() {
  const File file(1000);
  Gate gate;
  std::vector<unsigned char> memory(1000, 0xEE);
  ReadPool pool({.depth = 2}, through(gate));
  const std::uint64_t ticket = submit_one(pool, {{file.fd, 0, 1, memory.data()}});
  gate.wait_inside(1);
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    gate.open = true;
    const std::vector<std::uint64_t> parents{ticket};
    const bool unknown = pool.wait_any(parents, 5).empty() && pool.stats().jobs == 0;
    const std::uint64_t own = submit_one(pool, {{file.fd, 10, 20, memory.data()}});
    const bool right = wait_one(pool, own).status == ReadStatus::kOk && holds(memory, 0, 10, 20);
    pool.close();
    ::_exit(unknown && right ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  gate.release();
  CHECK(wait_one(pool, ticket).status == ReadStatus::kOk);
  CHECK(memory[0] == expected_byte(0));
}

// Memory that starts at a multiple of 4096.
struct Blocks {
  unsigned char* data;
  explicit Blocks(std::size_t nbytes)
      : data(static_cast<unsigned char*>(std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096))) {
    std::memset(data, 0xEE, nbytes);
  }
  ~Blocks() { std::free(data); }
};

bool right(const unsigned char* memory, std::size_t offset, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; ++i) {
    if (memory[i] != expected_byte(offset + i)) return false;
  }
  return true;
}

// What a file opened for direct reads does: it refuses all but whole blocks.
std::int64_t block_read(int fd, void* to, std::size_t nbytes, std::int64_t offset, std::int64_t block) {
  const auto size = static_cast<std::size_t>(block);
  if (offset % block != 0 || nbytes % size != 0 || reinterpret_cast<std::uintptr_t>(to) % size != 0) return -EINVAL;
  return picaflor::read_at(fd, to, nbytes, offset);
}

void test_aligned() {
  constexpr std::size_t kSize = 100000;  // no multiple of a block
  const File file(kSize);
  for (const std::int64_t block : {512, 4096}) {
    ReadPool pool({.depth = 2, .piece_bytes = 8192},
                  [&](int fd, void* to, std::size_t n, std::int64_t at) { return block_read(fd, to, n, at, block); });
    for (const auto& [offset, nbytes] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {0, 4096}, {1, 1}, {4095, 2}, {777, 50000}, {8192, 8192}, {99999, 1}, {60001, 39999}, {5, 0}}) {
      const Blocks memory(kSize + 8192);
      unsigned char* to = memory.data + offset % 4096;
      const std::uint64_t ticket = submit_one(pool, {{file.fd, offset, nbytes, to, block}});
      const ReadResult result = wait_one(pool, ticket);
      CHECK(result.status == ReadStatus::kOk && result.nbytes == nbytes && result.spares == 0);
      CHECK(right(to, static_cast<std::size_t>(offset), static_cast<std::size_t>(nbytes)));
    }
    const Blocks memory(16384);
    const ReadResult beyond =
        wait_one(pool, submit_one(pool, {{file.fd, 99000, 3000, memory.data + 99000 % 4096, block}}));
    CHECK(beyond.status == ReadStatus::kShort && beyond.found == 1000 && beyond.nbytes == 1000);
    CHECK(refuses([&] { submit_one(pool, {{file.fd, 1, 8, memory.data, block}}); }));
    CHECK(refuses([&] { submit_one(pool, {{file.fd, 0, 8, memory.data, 768}}); }));
    CHECK(refuses([&] { submit_one(pool, {{file.fd, 0, 8, memory.data, 8192}}); }));
    CHECK(refuses([&] { submit_one(pool, {{file.fd, 0, 8, memory.data, -512}}); }));
  }
}

void test_pieces_side_by_side() {
  constexpr std::size_t kSize = 1 << 18;
  const File file(kSize);
  Gate gate;
  ReadPool pool({.depth = 4, .piece_bytes = 1 << 16}, through(gate));
  std::vector<unsigned char> memory(kSize);
  const std::uint64_t ticket = submit_one(pool, {{file.fd, 100, kSize - 100, memory.data()}});
  gate.wait_inside(4);  // the four pieces of one run are under way together
  const std::vector<std::uint64_t> tickets{ticket};
  CHECK(pool.wait_any(tickets, 0).empty());
  gate.release();
  const ReadResult result = wait_one(pool, ticket);
  CHECK(result.status == ReadStatus::kOk && result.nbytes == kSize - 100);
  CHECK(holds(memory, 0, 100, kSize - 100));
  CHECK(pool.stats().reads == 4 && pool.stats().jobs == 1);
}

void test_failed_piece_ends_the_job() {
  const File file(1 << 18);
  std::atomic<int> calls = 0;
  ReadPool pool({.depth = 1, .piece_bytes = 1 << 16}, [&](int fd, void* to, std::size_t n, std::int64_t at) {
    return ++calls == 2 ? std::int64_t{-EIO} : picaflor::read_at(fd, to, n, at);
  });
  std::vector<unsigned char> memory(1 << 18);
  const ReadResult result =
      wait_one(pool, submit_one(pool, {{file.fd, 0, 1 << 18, memory.data()}, {file.fd, 0, 8, memory.data()}}));
  CHECK(result.status == ReadStatus::kError && result.error == EIO && result.run == 0 && result.found == 1 << 16);
  CHECK(calls == 2);  // nothing more is begun
}

void test_spare() {
  const File file(50000);
  const File cut(30000);
  const Blocks memory(65536);
  const std::vector<ReadRun> refused{{cut.fd, 10, 40000, memory.data + 10, 512, file.fd}};
  ReadPool refusing({.depth = 2, .piece_bytes = 16384}, [&](int fd, void* to, std::size_t n, std::int64_t at) {
    return fd == cut.fd ? std::int64_t{-EINVAL} : picaflor::read_at(fd, to, n, at);
  });
  ReadResult result = wait_one(refusing, submit_one(refusing, refused));
  CHECK(result.status == ReadStatus::kOk && result.nbytes == 40000 && right(memory.data + 10, 10, 40000));
  CHECK(result.spares == 3 && result.spare_run == 0 && result.spare_error == EINVAL);
  // A disk error of the only copy is told, not tried again; that of a copy leads to the other one.
  ReadPool broken({.depth = 1}, [&](int fd, void* to, std::size_t n, std::int64_t at) {
    return fd == cut.fd ? std::int64_t{-EIO} : picaflor::read_at(fd, to, n, at);
  });
  std::vector<ReadRun> runs{{cut.fd, 100, 500, memory.data, 0, file.fd}};
  result = wait_one(broken, submit_one(broken, runs));
  CHECK(result.status == ReadStatus::kError && result.error == EIO && result.spares == 0);
  runs[0].spare_use = picaflor::SpareUse::kFailed;
  result = wait_one(broken, submit_one(broken, runs));
  CHECK(result.status == ReadStatus::kOk && result.spares == 1 && result.spare_run == 0 && result.spare_error == EIO);
  CHECK(right(memory.data, 100, 500));
  CHECK(broken.stats().spares == 1);
  // The copy is shorter: what it gave is read again from the other one.
  ReadPool plain({.depth = 1, .piece_bytes = 8192}, picaflor::read_at);
  runs = {{cut.fd, 100, 20000, memory.data, 0, file.fd, picaflor::SpareUse::kFailed},
          {cut.fd, 25000, 20000, memory.data + 20000, 0, file.fd, picaflor::SpareUse::kFailed}};
  result = wait_one(plain, submit_one(plain, runs));
  CHECK(result.status == ReadStatus::kOk && result.nbytes == 40000 && result.spare_run == 1 && result.spare_error == 0);
  CHECK(right(memory.data, 100, 20000) && right(memory.data + 20000, 25000, 20000));
}

void test_uring() {
  if (picaflor::uring_error() != 0) {
    std::printf("io: skipped the ring: the system refuses it: %s\n", std::strerror(picaflor::uring_error()));
    return;
  }
  const File file(1 << 20);
  std::vector<unsigned char> memory(1 << 20);
  ReadPool pool({.engine = picaflor::ReadEngine::kUring, .depth = 3, .piece_bytes = 1 << 14});
  std::vector<ReadRun> runs;
  std::vector<std::int64_t> bounds{0};
  for (std::int64_t j = 0; j < 64; ++j) {
    runs.push_back({file.fd, j << 14, 1 << 14, memory.data() + (j << 14)});
    bounds.push_back(j + 1);
  }
  const std::uint64_t first = pool.submit(runs, bounds, true);
  for (std::uint64_t j = 0; j < 64; ++j) CHECK(wait_one(pool, first + j).nbytes == 1 << 14);
  CHECK(holds(memory, 0, 0, 1 << 20));
  CHECK(pool.stats().jobs == 64 && pool.stats().nbytes == 1 << 20);
  const ReadResult beyond = wait_one(pool, submit_one(pool, {{file.fd, (1 << 20) - 40000, 50000, memory.data()}}));
  CHECK(beyond.status == ReadStatus::kShort && beyond.found == 40000);
  const ReadResult closed = wait_one(pool, submit_one(pool, {{1 << 20, 0, 8, memory.data()}}));
  CHECK(closed.status == ReadStatus::kError && closed.error == EBADF);
  CHECK(wait_one(pool, submit_one(pool, {})).nbytes == 0);
  const std::uint64_t last = submit_one(pool, {{file.fd, 3, 1 << 19, memory.data()}}, false);
  pool.close();
  const ReadResult ended = wait_one(pool, last);
  CHECK(ended.status == ReadStatus::kOk || ended.status == ReadStatus::kCancelled);
  CHECK(ended.status != ReadStatus::kOk || holds(memory, 0, 3, 1 << 19));
}

}  // namespace

int main() {
  test_bytes();
  test_many_waited_together();
  test_short();
  test_errors();
  test_refusals();
  test_demand_first();
  test_cancel();
  test_wait_times_out_and_shares();
  test_close();
  test_fork();
  test_aligned();
  test_pieces_side_by_side();
  test_failed_piece_ends_the_job();
  test_spare();
  test_uring();
  std::printf(failures == 0 ? "io: all good\n" : "io: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
