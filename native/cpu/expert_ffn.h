// The routed experts of one layer call: gate, up, SiLU, down for every (row, choice), summed in routing order.
// Must not know who holds the experts or Python. One object serves all layers of a model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/program_memory.h"

namespace picaflor {

// Where one matrix lies inside an expert's slot; offsets in bytes.
struct SlotMatrix {
  FormatId format = FormatId::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int32_t group = 0;
  int64_t codes = 0;
  int64_t scales = 0;

  bool operator==(const SlotMatrix&) const = default;
};

struct SlotLayout {
  SlotMatrix gate;
  SlotMatrix up;
  SlotMatrix down;

  bool operator==(const SlotLayout&) const = default;
};

struct ExpertSizes {
  int32_t planes = 2;
  int64_t hidden = 0;
  int64_t inner_max = 0;
  int64_t max_rows = 0;
  int64_t top_k = 0;
};

class ExpertFfn {
 public:
  ExpertFfn(std::shared_ptr<Pool> pool, const KernelTable* kernels, const ExpertSizes& sizes);

  // The layouts of a layer's experts, by id. Returns the layer's number; throws std::invalid_argument.
  int32_t add_layer(const std::vector<SlotLayout>& experts);

  // Rows of x [rows][hidden], `x_stride` floats apart, and their choices ids [rows][top_k]; -1 chooses none. Returns
  // the distinct ids in order of first use. x must stay until the last run of this call. Throws std::invalid_argument.
  const std::vector<int32_t>& begin(int32_t layer, const float* x, int64_t x_stride, const int32_t* ids, int64_t rows);

  // Computes the given experts, held at `addresses`, for all rows that chose them.
  void run(const int32_t* ids, const uint64_t* addresses, int64_t count);

  // out[row] = fma(weights[row][k], expert's row, out[row]), k ascending from 0. All experts must have run.
  void finish(const float* weights, float* out, int64_t out_stride);

  // Instead of `finish`: out [rows][top_k][hidden] gets the rows of chosen pairs, others are left alone. All experts
  // must have run. Added up by fma in routing order they give what `finish` gives.
  void pairs(float* out);

  // From now on by these kernels; prepared rows and outputs are the same bits for every table.
  void use(const KernelTable* kernels) { kernels_ = kernels; }

  // Bytes that the scratch can come to with the layers known so far.
  int64_t workspace_bytes() const;

  // What a row more or less changes in workspace_bytes, from kFewPairs rows on.
  int64_t row_bytes() const;

  // From now on calls of at most so many rows; the memory of the others goes back to the system. Never more rows.
  void limit_rows(int64_t rows);

 private:
  struct Layer {
    std::vector<SlotLayout> layouts;  // distinct ones
    std::vector<int32_t> layout_of;   // by expert
  };
  // A chosen expert: its pairs are [first, first + pairs) of pair_row_, and of the outputs.
  struct Chosen {
    int32_t id = 0;
    int64_t first = 0;
    int64_t pairs = 0;
    bool done = false;
  };
  struct PreparedRows {
    XSpec spec;
    std::unique_ptr<Mapping> memory;
    bool valid = false;
  };
  // One expert in one run: its three matrices, its pairs, and where its pairs begin in the run's scratch.
  struct Work {
    int32_t id = 0;
    Weight gate, up, down;
    XSpec gate_x, up_x, down_x;
    int64_t first = 0;
    int64_t pairs = 0;
    int64_t slot = 0;
  };
  struct Item {
    const Work* work;
    int64_t begin;
    int64_t end;
  };
  // What runs between two barriers: the experts of some pairs, cut into row ranges.
  struct Part {
    std::vector<Work> works;
    std::vector<Item> inner;
    std::vector<Item> outer;
    int64_t pairs = 0;
  };

  // The phases of a part: whoever comes takes the next item; the next phase waits for all items of the one before.
  struct Stages {
    Stage inner;
    Stage pairs;
    Stage outer;
  };

  void check_layout(const SlotLayout& layout) const;
  void check_matrix(const SlotMatrix& matrix, const char* name, int64_t rows, int64_t cols) const;
  void sort_pairs(const int32_t* ids);
  void check_done() const;
  PreparedRows& prepared(const XSpec& spec);
  void prepare_rows(const std::vector<Part>& parts);
  std::vector<Part> plan(const int32_t* ids, const uint64_t* addresses, int64_t count);
  void cut(Part& part) const;
  const std::byte* gathered(const Work& work, const XSpec& spec, int64_t pair, int64_t pairs, int thread);
  void run_part(const Part& part, Stages& stages, int thread);
  void run_alone_or_shared(int64_t items, bool alone, const std::function<void(int64_t)>& job);
  void inner_item(const Item& item, const Ahead& ahead, int thread);
  void prepare_pair(const Part& part, int64_t slot);
  void outer_item(const Item& item, const Ahead& ahead);

  std::byte* inner_digits(int64_t slot) const { return inner_digits_->data() + slot * down_stride_; }

  std::shared_ptr<Pool> pool_;
  const KernelTable* kernels_;
  ExpertSizes sizes_;
  int64_t part_pairs_;  // pairs that one part holds at most
  std::vector<Layer> layers_;
  std::vector<PreparedRows> prepared_;
  int64_t down_stride_ = 0;  // bytes of the largest prepared inner row
  int64_t x_bytes_ = 0;      // bytes of the largest prepared row

  Mapping inner_;                          // [part_pairs_][inner_max]: gate, then silu(gate) * up
  Mapping up_;                             // [part_pairs_][inner_max]
  Mapping outputs_;                        // [max_rows * top_k][hidden], pairs grouped by expert
  std::unique_ptr<Mapping> inner_digits_;  // [part_pairs_][down_stride_]
  std::unique_ptr<Mapping> gather_;        // [threads][rows gathered at a time][x_bytes_]

  const Layer* layer_ = nullptr;  // of the call that was begun
  const float* x_ = nullptr;
  int64_t x_stride_ = 0;
  int64_t rows_ = 0;
  std::vector<int32_t> distinct_;
  std::vector<Chosen> chosen_;
  std::vector<int32_t> chosen_of_;   // by expert id: index in chosen_, or -1
  std::vector<int32_t> pair_row_;    // by sorted pair
  std::vector<int32_t> pair_place_;  // by row * top_k + k: sorted pair, -1 for none
};

}  // namespace picaflor
