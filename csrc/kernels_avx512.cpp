#include "simd_avx512.h"
// after the SIMD types
#include "kernels_impl.h"

namespace replaystate {

const Kernels& kernels_avx512() {
  static constexpr Kernels table{"avx512", step, fold, prefill};
  return table;
}

}  // namespace replaystate
