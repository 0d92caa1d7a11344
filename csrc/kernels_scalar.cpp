#include "simd_scalar.h"
// after the SIMD types
#include "kernels_impl.h"

namespace replaystate {

const Kernels& kernels_scalar() {
  static constexpr Kernels table{"scalar", step, fold, prefill};
  return table;
}

}  // namespace replaystate
