// S_C = e^{G_C} S_0 + sum_j e^{G_C - G_j} u_j k_j^T for the rows of a list, all layers in one launch.
//
// Modes: MATERIALIZE (into slot dst, cursors of dst become 0), FLUSH (in place, ring_start += P, P = 0), READ (into
// `out`, float32), PREFIX (kernel-level: cursors per row, an optional list of active rows). Every block reads the whole
// list and keeps the active rows in shared memory; blocks then share the items (layer, row, head, block of values). The
// cursors are written by the block that finishes last: each block counts down the first active row's step record, which
// is 0 before and after.
//
// Compile-time: STATE_D, NKB (K rounded up to 128, over 128).

#define WARPS 8
#define RB 8
#define KP (NKB * 128)
#define MAX_LAYERS 48
#define SATURATED_NOW (1 << 30)
typedef Elem<STATE_D> S_;
enum { MATERIALIZE, FLUSH, READ, PREFIX };

struct Layer { void *state, *u, *k; float* g; i64 state_slot, u_slot, k_slot, g_slot; };
struct FoldArgs {
  const void *src, *dst, *start, *count, *active, *num_active;
  int *ring_start, *num_committed, *step_records, *status;
  float* out;
  i64 src_wide, dst_wide, start_wide, count_wide, active_wide, num_active_wide;
  i64 src_stride, dst_stride, start_stride, count_stride, active_stride, rs_stride, nc_stride, status_stride, rec_slot, rec_layer;
  i64 mode, rows, list_length, layers, num_layers, finalize, u_dtype, k_dtype, H, HV, K, V, W, R, num_slots, null_slot, vec, v_block;
  Layer layer[MAX_LAYERS];
};

