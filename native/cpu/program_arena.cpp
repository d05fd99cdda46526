// Shared memory of programs: buffers, planes, tables, and the checks of a batch.
// Must not know families, files or Python.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "cpu/program.h"

namespace picaflor {
namespace {

constexpr int64_t kAlignFloats = 16;

int64_t align_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

}  // namespace

RopeTable::RopeTable(int64_t dims, double theta, int64_t positions)
    : half_(dims / 2), cos_(positions * (dims / 2) * 4), sin_(positions * (dims / 2) * 4) {
  for (int64_t j = 0; j < half_; ++j) {
    frequencies_.push_back(std::pow(static_cast<long double>(theta),
                                    -2.0L * static_cast<long double>(j) / static_cast<long double>(dims)));
  }
}

// Long double, so that the rounded float32 does not depend on which libm variant the machine picks.
void RopeTable::fill(int64_t positions) {
  for (; filled_ < positions; ++filled_) {
    for (int64_t j = 0; j < half_; ++j) {
      const long double angle = static_cast<long double>(filled_) * frequencies_[static_cast<size_t>(j)];
      cos_.as<float>()[filled_ * half_ + j] = static_cast<float>(static_cast<double>(std::cos(angle)));
      sin_.as<float>()[filled_ * half_ + j] = static_cast<float>(static_cast<double>(std::sin(angle)));
    }
  }
}

Arena::Arena(std::shared_ptr<Pool> workers, const KernelTable* kernel_table, const OpsTable* ops_table,
             const ArenaSpec& sizes)
    : spec(sizes), pool(std::move(workers)), threads(pool->threads()), kernels(kernel_table), ops(ops_table) {
  if (spec.page_tokens < 1 || kBlockKeys % spec.page_tokens != 0) {
    refuse("page_tokens is " + std::to_string(spec.page_tokens) + ", a power of two up to 256 is needed");
  }
  while ((int64_t{1} << page_shift) < spec.page_tokens) {
    ++page_shift;
  }
  touched_.assign(static_cast<size_t>(spec.pages), 0);
}

int32_t Arena::add_storage(int64_t width) {
  storages_.push_back({width, Mapping(std::max(spec.max_rows, spec.max_outputs) * width * 4)});
  return static_cast<int32_t>(storages_.size() - 1);
}

int32_t Arena::add_plane(int64_t width) {
  planes_.push_back({width, Mapping(capacity() * width * 4), true});
  return static_cast<int32_t>(planes_.size() - 1);
}

const RopeTable* Arena::rope(int64_t dims, double theta) {
  return &ropes_.try_emplace({dims, theta}, dims, theta, capacity()).first->second;
}

std::byte* Arena::prepared(const View& view, const XSpec& x, bool outputs) {
  const PreparedKey key{view.storage, view.start, view.width, x.planes, x.group, static_cast<int32_t>(x.layout),
                        x.rotated,    outputs};
  const int64_t stride = x_stride(x);
  const auto found = prepared_.find(key);
  return (found != prepared_.end() ? found
                                   : prepared_.emplace(key, Prepared{stride, Mapping(spec.max_rows * stride)}).first)
      ->second.memory.data();
}

void Arena::reserve_scratch(int64_t floats) {
  const int64_t needed = align_up(floats, kAlignFloats * 4);
  if (needed > scratch_floats_) {
    scratch_floats_ = needed;
    scratch_ = std::make_unique<Mapping>(scratch_floats_ * 4 * threads);
  }
}

void Arena::reserve_scores() {
  if (!scores_) {
    scores_ = std::make_unique<Mapping>((kScoreRows + 2 * threads) * capacity() * 4);
  }
}

float* Arena::scratch(int thread) const { return scratch_->as<float>() + thread * scratch_floats_; }

RowsOf<float> Arena::f32(const View& view) const {
  const Buffer& buffer = storages_[static_cast<size_t>(view.storage)];
  return {buffer.memory.as<float>() + view.start, buffer.width, view.width};
}

RowsOf<int32_t> Arena::i32(const View& view) const {
  const Buffer& buffer = storages_[static_cast<size_t>(view.storage)];
  return {buffer.memory.as<int32_t>() + view.start, buffer.width, view.width};
}

Cached Arena::plane(int32_t plane, int64_t width) const {
  const Buffer& buffer = planes_[static_cast<size_t>(plane)];
  return {buffer.memory.as<float>(), buffer.width, width};
}

int64_t Arena::touched_bytes() const {
  int64_t pages = 0;
  for (const uint8_t touched : touched_) {
    pages += touched;
  }
  int64_t width = 0;
  for (const Buffer& plane : planes_) {
    width += plane.width;
  }
  return pages * spec.page_tokens * width * 4;
}

void Arena::mark_full(int64_t space) {
  if (space < static_cast<int64_t>(storages_.size())) {
    storages_[static_cast<size_t>(space)].full = true;
  }
}

int64_t Arena::workspace_bytes() const {
  constexpr int64_t kPage = 4096;
  int64_t total = 0;
  for (const Buffer& buffer : storages_) {
    const int64_t rows = buffer.full ? spec.max_rows : spec.max_outputs;
    total += align_up(rows * buffer.width * 4, kPage);
  }
  for (const auto& [key, prepared] : prepared_) {
    const bool outputs = std::get<7>(key);
    total += align_up((outputs ? spec.max_outputs : spec.max_rows) * prepared.stride, kPage);
  }
  for (const auto& entry : ropes_) {
    total += 2 * align_up(capacity() * entry.first.first / 2 * 4, kPage);
  }
  total += scratch_ ? align_up(scratch_->nbytes(), kPage) : 0;
  return total + (scores_ ? align_up(scores_->nbytes(), kPage) : 0);
}

int64_t Arena::row_bytes() const {
  int64_t total = 0;
  for (const Buffer& buffer : storages_) {
    total += buffer.full ? buffer.width * 4 : 0;
  }
  for (const auto& [key, prepared] : prepared_) {
    total += std::get<7>(key) ? 0 : prepared.stride;
  }
  return total;
}

void Arena::limit_rows(int64_t rows) {
  if (rows < 1 || rows > spec.max_rows) {
    refuse("a limit of " + std::to_string(rows) + " rows, from 1 to " + std::to_string(spec.max_rows) + " are there");
  }
  spec.max_rows = rows;
  const int64_t kept = std::max(spec.max_rows, spec.max_outputs);
  for (Buffer& buffer : storages_) {
    buffer.memory.shrink(kept * buffer.width * 4);
  }
  for (auto& [key, prepared] : prepared_) {
    prepared.memory.shrink(kept * prepared.stride);
  }
}

PageTable Arena::table(int64_t row) const {
  const int64_t sequence = batch.sequences[static_cast<size_t>(row)];
  return {batch.pages.data() + sequence * batch.pages_per_sequence, page_shift};
}

void Arena::set_batch(const int32_t* tokens, const int32_t* sequences, const int32_t* positions, int64_t rows,
                      const int32_t* pages, int64_t sequence_count, int64_t pages_per_sequence, const int32_t* outputs,
                      int64_t output_count) {
  Batch next;
  next.tokens.assign(tokens, tokens + rows);
  next.sequences.assign(sequences, sequences + rows);
  next.positions.assign(positions, positions + rows);
  next.pages.assign(pages, pages + sequence_count * pages_per_sequence);
  next.outputs.assign(outputs, outputs + output_count);
  next.pages_per_sequence = pages_per_sequence;
  check_batch(next, sequence_count);
  batch = std::move(next);
  int64_t longest = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = positions[row];
    longest = std::max(longest, position + 1);
    touched_[static_cast<size_t>(table(row).pages[position >> page_shift])] = 1;
  }
  for (auto& entry : ropes_) {
    entry.second.fill(longest);
  }
}

