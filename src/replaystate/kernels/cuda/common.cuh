// Shared by all kernels: dtypes, element conversions in inline PTX (no CUDA header is needed), and a row's set-up.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

enum { F32 = 0, F16 = 1, BF16 = 2 };
enum {
  STATE_SATURATED = 1, RING_SATURATED = 2, DEAD = 4, NOT_COMMITTED = 8, NO_STEP = 16, ACCEPTED_CLAMPED = 32,
  ROW_CUT = 64, BAD_CURSOR = 128, BAD_COUNT = 256, WINDOW_NOT_EMPTY = 512
};
#define FULL 0xffffffffu
#define F32_MAX 3.402823466e38f

// --- element conversions -------------------------------------------------------------------------------------------

__device__ __forceinline__ float half_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
__device__ __forceinline__ float bf16_to_float(u16 h) { return __uint_as_float((u32)h << 16); }
__device__ __forceinline__ u16 float_to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
__device__ __forceinline__ u16 float_to_bf16(float f) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }

template <int D> struct Elem;
template <> struct Elem<F32> {
  typedef float T;
  static __device__ __forceinline__ float up(float x) { return x; }
  static __device__ __forceinline__ float down(float x) { return x; }
  static constexpr float MAX = F32_MAX;
};
template <> struct Elem<F16> {
  typedef u16 T;
  static __device__ __forceinline__ float up(u16 x) { return half_to_float(x); }
  static __device__ __forceinline__ u16 down(float x) { return float_to_half(x); }
  static constexpr float MAX = 65504.f;
};
template <> struct Elem<BF16> {
  typedef u16 T;
  static __device__ __forceinline__ float up(u16 x) { return bf16_to_float(x); }
  static __device__ __forceinline__ u16 down(float x) { return float_to_bf16(x); }
  static constexpr float MAX = 3.3895313892515355e38f;
};

// One element of a tensor whose dtype is a runtime value.
__device__ __forceinline__ float ld(const void* p, i64 i, int dtype) {
  if (dtype == F32) return ((const float*)p)[i];
  u16 h = ((const u16*)p)[i];
  return dtype == F16 ? half_to_float(h) : bf16_to_float(h);
}
// The same in two halves, so that loads are in flight together and conversions wait for none but their own.
__device__ __forceinline__ u32 ld_raw(const void* p, i64 i, int dtype) { return dtype == F32 ? ((const u32*)p)[i] : ((const u16*)p)[i]; }
__device__ __forceinline__ float from_raw(u32 x, int dtype) {
  return dtype == F32 ? __uint_as_float(x) : dtype == F16 ? half_to_float((u16)x) : bf16_to_float((u16)x);
}
__device__ __forceinline__ void st(void* p, i64 i, int dtype, float x) {
  if (dtype == F32) ((float*)p)[i] = x;
  else ((u16*)p)[i] = dtype == F16 ? float_to_half(x) : float_to_bf16(x);
}
__device__ __forceinline__ float dtype_max(int dtype) {
  return dtype == F16 ? Elem<F16>::MAX : dtype == BF16 ? Elem<BF16>::MAX : F32_MAX;
}
__device__ __forceinline__ i64 wide(int x, i64 stride) { return (i64)x * (int)stride; }  // strides fit 31 bits
__device__ __forceinline__ i64 ld_index(const void* p, i64 i, bool wide) {
  return wide ? ((const i64*)p)[i] : (i64)((const int*)p)[i];
}
// Clamp to the finite range of a 16-bit dtype; NaN stays NaN. float32 is left alone.
__device__ __forceinline__ float saturate(float x, float limit, bool& hit) {
  if (limit == F32_MAX) return x;
  if (fabsf(x) > limit) { hit = true; return copysignf(limit, x); }
  return x;
}

// --- gates ---------------------------------------------------------------------------------------------------------

