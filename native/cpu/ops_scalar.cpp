// The float operations compiled for scalar; the flags of this file are set in CMakeLists.txt.
// Must not know more than that.
#include "cpu/ops_impl.h"

namespace picaflor {

const OpsTable* scalar_ops() { return &kOps; }

}  // namespace picaflor
