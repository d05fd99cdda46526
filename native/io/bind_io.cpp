// Python's view of the read pool. Addresses come in as integers; whoever passes them owns the memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "io/direct.h"
#include "io/file_map.h"
#include "io/read_pool.h"
#include "io/uring.h"

namespace nb = nanobind;

namespace picaflor {

void bind_io(nb::module_& module);

namespace {

constexpr std::size_t kRunWords = 7;
using Runs = nb::ndarray<const std::int64_t, nb::shape<-1, kRunWords>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Uint64s = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Words: descriptor, file offset, bytes, offset in the slot, alignment, spare descriptor, whether any failure leads
// there.
ReadRun run_of(const std::int64_t* row, std::uint64_t base) {
  if (row[0] < 0 || row[0] > INT32_MAX || row[5] < -1 || row[5] > INT32_MAX) {
    throw std::invalid_argument("a descriptor is out of range");
  }
  if (row[3] < 0 || (row[4] > 0 && row[3] < row[1] % row[4])) {
    throw std::invalid_argument("a run would write before its slot");
  }
  return {.fd = static_cast<int>(row[0]),
          .offset = row[1],
          .nbytes = row[2],
          .to = reinterpret_cast<void*>(base + static_cast<std::uint64_t>(row[3])),
          .align = row[4],
          .spare = static_cast<int>(row[5]),
          .spare_use = row[6] == 0 ? SpareUse::kRefused : SpareUse::kFailed};
}

std::uint64_t submit(ReadPool& pool, const Runs& runs, const Int64s& bounds, const Uint64s& bases, bool demand) {
  const std::size_t jobs = bases.shape(0);
  if (bounds.shape(0) != jobs + 1) throw std::invalid_argument("one more bound than jobs is needed");
  std::vector<ReadRun> list;
  list.reserve(runs.shape(0));
  for (std::size_t j = 0; j < jobs; ++j) {
    for (std::int64_t r = bounds.data()[j]; r < bounds.data()[j + 1]; ++r) {
      if (r < 0 || r >= static_cast<std::int64_t>(runs.shape(0))) throw std::invalid_argument("a bound is no run");
      list.push_back(run_of(runs.data() + r * static_cast<std::int64_t>(kRunWords), bases.data()[j]));
    }
  }
  const std::span<const std::int64_t> all(bounds.data(), jobs + 1);
  return pool.submit(list, all, demand);
}

std::vector<ReadResult> wait_any(ReadPool& pool, const Uint64s& tickets, double seconds) {
  const nb::gil_scoped_release release;
  return pool.wait_any({tickets.data(), tickets.shape(0)}, seconds);
}

nb::list as_list(const std::vector<ReadResult>& results) {
  nb::list out;
  for (const ReadResult& result : results) out.append(result);
  return out;
}

}  // namespace

void bind_io(nb::module_& module) {
  nb::enum_<ReadStatus>(module, "ReadStatus", "What became of a read job.")
      .value("OK", ReadStatus::kOk)
      .value("ERROR", ReadStatus::kError, "the system gave an error number")
      .value("SHORT", ReadStatus::kShort, "the file ended early")
      .value("CANCELLED", ReadStatus::kCancelled, "the pool was closed before all of the job had begun");
  nb::class_<ReadResult>(module, "ReadResult", "The result of one job; run, found and error speak of the failed run.")
      .def_ro("ticket", &ReadResult::ticket)
      .def_ro("status", &ReadResult::status)
      .def_ro("error", &ReadResult::error, "errno")
      .def_ro("run", &ReadResult::run, "index of the failed run in its job")
      .def_ro("found", &ReadResult::found, "bytes of that run that were read")
      .def_ro("nbytes", &ReadResult::nbytes, "bytes of the job that were read")
      .def_ro("spares", &ReadResult::spares, "pieces that came from the spare descriptor")
      .def_ro("spare_run", &ReadResult::spare_run, "the first run with such a piece, -1 for none")
      .def_ro("spare_error", &ReadResult::spare_error, "errno that led there, 0 where the file ended early")
      .def_ro("seconds", &ReadResult::seconds, "sum over its pieces of the time between call and answer");
  nb::class_<ReadStats>(module, "ReadStats", "Sums over a pool's life.")
      .def_ro("nbytes", &ReadStats::nbytes)
      .def_ro("reads", &ReadStats::reads, "calls to the system")
      .def_ro("jobs", &ReadStats::jobs)
      .def_ro("spares", &ReadStats::spares)
      .def_ro("seconds", &ReadStats::seconds, "sum over calls")
      .def_ro("busy_seconds", &ReadStats::busy_seconds, "time with a job under way");
  nb::class_<FileMap>(module, "FileMap", "Files mapped for reading; a page that is lost reads as zeros and breaks it.")
      .def(
          "__init__",
          [](FileMap* place, const std::vector<int>& fds, const std::vector<std::int64_t>& nbytes) {
            new (place) FileMap(fds, nbytes);
          },
          nb::arg("fds"), nb::arg("nbytes"))
      .def("address", &FileMap::address, nb::arg("file"), "Where a file begins.")
      .def_prop_ro("nbytes", &FileMap::nbytes)
      .def_prop_ro("broken", &FileMap::broken, "Whether a page was lost since the last renew.")
      .def("cut", &FileMap::cut, "The first file that is shorter than it was, -1 for none.")
      .def("renew", &FileMap::renew, "Map all files again, at the same addresses; nothing may read meanwhile.");
  module.def(
      "probe_direct",
      [](int fd) {
        const DirectProbe found = probe_direct(fd);
        return std::pair<std::int64_t, int>(found.align, found.error);
      },
      "(block size in bytes, errno) for a descriptor opened with O_DIRECT; the size is 0 where it cannot be read so.");
  module.def("uring_error", &uring_error, "0 if io_uring can be used, else the errno of the refusal.");
  nb::class_<ReadPool>(module, "ReadPool", "Reads runs of bytes from files into memory, in threads or in an io_uring.")
      .def(
          "__init__",
          [](ReadPool* place, int depth, bool uring, std::int64_t piece_bytes) {
            const ReadEngine engine = uring ? ReadEngine::kUring : ReadEngine::kThreads;
            new (place) ReadPool(ReadOptions{.engine = engine, .depth = depth, .piece_bytes = piece_bytes});
          },
          nb::arg("depth"), nb::kw_only(), nb::arg("uring") = false, nb::arg("piece_bytes") = ReadOptions{}.piece_bytes)
      .def_prop_ro("depth", [](const ReadPool& pool) { return pool.options().depth; })
      .def_prop_ro("uring", [](const ReadPool& pool) { return pool.options().engine == ReadEngine::kUring; })
      .def("submit", &submit, nb::arg("runs"), nb::arg("bounds"), nb::arg("bases"), nb::kw_only(), nb::arg("demand"),
           "runs int64 [n, 7]: descriptor, file offset, bytes, offset behind the job's base, alignment (0: none),\n"
           "spare descriptor (-1: none), 1 if every failure leads to it and 0 if only a refusal; job j has runs\n"
           "[bounds[j], bounds[j + 1]) and base address bases[j] (uint64). Returns the first ticket; others follow.")
      .def(
          "wait_any",
          [](ReadPool& pool, const Uint64s& tickets, double seconds) {
            return as_list(wait_any(pool, tickets, seconds));
          },
          nb::arg("tickets"), nb::arg("seconds"),
          "Results of the finished ones among `tickets` (uint64), after at most `seconds` (negative: no limit).\n"
          "They stay known until `forget`. Empty at once if a ticket is unknown and none is finished.")
      .def("forget", &ReadPool::forget, nb::arg("ticket"), "Drop the result of a finished job.")
      .def("cancel", &ReadPool::cancel, nb::arg("ticket"), "Take back a job that has not begun; True if it was.")
      .def("promote", &ReadPool::promote, nb::arg("ticket"), "Let a waiting job start with the demand jobs.")
      .def("stats", &ReadPool::stats)
      .def(
          "busy_seconds", [](const ReadPool& pool) { return pool.stats().busy_seconds; },
          "Time with at least one job under way, up to the last moment when there was none.")
      .def("close", &ReadPool::close, nb::call_guard<nb::gil_scoped_release>(),
           "Cancel what waits, finish what runs, end the threads.");
}

}  // namespace picaflor