// g = -exp(A_log + log softplus(x)). The product of the two factors is taken where neither can over- or underflow.
__device__ __forceinline__ float log_decay(float x, float A_log) {
  if (x >= -15.f && fabsf(A_log) < 60.f && x < 1e30f) return -expf(A_log) * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
  float log_softplus = x < -15.f ? x : logf(fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
  return -expf(A_log + log_softplus);
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// The first thing a kernel does. Its launch may overlap the end of the kernel before it (programmatic dependent launch), so it
// waits here until that one is done and its writes are seen; then it lets the next one come as far as its own wait.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// PLAIN = 1 compiles a step for what decoding passes: ragged rows, int32 indices, cursors per slot, step records, float32
// layer parameters, gates in the inputs' dtype. PLAIN = 0 reads all of that at run time.
#ifndef PLAIN
#define PLAIN 0
#endif
#define FLAG(field, plain) (PLAIN ? (plain) : (int)(field))

// --- what a step is given: one struct by value, 8 bytes a field, in the order of launch.STEP_FIELDS -----------------

struct StepArgs {
  const void *q, *k, *v, *a, *b, *A_log, *dt_bias;
  void *state, *u_ring, *k_ring;
  float* g_ring;
  const int *ring_start, *num_committed;
  int *step_records, *status;
  void* out;
  const void *state_indices, *query_start_loc;
  i64 q_dtype, k_dtype, v_dtype, a_dtype, b_dtype, A_dtype, dt_dtype, u_dtype, kr_dtype, out_dtype, idx_wide, qsl_wide;
  i64 q_row, q_tok, q_head, q_elem, k_row, k_tok, k_head, k_elem, v_row, v_tok, v_head, v_elem;
  i64 a_row, a_tok, a_head, b_row, b_tok, b_head, out_row, out_tok, out_head, out_elem;
  i64 state_slot, u_slot, k_slot, g_slot, A_stride, dt_stride, rs_stride, nc_stride, status_stride, rec_slot, rec_layer;
  i64 idx_stride, qsl_stride;
  i64 B, N, H, HV, K, V, W, R, width, num_slots, null_slot, flush_min, layer, num_layers;
  i64 cursors_per_row, ragged, padded_out, zero_rows, state_vec, v_block, group, inverse_group, parts;
  double scale;
};

struct Row {
  int slot, begin, whole;  // its tokens: begin .. begin + whole - 1
  int length, base, P;     // tokens that run (at most `width`), ring origin, window length
  bool real, alive;        // names a slot; and may be stepped
};

// The low word of an index, -1 for one that does not fit 31 bits.
__device__ __forceinline__ int ld_slot(const void* p, int i, bool wide64) {
  if (!wide64) return ((const int*)p)[i];
  const i64 x = ((const i64*)p)[i];
  return x == (int)x ? (int)x : -1;
}
__device__ __forceinline__ int clamp(int x, int lo, int hi) { return min(max(x, lo), hi); }

// A row in two halves: its loads, and what follows from them.
struct RawRow { int slot, lo, hi; };

__device__ __forceinline__ RawRow load_row(const StepArgs& p, int row) {
  RawRow x = {ld_slot(p.state_indices, row * (int)p.idx_stride, FLAG(p.idx_wide, 0)), 0, 0};
  if (FLAG(p.ragged, 1)) {
    const int s = (int)p.qsl_stride;
    x.lo = ld_slot(p.query_start_loc, row * s, FLAG(p.qsl_wide, 0));
    x.hi = ld_slot(p.query_start_loc, row * s + s, FLAG(p.qsl_wide, 0));
  }
  return x;
}
__device__ __forceinline__ Row make_row(const StepArgs& p, const RawRow& x) {
  Row r;
  r.slot = x.slot;
  r.begin = 0;
  r.whole = (int)p.width;
  if (FLAG(p.ragged, 1)) {
    r.begin = clamp(x.lo, 0, (int)p.N);
    r.whole = clamp(x.hi, r.begin, (int)p.N) - r.begin;
  }
  r.length = min(r.whole, (int)p.width);
  r.real = r.slot >= 0 && r.slot < (int)p.num_slots && r.slot != (int)p.null_slot;
  r.alive = false;
  r.base = r.P = 0;
  return r;
}

// Plain atomics: the compiler's own gather a warp's lanes first, and wait for the result at once.
__device__ __forceinline__ int count_down(int* p) {
  int old;
  asm volatile("atom.global.add.s32 %0, [%1], -1;" : "=r"(old) : "l"(p) : "memory");
  return old;
}
__device__ __forceinline__ void set_bits(int* p, int bits) { asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p), "r"(bits) : "memory"); }

struct Cursors { int base, P, record, record2, flags; };

__device__ __forceinline__ Cursors load_cursors(const StepArgs& p, int row, const Row& r) {
  Cursors c = {0, 0, 0, 0, 0};
  if (r.real) {
    const int at = FLAG(p.cursors_per_row, 0) ? row : r.slot, lane = threadIdx.x & 31;
    c.base = p.ring_start[wide(at, p.rs_stride)];
    c.P = p.num_committed[wide(at, p.nc_stride)];
    if (PLAIN || p.step_records) {
      volatile int* records = p.step_records + wide(r.slot, p.rec_slot);
      if (lane < (int)p.num_layers) c.record = records[wide(lane, p.rec_layer)];
      if (lane + 32 < (int)p.num_layers) c.record2 = records[wide(lane + 32, p.rec_layer)];
      c.flags = ((volatile int*)p.status)[wide(r.slot, p.status_stride)];
    }
  }
  return c;
}

