#include "simd_avx2.h"
// after the SIMD types
#include "kernels_impl.h"

namespace replaystate {

const Kernels& kernels_avx2() {
  static constexpr Kernels table{"avx2", step, fold, prefill};
  return table;
}

}  // namespace replaystate
