// Python's view of the read pool. Addresses come in as integers; whoever passes them owns the memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "io/read_pool.h"

namespace nb = nanobind;

namespace picaflor {

void bind_io(nb::module_& module);

namespace {

using Runs = nb::ndarray<const std::int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Uint64s = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint64_t submit(ReadPool& pool, const Runs& runs, const Int64s& bounds, const Uint64s& bases, bool demand) {
  const std::size_t jobs = bases.shape(0);
  if (bounds.shape(0) != jobs + 1) throw std::invalid_argument("one more bound than jobs is needed");
  std::vector<ReadRun> list;
  list.reserve(runs.shape(0));
  for (std::size_t j = 0; j < jobs; ++j) {
    for (std::int64_t r = bounds.data()[j]; r < bounds.data()[j + 1]; ++r) {
      if (r < 0 || r >= static_cast<std::int64_t>(runs.shape(0))) throw std::invalid_argument("a bound is no run");
      const std::int64_t* row = runs.data() + r * 4;
      if (row[0] < 0 || row[0] > INT32_MAX) throw std::invalid_argument("a descriptor is out of range");
      if (row[3] < 0) throw std::invalid_argument("a run would write before its slot");
      const std::uint64_t address = bases.data()[j] + static_cast<std::uint64_t>(row[3]);
      list.push_back({static_cast<int>(row[0]), row[1], row[2], reinterpret_cast<void*>(address)});
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
      .value("CANCELLED", ReadStatus::kCancelled, "the pool was closed before the job began");
  nb::class_<ReadResult>(module, "ReadResult", "The result of one job; run, found and error speak of the failed run.")
      .def_ro("ticket", &ReadResult::ticket)
      .def_ro("status", &ReadResult::status)
      .def_ro("error", &ReadResult::error, "errno")
      .def_ro("run", &ReadResult::run, "index of the failed run in its job")
      .def_ro("found", &ReadResult::found, "bytes of that run that were read")
      .def_ro("nbytes", &ReadResult::nbytes, "bytes of the job that were read")
      .def_ro("seconds", &ReadResult::seconds, "time that a thread spent on the job");
  nb::class_<ReadStats>(module, "ReadStats", "Sums over a pool's life.")
      .def_ro("nbytes", &ReadStats::nbytes)
      .def_ro("reads", &ReadStats::reads, "calls to the system")
      .def_ro("jobs", &ReadStats::jobs)
      .def_ro("seconds", &ReadStats::seconds, "sum over threads")
      .def_ro("busy_seconds", &ReadStats::busy_seconds, "time with a job under way");
  nb::class_<ReadPool>(module, "ReadPool", "Threads that read runs of bytes from files into memory.")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_ro("threads", &ReadPool::threads)
      .def("submit", &submit, nb::arg("runs"), nb::arg("bounds"), nb::arg("bases"), nb::kw_only(), nb::arg("demand"),
           "runs int64 [n, 4]: descriptor, file offset, bytes, offset behind the job's base; job j has runs\n"
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