void Arena::check_batch(const Batch& next, int64_t sequence_count) const {
  if (next.rows() > spec.max_rows) {
    refuse("a batch of " + std::to_string(next.rows()) + " rows, at most " + std::to_string(spec.max_rows) + " fit");
  }
  if (static_cast<int64_t>(next.outputs.size()) > spec.max_outputs) {
    refuse("a batch with " + std::to_string(next.outputs.size()) + " outputs, at most " +
           std::to_string(spec.max_outputs) + " fit");
  }
  for (const int32_t row : next.outputs) {
    if (row < 0 || row >= next.rows()) {
      refuse("output row " + std::to_string(row) + " of a batch of " + std::to_string(next.rows()) + " rows");
    }
  }
  std::vector<int64_t> checked(static_cast<size_t>(sequence_count), 0);  // pages known to be good, per sequence
  for (int64_t row = 0; row < next.rows(); ++row) {
    const int64_t sequence = next.sequences[static_cast<size_t>(row)];
    const int64_t position = next.positions[static_cast<size_t>(row)];
    if (sequence < 0 || sequence >= sequence_count) {
      refuse("row " + std::to_string(row) + " is of sequence " + std::to_string(sequence) + " of " +
             std::to_string(sequence_count));
    }
    const int64_t limit = std::min(next.pages_per_sequence * spec.page_tokens, capacity());
    if (position < 0 || position >= limit) {
      refuse("row " + std::to_string(row) + " is at position " + std::to_string(position) + ", the page table has " +
             std::to_string(limit) + " positions");
    }
    int64_t& known = checked[static_cast<size_t>(sequence)];
    for (; known <= position >> page_shift; ++known) {
      const int32_t page = next.pages[static_cast<size_t>(sequence * next.pages_per_sequence + known)];
      if (page < 0 || page >= spec.pages) {
        refuse("page " + std::to_string(page) + " of sequence " + std::to_string(sequence) + ", there are " +
               std::to_string(spec.pages) + " pages");
      }
    }
  }
}

}  // namespace picaflor
