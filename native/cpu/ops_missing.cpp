// Tables of instruction sets that this machine type does not have.
// Must not know more than that.
#include "cpu/ops.h"

#if !defined(__x86_64__)
namespace picaflor {

const OpsTable* avx2_ops() { return nullptr; }
const OpsTable* avx512_ops() { return nullptr; }

}  // namespace picaflor
#endif
