#include "simd_neon.h"
// after the SIMD types
#include "kernels_impl.h"

namespace replaystate {

const Kernels& kernels_neon() {
  static constexpr Kernels table{"neon", step, fold, prefill};
  return table;
}

}  // namespace replaystate
