// What is the same for every instruction set: sizes, checks, how activations are prepared, which tables this machine
// runs. Must not know arithmetic.
#include "cpu/kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "cpu/kernels_layout.h"

namespace picaflor {

XSpec x_spec(const Weight& weight, int32_t planes) {
  const auto index = static_cast<int32_t>(weight.format);
  const int32_t group = kActivationGroup[index] < 0 ? weight.group : kActivationGroup[index];
  if (group == 0) {
    return {0, 0, false, XLayout::natural, weight.cols};
  }
  return {planes, group, kActivationRotated[index], layout_of(weight.format), weight.cols};
}

void check_weight(const Weight& w) {
  const auto format = static_cast<int32_t>(w.format);
  if (format < 0 || format >= kFormatCount) {
    throw std::invalid_argument("weight format number " + std::to_string(format) + " is not one of 0 to " +
                                std::to_string(kFormatCount - 1));
  }
  const std::string name = std::string("weight of format ") + kFormatNames[format];
  constexpr int64_t kLargest = int64_t{1} << 31;
  if (w.rows <= 0 || w.cols <= 0 || w.rows >= kLargest || w.cols >= kLargest) {
    throw std::invalid_argument(name + " has shape [" + std::to_string(w.rows) + ", " + std::to_string(w.cols) +
                                "]; both must be positive and below 2^31");
  }
  const bool legal =
      std::find(std::begin(kInt4GroupSizes), std::end(kInt4GroupSizes), w.group) != std::end(kInt4GroupSizes);
  if (w.format == FormatId::int4_grouped && !legal) {
    throw std::invalid_argument(name + " has group size " + std::to_string(w.group) +
                                "; legal are 16, 32, 48, 64, 96, 128, 192, 256");
  }
  if (w.codes == nullptr || (scale_row_bytes(w) > 0 && w.scales == nullptr)) {
    throw std::invalid_argument(name + " lacks a plane");
  }
}

int64_t plane_bytes(const Weight& w, int plane) {
  if (plane == 0) {
    return w.rows * row_bytes(w);
  }
  const int64_t rows = w.format == FormatId::fp8_b128 ? groups_of(w.rows, kFp8Block) : w.rows;
  return rows * scale_row_bytes(w);
}

namespace {

bool cpu_has(const KernelTable* table) {
  if (table == nullptr || table == scalar_kernels()) {
    return table != nullptr;
  }
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
#if defined(PICAFLOR_VNNI_AS_AVX512)
  const bool avxvnni = avx512;
#else
  const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
#endif
  return table == avx2_kernels()      ? avx2
         : table == avxvnni_kernels() ? avxvnni
         : table == avx512_kernels() ? avx512
                                     : avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
#elif defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;  // every other 64-bit ARM that this is built for has dot products
#endif
}

}  // namespace

std::vector<const KernelTable*> kernel_tables() {
  std::vector<const KernelTable*> found;
  for (const KernelTable* table :
       {scalar_kernels(), neon_kernels(), avx2_kernels(), avxvnni_kernels(), avx512_kernels(), vbmi_kernels()}) {
    if (cpu_has(table)) {
      found.push_back(table);
    }
  }
  return found;
}

std::vector<std::string> kernel_isas() {
  std::vector<std::string> found;
  for (const KernelTable* table : kernel_tables()) {
    found.emplace_back(table->isa);
  }
  return found;
}

const KernelTable* kernels_for(const std::string& isa) {
  const std::vector<const KernelTable*> tables = kernel_tables();
  for (auto table = tables.rbegin(); table != tables.rend(); ++table) {
    const bool plain = *table == avx512_kernels() && isa == kAvx512;  // the best of the two that there is
    if (isa == "auto" || isa == (*table)->isa || plain) {
      return *table;
    }
  }
  std::string names;
  for (const std::string& name : kernel_isas()) {
    names += names.empty() ? name : ", " + name;
  }
  throw std::invalid_argument("instruction set " + isa + " is not available; this build on this machine has: " + names);
}

#if !defined(__aarch64__)
const KernelTable* neon_kernels() { return nullptr; }
#endif
#if !defined(__x86_64__)
const KernelTable* avx2_kernels() { return nullptr; }
const KernelTable* avxvnni_kernels() { return nullptr; }
const KernelTable* avx512_kernels() { return nullptr; }
const KernelTable* vbmi_kernels() { return nullptr; }
#endif

int64_t x_stride(const XSpec& spec) { return XView(spec).stride; }

}  // namespace picaflor