// Decide whether the row runs; each warp does so for itself and all find the same. Part 0 flags what is wrong.
__device__ __forceinline__ void settle_row(const StepArgs& p, Row& r, const Cursors& c, int part) {
  const int lane = threadIdx.x & 31;
  r.base = c.base;
  r.P = c.P;
  const bool bad = r.real && (r.base < 0 || r.base >= (int)p.R || r.P < 0 || r.P > (int)p.W);
  bool broken = false;
  if (r.real && (PLAIN || p.step_records)) {
    const int fresh = (int)p.width << 16 | r.length;
    broken = lane == (int)p.layer ? c.record > 0 : c.record != 0 && c.record != fresh;
    broken |= lane + 32 == (int)p.layer ? c.record2 > 0 : c.record2 != 0 && c.record2 != fresh;
    for (int l = lane + 64; l < (int)p.num_layers; l += 32) {
      int record = ((volatile int*)p.step_records)[wide(r.slot, p.rec_slot) + wide(l, p.rec_layer)];
      broken |= l == (int)p.layer ? record > 0 : record != 0 && record != fresh;
    }
    broken = __any_sync(FULL, broken);
    if (part == 0 && threadIdx.x == 0) {
      int hit = (broken ? NOT_COMMITTED | DEAD : 0) | (bad ? BAD_CURSOR | DEAD : 0) | (r.whole > r.length ? ROW_CUT : 0);
      if (hit) set_bits(&p.status[wide(r.slot, p.status_stride)], hit);
    }
  }
  r.alive = r.real && !bad && !broken && !(c.flags & DEAD);  // a DEAD set meanwhile comes with `broken` or `bad`
}
// `parts` blocks share the row. Once all its warps have read the record, each block counts it down: a negative record is a
// step in progress, not a pending one. The block that comes last writes the new record when it is done.
__device__ __forceinline__ int enter_row(const StepArgs& p, const Row& r) {
  if (threadIdx.x == 0 && (PLAIN || p.step_records)) return count_down(&p.step_records[wide(r.slot, p.rec_slot) + wide((int)p.layer, p.rec_layer)]);
  return 0;
}
__device__ __forceinline__ void finish_row(const StepArgs& p, const Row& r, int parts, int arrived) {
  if (threadIdx.x == 0 && (PLAIN || p.step_records) && r.alive && arrived == 1 - parts)
    p.step_records[wide(r.slot, p.rec_slot) + wide((int)p.layer, p.rec_layer)] = (int)(p.width << 16) | r.length;
}

// Tokens [0, head) and [tail, N) belong to no row.
__device__ __forceinline__ void row_range(const StepArgs& p, int& head, int& tail) {
  head = 0;
  tail = (int)p.N;
  if (FLAG(p.ragged, 1) && !FLAG(p.padded_out, 0)) {
    head = clamp(ld_slot(p.query_start_loc, 0, FLAG(p.qsl_wide, 0)), 0, (int)p.N);
    tail = clamp(ld_slot(p.query_start_loc, (int)p.B * (int)p.qsl_stride, FLAG(p.qsl_wide, 0)), head, (int)p.N);
  }
}
// Zero the outputs of values [v0, v1) of `heads` heads from hv on that no row fills: this row's, when it does not run;
// lanes past its length; tokens of no row, dealt out to the rows. Rarely anything to do.
__device__ __noinline__ void zero_rest(const StepArgs& p, const Row& r, int row, int head, int tail, int hv, int heads, int v0, int v1) {
  const int one = v1 - v0, span = heads * one;
  const int first = r.alive ? r.length : 0, last = p.ragged && !p.padded_out ? r.whole : (int)p.width;
  const i64 base = (p.padded_out ? wide(row, p.out_row) : wide(r.begin, p.out_tok)) + wide(hv, p.out_head);
  for (int i = threadIdx.x; i < (last - first) * span; i += blockDim.x)
    st(p.out, base + wide(first + i / span, p.out_tok) + wide(i % span / one, p.out_head) + wide(v0 + i % one, p.out_elem), p.out_dtype, 0.f);
  if (p.ragged && !p.padded_out)
    for (int i = row; i < head + (int)p.N - tail; i += (int)p.B) {
      const int token = i < head ? i : tail + (i - head);
      for (int v = threadIdx.x; v < span; v += blockDim.x)
        st(p.out, wide(token, p.out_tok) + wide(hv + v / one, p.out_head) + wide(v0 + v % one, p.out_elem), p.out_dtype, 0.f);
    }
}
__device__ __forceinline__ void zero_outputs(const StepArgs& p, const Row& r, int row, int head, int tail, int hv, int heads, int v0, int v1) {
  if (!p.zero_rows) return;
  if (!r.alive || r.length < (p.padded_out ? (int)p.width : r.whole) || head > 0 || tail < (int)p.N) zero_rest(p, r, row, head, tail, hv, heads, v0, v1);
}
