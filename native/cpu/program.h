// Recorded programs: steps over the rows of a batch, and the memory that they share.
// Must not know families, files or Python.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/ops.h"
#include "cpu/pool.h"
#include "cpu/program_memory.h"

namespace picaflor {

// What thread 0 spent its time on; the order of backends.api.Program.seconds without `experts`.
enum class TimeClass : int32_t { attention = 0, matmul = 1, router = 2, head = 3, other = 4 };
constexpr int kTimeClasses = 5;

// Columns start .. start+width of a buffer.
struct View {
  int32_t storage = 0;
  int64_t start = 0;
  int64_t width = 0;
};

// A view with its address: row r begins at data + r * stride.
template <typename T>
struct RowsOf {
  T* data = nullptr;
  int64_t stride = 0;
  int64_t width = 0;

  T* at(int64_t row) const { return data + row * stride; }
};

// The rows to compute. Copied in by Arena::set_batch, which checks every index.
struct Batch {
  std::vector<int32_t> tokens, sequences, positions, pages, outputs;
  int64_t pages_per_sequence = 0;

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
};

// cos and sin of position * theta^(-2j/dims), [positions][dims/2]; filled as far as batches have needed.
class RopeTable {
 public:
  RopeTable(int64_t dims, double theta, int64_t positions);
  void fill(int64_t positions);
  const float* cos(int64_t position) const { return cos_.as<float>() + position * half_; }
  const float* sin(int64_t position) const { return sin_.as<float>() + position * half_; }

 private:
  int64_t half_;
  int64_t filled_ = 0;
  std::vector<long double> frequencies_;
  Mapping cos_, sin_;
};

struct ArenaSpec {
  int64_t max_rows = 0;
  int64_t max_outputs = 0;
  int64_t page_tokens = 0;
  int64_t pages = 0;
};

// Buffers, KV planes, prepared activations and scratch of all programs of one model.
class Arena {
 public:
  Arena(std::shared_ptr<Pool> pool, const KernelTable* kernels, const OpsTable* ops, const ArenaSpec& spec);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int32_t add_storage(int64_t width);
  int32_t add_plane(int64_t width);
  const RopeTable* rope(int64_t dims, double theta);
  std::byte* prepared(const View& view, const XSpec& spec, bool outputs);  // rows x_stride(spec) apart
  void reserve_scratch(int64_t floats);                                    // per thread
  void reserve_scores();                                                   // kScoreRows x capacity

  RowsOf<float> f32(const View& view) const;
  RowsOf<int32_t> i32(const View& view) const;
  int64_t plane_width(int32_t plane) const { return planes_[static_cast<size_t>(plane)].width; }
  Cached plane(int32_t plane, int64_t width) const;
  float* plane_data(int32_t plane) const { return planes_[static_cast<size_t>(plane)].memory.as<float>(); }
  float* scratch(int thread) const;
  // One score per position: lines 0 .. kScoreRows-1 are shared, then two for each thread.
  float* scores(int64_t line) const { return scores_->as<float>() + line * capacity(); }
  int64_t capacity() const { return spec.pages * spec.page_tokens; }
  int64_t touched_bytes() const;  // of the KV planes
  // What buffers, prepared rows and scratch can come to; of buffers that only output rows use, max_outputs rows.
  int64_t workspace_bytes() const;
  void mark_full(int64_t space);  // batch rows use this buffer
  // What a batch row more or less changes in workspace_bytes.
  int64_t row_bytes() const;
  // From now on batches of at most so many rows; the memory of the others goes back to the system. Never more rows.
  void limit_rows(int64_t rows);

  // Throws std::invalid_argument naming what does not fit.
  void set_batch(const int32_t* tokens, const int32_t* sequences, const int32_t* positions, int64_t rows,
                 const int32_t* pages, int64_t sequence_count, int64_t pages_per_sequence, const int32_t* outputs,
                 int64_t output_count);
  PageTable table(int64_t row) const;

