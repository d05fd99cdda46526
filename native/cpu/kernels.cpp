// How activations are prepared for each format: one row of a table, the same for every instruction set.
// Must not know arithmetic.
#include "cpu/kernels.h"

#include "cpu/kernels_layout.h"

namespace picaflor {

XSpec x_spec(const Weight& weight, int32_t planes) {
  const auto index = static_cast<int32_t>(weight.format);
  const int32_t group = kActivationGroup[index] < 0 ? weight.group : kActivationGroup[index];
  if (group == 0) {
    return {0, 0, false, XLayout::natural, weight.cols};
  }
  const bool nibbles = weight.format == FormatId::int4_row || weight.format == FormatId::int4_grouped ||
                       weight.format == FormatId::mxfp4;
  return {planes, group, kActivationRotated[index], nibbles ? XLayout::nibbles : XLayout::natural, weight.cols};
}

int64_t x_stride(const XSpec& spec) { return XView(spec).stride; }

}  // namespace picaflor
