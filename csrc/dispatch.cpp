// Which ISA's kernels run, and the scratch of each thread.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace replaystate {

const Kernels& kernels_scalar();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#elif defined(__aarch64__)
const Kernels& kernels_neon();
#endif

namespace {

// The kernels of this name when this machine can run them, else nullptr. Best first.
const Kernels* find(const char* name) {
  const auto wanted = [name](const char* isa) { return name == nullptr || std::strcmp(name, isa) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && wanted("avx512")) return &kernels_avx512();
  if (avx2 && wanted("avx2")) return &kernels_avx2();
#elif defined(__aarch64__)
  if (wanted("neon")) return &kernels_neon();
#endif
  return wanted("scalar") ? &kernels_scalar() : nullptr;
}

std::atomic<const Kernels*> current{nullptr};

struct Scratch {
  float* data = nullptr;
  size_t floats = 0;
  ~Scratch() { std::free(data); }
};

thread_local Scratch scratch;

}  // namespace

const Kernels& kernels() {
  const Kernels* table = current.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = find(nullptr);
    current.store(table, std::memory_order_release);
  }
  return *table;
}

bool use_kernels(const char* name) {
  const Kernels* table = find(name);
  if (table != nullptr) current.store(table, std::memory_order_release);
  return table != nullptr;
}

float* thread_scratch(size_t floats) {
  if (floats > scratch.floats) {
    std::free(scratch.data);
    const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
    scratch.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    scratch.floats = scratch.data ? bytes / sizeof(float) : 0;
  }
  return scratch.data;
}

}  // namespace replaystate
