// S_C = e^{G_C} S_0 + sum_j e^{G_C - G_j} u_j k_j^T for the rows of a list, all layers in one launch; any sizes and dtypes.
//
// Modes: MATERIALIZE (into slot dst, cursors of dst become 0), FLUSH (in place, ring_start += P, P = 0), READ (into
// `out`, float32), PREFIX (kernel-level: cursors per row, an optional list of active rows). Blocks share the items (layer,
// row, value head, block of values); a lane owns 4 of 128 k's of 8 rows of the state at a time.
//
// Compile-time: STATE_D, NKB (K rounded up to 128, over 128).

#define RB 8
#define KP (NKB * 128)
typedef Elem<STATE_D> S_;

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
  wait_for_previous();
  extern __shared__ __align__(16) float smem[];
  const int K = (int)p.K, V = (int)p.V, W = (int)p.W, HV = (int)p.HV, R = (int)p.R, VB = (int)p.v_block;
  float* ring_k = smem;             // [W][KP]
  float* wu = ring_k + W * KP;      // [W][VB + 8]
  float* gw = wu + W * (VB + 8);    // [W] and weights [W]
  float* weight = gw + W;
  int* skip = (int*)(weight + W);   // [rows]
  int* list = skip + p.rows;        // [rows] active rows
  __shared__ Rows rows;
  __shared__ int saturated;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, mode = (int)p.mode;
  const bool words = mode == MATERIALIZE || mode == FLUSH;
  scan_rows(p, skip, list, rows);
  const int active = rows.active;
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
    const Item it = read_item(p, row, hv);
    const i64 src = it.src, dst = it.dst;
    const int base = it.base, C = it.C;
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
    u32 raw[2][4 * NKB];
    for (int j0 = warp; j0 < C; j0 += 2 * WARPS) {
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4 * NKB; i++) {
          const int j = j0 + m * WARPS, k = lane + 32 * i;
          raw[m][i] = j < C && k < K ? ld_raw(L.k, k_base + (i64)((u32)(base + j) % (u32)R) * K + k, p.k_dtype) : 0;
        }
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4 * NKB; i++)
          if (j0 + m * WARPS < C) ring_k[(j0 + m * WARPS) * KP + lane + 32 * i] = from_raw(raw[m][i], p.k_dtype);
    }
    for (int j = tid; j < C; j += 32 * WARPS) gw[j] = L.g[g_base + ((u32)(base + j) % (u32)R)];
    for (int i0 = tid; i0 < C * span; i0 += 8 * 32 * WARPS) {
      u32 ur[8];
#pragma unroll
      for (int m = 0; m < 8; m++) {
        const int i = i0 + m * 32 * WARPS, j = i / span;
        ur[m] = i < C * span ? ld_raw(L.u, u_base + (i64)((u32)(base + j) % (u32)R) * V + v0 + i % span, p.u_dtype) : 0;
      }
#pragma unroll
      for (int m = 0; m < 8; m++) {
        const int i = i0 + m * 32 * WARPS;
        if (i < C * span) wu[i / span * (VB + 8) + i % span] = from_raw(ur[m], p.u_dtype);
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
    for (int i = tid; i < C * span; i += 32 * WARPS) wu[i / span * (VB + 8) + i % span] *= weight[i / span];
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

  finish_rows(p, list, rows);
}