  ArenaSpec spec;
  const std::shared_ptr<Pool> pool;
  const int threads;
  const KernelTable* const kernels;
  const OpsTable* const ops;
  bool plain = false;  // this run uses the scalar tables: the same bits, slower
  int32_t page_shift = 0;
  Batch batch;

 private:
  struct Buffer {
    int64_t width;
    Mapping memory;
    bool full = false;
  };
  struct Prepared {
    int64_t stride;
    Mapping memory;
  };
  using PreparedKey = std::tuple<int32_t, int64_t, int64_t, int32_t, int32_t, int32_t, bool, bool>;

  void check_batch(const Batch& next, int64_t sequence_count) const;

  std::vector<Buffer> storages_;
  std::vector<Buffer> planes_;
  std::map<PreparedKey, Prepared> prepared_;
  std::map<std::pair<int64_t, double>, RopeTable> ropes_;
  int64_t scratch_floats_ = 0;
  std::unique_ptr<Mapping> scratch_;
  std::unique_ptr<Mapping> scores_;
  std::vector<uint8_t> touched_;
};

constexpr int64_t kScoreRows = 16;  // rows whose indexer scores several threads make together

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// One operation. `begin` runs on one thread before all threads work on its items.
class Step {
 public:
  virtual ~Step() = default;
  virtual void begin(Arena&) {}

  TimeClass time = TimeClass::other;
  bool barrier = false;  // all work before must be finished first
  bool outputs = false;  // acts on the packed output rows
  bool plain = false;    // always by the scalar tables

  const KernelTable& kernels(const Arena& arena) const {
    return plain || arena.plain ? *scalar_kernels() : *arena.kernels;
  }
  const OpsTable& ops(const Arena& arena) const { return plain || arena.plain ? *scalar_ops() : *arena.ops; }

  int64_t rows(const Arena& arena) const {
    return outputs ? static_cast<int64_t>(arena.batch.outputs.size()) : arena.batch.rows();
  }
  // The batch row of a row that this step sees.
  int64_t batch_row(const Arena& arena, int64_t row) const {
    return outputs ? arena.batch.outputs[static_cast<size_t>(row)] : row;
  }
};

// Row r of the output depends on row r of the inputs only: several of these in a row share their items.
class RowStep : public Step {
 public:
  virtual void run_rows(Arena& arena, Range range, int thread) = 0;
};

// Work cut into independent items of its own.
class ItemStep : public Step {
 public:
  virtual int64_t items(const Arena& arena) const = 0;  // after begin
  virtual void run_item(Arena& arena, int64_t item, int thread) = 0;
};

// Steps between two barriers. They touch nothing of each other but row by row, so their items go in any order.
class Phase {
 public:
  void add(Step* step);
  void begin(Arena& arena);
  // `charge(time class)` is called before each piece of work.
  template <typename Charge>
  void run(Arena& arena, int thread, Charge charge);

 private:
  // Row steps of one row domain in order, or one step with items.
  struct Unit {
    std::vector<RowStep*> row_steps;
    ItemStep* step = nullptr;
    bool outputs = false;
    int64_t block = 1;  // rows per item
    int64_t rows = 0;
    int64_t first = 0;  // item number in the phase
  };

  std::vector<Unit> units_;
  Stage stage_;
};

// Steps between two calls of experts; each segment is one Pool::run.
class Program {
 public:
  Program(std::shared_ptr<Arena> arena, std::vector<std::vector<std::unique_ptr<Step>>> segments);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  int64_t segments() const { return static_cast<int64_t>(segments_.size()); }
  int64_t barriers() const;  // recorded ones, for tests and reports
  void run_segment(int64_t segment, bool plain = false);
  std::array<double, kTimeClasses> take_seconds();
  const std::shared_ptr<Arena>& arena() const { return arena_; }

 private:
  std::shared_ptr<Arena> arena_;
  std::vector<std::vector<std::unique_ptr<Step>>> segments_;
  std::vector<std::deque<Phase>> phases_;  // of each segment
  std::array<double, kTimeClasses> seconds_{};
};

}  // namespace picaflor
