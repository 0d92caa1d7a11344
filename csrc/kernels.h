// What the binding and the per-ISA kernels share: plain structs of pointers, strides and sizes. No torch here.
//
// Sizes are those of the contract: H key heads, HV value heads, K and V head dims, T tokens of a row, P window rows,
// R ring slots. Strides count elements. A pointer is aligned to its element and to nothing more.
#pragma once

#include <cstddef>
#include <cstdint>

namespace replaystate {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

inline constexpr int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Bits of replaystate.errors.SlotStatus that kernels set.
enum Status : int32_t {
  STATE_SATURATED = 1,
  RING_SATURATED = 2,
  DEAD = 4,
  NOT_COMMITTED = 8,
  NO_STEP = 16,
  ACCEPTED_CLAMPED = 32,
  ROW_CUT = 64,
  BAD_CURSOR = 128,
};

// A tensor over (row, token, head, element): packed rows have row == 0, their first token is in StepRow.
struct Tokens {
  char* data;
  DType dtype;
  int64_t row, token, head;  // strides; elements of a head are dense (a and b have one)

  char* at(int64_t r, int64_t t, int64_t h) const { return data + (r * row + t * token + h * head) * size_of(dtype); }
};

// [HV] parameters of a layer, any float dtype.
struct Parameter {
  const char* data;
  DType dtype;
  int64_t stride;
};

// [pool, heads, ...] with dense slots.
struct Pool {
  char* data;
  DType dtype;
  int64_t slot, head;  // strides

  char* at(int64_t s, int64_t h) const { return data + (s * slot + h * head) * size_of(dtype); }
};

struct Sizes {
  int64_t H, HV, K, V, R;
};

struct StepRow {
  int64_t slot;
  int64_t row, first_token;  // where its tokens lie in Tokens
  int64_t length;            // T
  int64_t start, count;      // cursors: window origin and P
  bool fold;
  int32_t flags;  // out: Status bits, set atomically
};

struct StepArgs {
  Sizes sizes;
  Tokens q, k, v, a, b, out;
  Parameter A_log, dt_bias;
  Pool state, u_ring, k_ring, g_ring;
  StepRow* rows;
  int64_t num_rows;
  int64_t splits;  // units of one key head: 1, or HV/H when there are few heads and many threads
  float scale;
};

struct FoldRow {
  int64_t src, dst;  // slots of state, of out
  int64_t start, count;
  int32_t flags;
};

// out[dst] = state[src] after `count` window rows; state and out may be the same pool.
struct FoldArgs {
  Sizes sizes;
  Pool state, u_ring, k_ring, g_ring, out;
  FoldRow* rows;
  int64_t num_rows;
};

struct PrefillArgs {
  Sizes sizes;  // R unused
  Tokens q, k, v, a, b, out;
  Parameter A_log, dt_bias;
  Pool state;            // float32, read when has_initial, written always
  const int64_t* bounds;  // [num_rows + 1]
  int64_t num_rows, splits;
  bool has_initial;
  float scale;
};

// One entry per ISA. Each function does units begin .. end-1 (a unit is a row and a key head, or a part of it) and
// returns false only when scratch memory could not be had, before anything of the unit was written. The bits of a unit
// depend on its own row and head alone.
struct Kernels {
  const char* name;
  bool (*step)(const StepArgs&, int64_t begin, int64_t end);
  bool (*fold)(const FoldArgs&, int64_t begin, int64_t end);
  bool (*prefill)(const PrefillArgs&, int64_t begin, int64_t end);
};

// Scratch of the calling thread, 64-byte aligned, kept between calls; nullptr when out of memory.
float* thread_scratch(size_t floats);

// The kernels in use: the best this machine has. use_kernels(name) chooses another (for tests); false: not on this machine.
const Kernels& kernels();
bool use_kernels(const char* name);

}  // namespace replaystate