__device__ __forceinline__ void load4(float* s, const S_::T* src, int k0, int K, bool vec) {
  if (vec && k0 < K) {
    if (STATE_D == F32) {
      float4 x = *(const float4*)(src + k0);
      s[0] = x.x; s[1] = x.y; s[2] = x.z; s[3] = x.w;
    } else {
      uint2 x = *(const uint2*)(src + k0);
      s[0] = S_::up((u16)x.x); s[1] = S_::up((u16)(x.x >> 16)); s[2] = S_::up((u16)x.y); s[3] = S_::up((u16)(x.y >> 16));
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++) s[e] = k0 + e < K ? S_::up(src[k0 + e]) : 0.f;
  }
}
__device__ __forceinline__ void store4(S_::T* dst, const float* s, int k0, int K, bool vec) {
  if (vec && k0 < K) {
    if (STATE_D == F32) *(float4*)(dst + k0) = make_float4(s[0], s[1], s[2], s[3]);
    else {
      u32 lo = (u32)(u16)S_::down(s[0]) | (u32)(u16)S_::down(s[1]) << 16;
      u32 hi = (u32)(u16)S_::down(s[2]) | (u32)(u16)S_::down(s[3]) << 16;
      *(uint2*)(dst + k0) = make_uint2(lo, hi);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (k0 + e < K) dst[k0 + e] = S_::down(s[e]);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) fold_slots(const __grid_constant__ FoldArgs p) {
  extern __shared__ __align__(16) float smem[];
  const int K = (int)p.K, V = (int)p.V, W = (int)p.W, HV = (int)p.HV, R = (int)p.R, VB = (int)p.v_block;
  float* ring_k = smem;             // [W][KP]
  float* wu = ring_k + W * KP;      // [W][VB + 8]
  float* gw = wu + W * (VB + 8);    // [W] and weights [W]
  float* weight = gw + W;
  int* skip = (int*)(weight + W);   // [rows]
  int* list = skip + p.rows;        // [rows] active rows
  __shared__ int active, first, saturated, last_block;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, mode = (int)p.mode;
  const bool words = mode == MATERIALIZE || mode == FLUSH;

  if (tid == 0) { active = 0; first = 0x7fffffff; }
  for (int i = tid; i < p.rows; i += 32 * WARPS) skip[i] = p.active ? 1 : 0;
  __syncthreads();
  if (p.active) {
    i64 listed = ld_index(p.num_active, 0, p.num_active_wide);
    for (i64 i = tid; i < p.list_length && i < listed; i += 32 * WARPS) {
      i64 row = ld_index(p.active, i * p.active_stride, p.active_wide);
      if (row >= 0 && row < p.rows) skip[row] = 0;
    }
    __syncthreads();
  }
  for (int i = tid; i < p.rows; i += 32 * WARPS) {
    i64 src = ld_index(p.src, i * p.src_stride, p.src_wide), dst = mode == READ ? src : ld_index(p.dst, i * p.dst_stride, p.dst_wide);
    bool real = src >= 0 && src < p.num_slots && dst >= 0 && dst < p.num_slots && src != p.null_slot && dst != p.null_slot;
    if (!real || skip[i]) { skip[i] = 1; continue; }
    if (mode == PREFIX) {
      i64 count = ld_index(p.count, i * p.count_stride, p.count_wide);
      if (count < 0 || count > p.W) skip[i] = 1;
    } else {
      int base = p.ring_start[src * p.rs_stride], live = p.num_committed[src * p.nc_stride];
      bool bad = base < 0 || base >= R || live < 0 || live > p.W;
      if (words && (p.status[src * p.status_stride] & DEAD)) skip[i] = 1;
      if (mode == MATERIALIZE) {
        i64 count = ld_index(p.count, i * p.count_stride, p.count_wide);
        bool bad_count = count < 0 || count > live || (src == dst && count != live);
        if (bad_count && blockIdx.x == 0 && p.finalize) atomicOr(&p.status[src * p.status_stride], BAD_COUNT);
        bad |= bad_count;
      }
      if (bad) skip[i] = 1;
    }
  }
  __syncthreads();
  if (words) {
    for (i64 i = tid; i < p.rows * p.num_layers; i += 32 * WARPS) {
      int row = (int)(i / p.num_layers);
      i64 l = i % p.num_layers;
      if (skip[row]) continue;
      int record = ((volatile int*)p.step_records)[ld_index(p.src, row * p.src_stride, p.src_wide) * p.rec_slot + l * p.rec_layer];
      if (l == 0 ? record > 0 : record != 0) skip[row] = 1;
    }
    __syncthreads();
  }
  for (int i = tid; i < p.rows; i += 32 * WARPS)
    if (!skip[i]) { list[atomicAdd(&active, 1)] = i; atomicMin(&first, i); }
  __syncthreads();
  if (mode == READ) {  // rows of no slot read as zero
    i64 size = (i64)HV * V * K;
    for (i64 i = blockIdx.x; i < p.rows; i += gridDim.x)
      if (skip[i])
        for (i64 e = tid; e < size; e += 32 * WARPS) p.out[i * size + e] = 0.f;
  }
  if (active == 0) return;

  const int vblocks = (V + VB - 1) / VB;
  const i64 items = p.layers * active * HV * vblocks;
  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
    const int v0 = (int)(item % vblocks) * VB, hv = (int)(item / vblocks % HV);
    const i64 rest = item / vblocks / HV;
    const int row = list[rest % active];
    const Layer& L = p.layer[rest / active];
    const i64 src = ld_index(p.src, row * p.src_stride, p.src_wide);
    const i64 dst = mode == READ ? src : ld_index(p.dst, row * p.dst_stride, p.dst_wide);
    int base, C;
    if (mode == PREFIX) {
      base = (int)((ld_index(p.start, row * p.start_stride, p.start_wide) % R + R) % R);
      C = (int)ld_index(p.count, row * p.count_stride, p.count_wide);
    } else {
      base = p.ring_start[src * p.rs_stride];
      C = mode == MATERIALIZE ? (int)ld_index(p.count, row * p.count_stride, p.count_wide) : p.num_committed[src * p.nc_stride];
    }
    const int span = v0 + VB < V ? VB : V - v0, h = hv / (HV / (int)p.H);
    const S_::T* from = (const S_::T*)L.state + src * L.state_slot + ((i64)hv * V + v0) * K;
    S_::T* to = (S_::T*)L.state + dst * L.state_slot + ((i64)hv * V + v0) * K;
    float* out = p.out + ((row * (i64)HV + hv) * V + v0) * K;
    const bool vec = p.vec;
    if (C == 0 && mode != READ) {  // no rows: the same bits
      if (src == dst) continue;
      const i64 bytes = (i64)span * K * sizeof(S_::T);
      if (vec && bytes % 16 == 0 && ((i64)from | (i64)to) % 16 == 0) {
        const uint4* x = (const uint4*)from;
        uint4* y = (uint4*)to;
        i64 i = tid, size = bytes / 16;
        for (; i + 3 * 32 * WARPS < size; i += 4 * 32 * WARPS) {
          uint4 t0 = x[i], t1 = x[i + 32 * WARPS], t2 = x[i + 2 * 32 * WARPS], t3 = x[i + 3 * 32 * WARPS];
          y[i] = t0; y[i + 32 * WARPS] = t1; y[i + 2 * 32 * WARPS] = t2; y[i + 3 * 32 * WARPS] = t3;
        }
        for (; i < size; i += 32 * WARPS) y[i] = x[i];
      } else
        for (i64 i = tid; i < (i64)span * K; i += 32 * WARPS) to[i] = from[i];
      continue;
    }
    __syncthreads();  // the last item's shared memory is free
    if (tid == 0) saturated = 0;
    const i64 k_base = src * L.k_slot + (i64)h * p.R * K, u_base = src * L.u_slot + (i64)hv * p.R * V, g_base = src * L.g_slot + (i64)hv * p.R;
    for (int j = tid; j < C; j += 32 * WARPS) gw[j] = L.g[g_base + ((u32)(base + j) % (u32)R)];
    for (int j = warp; j < C; j += WARPS) {
      i64 at = k_base + (i64)((u32)(base + j) % (u32)R) * K;
#pragma unroll
      for (int i = 0; i < 4 * NKB; i++) {
        int k = lane + 32 * i;
        ring_k[j * KP + k] = k < K ? ld(L.k, at + k, p.k_dtype) : 0.f;
      }
    }
    __syncthreads();
    for (int j = tid; j < C; j += 32 * WARPS) {
      float after = 0.f;
      for (int i = C - 1; i > j; i--) after += gw[i];
      weight[j] = expf(after);
    }
    float sum = 0.f;
    for (int j = C - 1; j >= 0; j--) sum += gw[j];
    const float decay = expf(sum);
    __syncthreads();
    for (int i = tid; i < C * span; i += 32 * WARPS) {
      int j = i / span, v = i % span;
      wu[j * (VB + 8) + v] = weight[j] * ld(L.u, u_base + (i64)((u32)(base + j) % (u32)R) * V + v0 + v, p.u_dtype);
    }
    __syncthreads();
    bool hit = false;
    for (int vg = warp * RB; vg < span; vg += WARPS * RB) {
#pragma unroll
      for (int kb = 0; kb < NKB; kb++) {
        const int k0 = 128 * kb + 4 * lane;
        float S[RB][4];
#pragma unroll
        for (int b = 0; b < RB; b++)
          if (vg + b < span) load4(S[b], from + (i64)(vg + b) * K, k0, K, vec);
          else S[b][0] = S[b][1] = S[b][2] = S[b][3] = 0.f;
#pragma unroll
        for (int b = 0; b < RB; b++)
#pragma unroll
          for (int e = 0; e < 4; e++) S[b][e] *= decay;
        for (int j = 0; j < C; j++) {
          const float4 x = *(const float4*)(ring_k + j * KP + k0);
#pragma unroll
          for (int b = 0; b < RB; b++) {
            float u = wu[j * (VB + 8) + vg + b];
            S[b][0] += u * x.x; S[b][1] += u * x.y; S[b][2] += u * x.z; S[b][3] += u * x.w;
          }
        }
#pragma unroll
        for (int b = 0; b < RB; b++)
          if (vg + b < span) {
            if (mode == READ) {
#pragma unroll
              for (int e = 0; e < 4; e++)
                if (k0 + e < K) out[(i64)(vg + b) * K + k0 + e] = S[b][e];
            } else {
#pragma unroll
              for (int e = 0; e < 4; e++) S[b][e] = saturate(S[b][e], S_::MAX, hit);
              store4(to + (i64)(vg + b) * K, S[b], k0, K, vec);
            }
          }
      }
    }
    if (words && hit) saturated = 1;
    if (words) {
      __syncthreads();
      if (tid == 0 && saturated) atomicOr(&p.status[dst * p.status_stride], SATURATED_NOW);
    }
  }

  if (!words || !p.finalize) return;
  // Write the cursors once every block has read them: the last block to come does.
  int* arrivals = &p.step_records[ld_index(p.src, first * p.src_stride, p.src_wide) * p.rec_slot];
  __syncthreads();
  if (tid == 0) {
    __threadfence();
    last_block = atomicSub(arrivals, 1) == 1 - (int)gridDim.x;
    __threadfence();
  }
  __syncthreads();
  if (!last_block) return;
  for (int i = tid; i < active; i += 32 * WARPS) {
    int row = list[i];
    i64 src = ld_index(p.src, row * p.src_stride, p.src_wide), dst = ld_index(p.dst, row * p.dst_stride, p.dst_wide);
    int was = ((volatile int*)p.status)[src * p.status_stride], now = ((volatile int*)p.status)[dst * p.status_stride];
    p.status[dst * p.status_stride] = (was & ~SATURATED_NOW) | (now & SATURATED_NOW ? STATE_SATURATED : 0);
    if (mode == FLUSH) p.ring_start[src * p.rs_stride] = (p.ring_start[src * p.rs_stride] + p.num_committed[src * p.nc_stride]) % R;
    else p.ring_start[dst * p.rs_stride] = 0;
    p.num_committed[dst * p.nc_stride] = 0;
  }
  if (mode == MATERIALIZE)
    for (i64 i = tid; i < active * p.num_layers; i += 32 * WARPS)
      p.step_records[ld_index(p.dst, list[i / p.num_layers] * p.dst_stride, p.dst_wide) * p.rec_slot + i % p.num_layers * p.rec_layer] = 0;
  __syncthreads();
  if (tid == 0) *arrivals = 0;
}
