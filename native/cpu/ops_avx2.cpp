// The float operations compiled for avx2; the flags of this file are set in CMakeLists.txt.
// Must not know more than that.
#include "cpu/ops_impl.h"

namespace picaflor {

const OpsTable* avx2_ops() { return &kOps; }

}  // namespace picaflor
