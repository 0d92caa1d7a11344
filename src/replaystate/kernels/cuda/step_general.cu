// One replay step for any K, V, window, head ratio, dtype and view: float32 arithmetic on the vector units.
//
// A block has one row, one value head and v_block of its values. It normalises q and k, scores them against the window
// and each other once, in shared memory; then each warp takes RB = 16 / TT rows of the state at a time. A lane owns
// 4 of 128 k's of each row, so 2 TT x RB = 32 products are summed across the lanes by halving, and lane i ends with
// product i: (row i / 2TT, token side i % 2TT). From there on a lane solves for its own token, and the fold reuses the
// state registers. The sums' order depends on K alone.
//
// Compile-time: STATE_D (dtype of the state), TT (token lanes: 2, 4, 8, 16), NKB (K rounded up to 128, over 128).

#define WARPS 8
#define RB (16 / TT)
#define KP (NKB * 128)
typedef Elem<STATE_D> S_;

__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(FULL, x, d);
  return x;
}
// 32 values a lane -> lane i holds the sum over lanes of value i.
template <int HALF> __device__ __forceinline__ void halve(float* x, int lane) {
  const bool up = lane & HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    float keep = up ? x[i + HALF] : x[i], send = up ? x[i] : x[i + HALF];
    x[i] = keep + __shfl_xor_sync(FULL, send, HALF);
  }
  if constexpr (HALF > 1) halve<HALF / 2>(x, lane);
}
__device__ __forceinline__ float sum_lanes_of_32(float* x, int lane) { halve<16>(x, lane); return x[0]; }

// N values a lane -> lane i holds the sum over lanes of value i % N.
template <int N> __device__ __forceinline__ float sum_lanes_of(float* x, int lane) {
  if constexpr (N < 32) {
#pragma unroll
    for (int d = 16; d >= N; d >>= 1)
#pragma unroll
      for (int i = 0; i < N; i++) x[i] += __shfl_xor_sync(FULL, x[i], d);
  }
  halve<N / 2>(x, lane);
  return x[0];
}
// i / n for n whose inverse is 2^32 / n rounded up, i n < 2^32.
__device__ __forceinline__ int divide(int i, u32 inverse) { return (int)__umulhi((u32)i, inverse); }

__device__ __forceinline__ void load_state(float* s, const S_::T* src, int k0, int K, bool vec) {
  if (vec) {
    if (k0 < K) {
      if (STATE_D == F32) {
        float4 x = *(const float4*)(src + k0);
        s[0] = x.x; s[1] = x.y; s[2] = x.z; s[3] = x.w;
      } else {
        uint2 x = *(const uint2*)(src + k0);
        s[0] = S_::up((u16)x.x); s[1] = S_::up((u16)(x.x >> 16)); s[2] = S_::up((u16)x.y); s[3] = S_::up((u16)(x.y >> 16));
      }
    } else s[0] = s[1] = s[2] = s[3] = 0.f;
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++) s[e] = k0 + e < K ? S_::up(src[k0 + e]) : 0.f;
  }
}
__device__ __forceinline__ void store_state(S_::T* dst, const float* s, int k0, int K, bool vec) {
  if (vec) {
    if (k0 < K) {
      if (STATE_D == F32) *(float4*)(dst + k0) = make_float4(s[0], s[1], s[2], s[3]);
      else {
        u32 lo = (u32)(u16)S_::down(s[0]) | (u32)(u16)S_::down(s[1]) << 16;
        u32 hi = (u32)(u16)S_::down(s[2]) | (u32)(u16)S_::down(s[3]) << 16;
        *(uint2*)(dst + k0) = make_uint2(lo, hi);
      }
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (k0 + e < K) dst[k0 + e] = S_::down(s[e]);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) step_general(const __grid_constant__ StepArgs p) {
  wait_for_previous();
  extern __shared__ __align__(16) float smem[];
  const int K = (int)p.K, V = (int)p.V, W = (int)p.W, R1 = (int)p.R - 1, HV = (int)p.HV, VB = (int)p.v_block;
  float* X = smem;                    // [2 TT][KP]   normalised k, then q with the scale
  float* ring_k = X + 2 * TT * KP;    // [W][KP]
  float* score = ring_k + W * KP;     // [W + TT][2 TT]  of window rows, then of the new tokens
  float* wu = score + (W + TT) * 2 * TT;  // [W][VB + 4]    e^{G_P - G_j} u_j
  float* uy = wu + W * (VB + 4);      // [2 TT][VB + 1]  v, then u; and y
  float* gw = uy + 2 * TT * (VB + 1); // [W] log-decays, then [W] weights
  float* weight = gw + W;
  float* g = weight + W;              // [TT] each: log-decay, beta
  float* beta = g + TT;
  __shared__ int saturated;
  __shared__ float window_decay;

  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int vblocks = (V + VB - 1) / VB, parts = HV * vblocks;
  const int row = blockIdx.x / (u32)parts, part = blockIdx.x % (u32)parts, hv = part / vblocks, v0 = part % vblocks * VB;
  const int v1 = v0 + VB < V ? v0 + VB : V, span = v1 - v0;
  const u32 inverse = 0xffffffffu / (u32)span + 1;
  const int group = HV / (int)p.H, h = hv / group;
  if (tid == 0) saturated = 0;
  int head, tail;
  row_range(p, head, tail);
  Row r = make_row(p, load_row(p, row));
  settle_row(p, r, load_cursors(p, row, r), part);
  zero_outputs(p, r, row, head, tail, hv, 1, v0, v1);
  if (!r.alive) return;
  const int P = r.P, n = r.length;
  const bool folds = P >= p.flush_min;
  const i64 tok0 = r.begin, slot = r.slot;

  S_::T* state = (S_::T*)p.state + slot * p.state_slot + ((i64)hv * V + v0) * K;
  const bool vec = p.state_vec;
#if PREFETCH
  float next[RB][4 * NKB];
#pragma unroll
  for (int b = 0; b < RB; b++) {
    int v = warp * RB + b;
    if (v < span)
#pragma unroll
      for (int kb = 0; kb < NKB; kb++) load_state(next[b] + 4 * kb, state + (i64)v * K, 128 * kb + 4 * lane, K, vec);
    else
#pragma unroll
      for (int e = 0; e < 4 * NKB; e++) next[b][e] = 0.f;
  }
#endif

  // Window: keys, log-decays. New tokens: keys and queries normalised, gates, values.
  const i64 k_base = slot * p.k_slot + (i64)h * p.R * K, g_base = slot * p.g_slot + (i64)hv * p.R;
  const i64 u_base = slot * p.u_slot + (i64)hv * p.R * V;
  u32 raw_k[2][4 * NKB];
  for (int j0 = warp; j0 < P; j0 += 2 * WARPS) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 4 * NKB; i++) {
        const int j = j0 + m * WARPS, k = lane + 32 * i;
        raw_k[m][i] = j < P && k < K ? ld_raw(p.k_ring, k_base + (i64)((r.base + j) & R1) * K + k, p.kr_dtype) : 0;
      }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 4 * NKB; i++)
        if (j0 + m * WARPS < P) ring_k[(j0 + m * WARPS) * KP + lane + 32 * i] = from_raw(raw_k[m][i], p.kr_dtype);
  }
  for (int i0 = tid; i0 < P * span; i0 += 8 * 32 * WARPS) {
    u32 ur[8];
#pragma unroll
    for (int m = 0; m < 8; m++) {
      const int i = i0 + m * 32 * WARPS, j = divide(i, inverse);
      ur[m] = i < P * span ? ld_raw(p.u_ring, u_base + (i64)((r.base + j) & R1) * V + v0 + (i - divide(i, inverse) * span), p.u_dtype) : 0;
    }
#pragma unroll
    for (int m = 0; m < 8; m++) {
      const int i = i0 + m * 32 * WARPS;
      if (i < P * span) wu[divide(i, inverse) * (VB + 4) + (i - divide(i, inverse) * span)] = from_raw(ur[m], p.u_dtype);
    }
  }
  for (int j = tid; j < P; j += 32 * WARPS) gw[j] = p.g_ring[g_base + ((r.base + j) & R1)];
  for (int i = warp; i < 2 * TT; i += WARPS) {
    const bool is_q = i >= TT;
    const int t = is_q ? i - TT : i;
    float x[4 * NKB], sum = 0.f;
    u32 raw[4 * NKB];
    const int io = is_q ? p.q_dtype : p.k_dtype;
#pragma unroll
    for (int e = 0; e < 4 * NKB; e++) {
      int k = lane + 32 * e;
      raw[e] = 0;
      if (t < n && k < K)
        raw[e] = is_q ? ld_raw(p.q, row * p.q_row + (tok0 + t) * p.q_tok + h * p.q_head + k * p.q_elem, io)
                      : ld_raw(p.k, row * p.k_row + (tok0 + t) * p.k_tok + h * p.k_head + k * p.k_elem, io);
    }
#pragma unroll
    for (int e = 0; e < 4 * NKB; e++) {
      x[e] = from_raw(raw[e], io);
      sum += x[e] * x[e];
    }
    sum = sum_lanes(sum);
    const float norm = (is_q ? (float)p.scale : 1.f) / sqrtf(sum + 1e-6f);
#pragma unroll
    for (int e = 0; e < 4 * NKB; e++) {
      int k = lane + 32 * e;
      X[i * KP + k] = x[e] * norm;
      if (!is_q && t < n && k < K && part % (group * vblocks) == 0)
        st(p.k_ring, k_base + (i64)((r.base + P + t) & R1) * K + k, p.kr_dtype, x[e] * norm);
    }
  }
  if (tid < TT) {
    float gt = 0.f, bt = 0.f;
    if (tid < n) {
      const u32 ra = ld_raw(p.a, row * p.a_row + (tok0 + tid) * p.a_tok + hv * p.a_head, p.a_dtype);
      const u32 rb = ld_raw(p.b, row * p.b_row + (tok0 + tid) * p.b_tok + hv * p.b_head, p.b_dtype);
      const u32 rd = ld_raw(p.dt_bias, hv * p.dt_stride, p.dt_dtype), rA = ld_raw(p.A_log, hv * p.A_stride, p.A_dtype);
      gt = log_decay(from_raw(ra, p.a_dtype) + from_raw(rd, p.dt_dtype), from_raw(rA, p.A_dtype));
      bt = sigmoid(from_raw(rb, p.b_dtype));
      if (v0 == 0) p.g_ring[g_base + ((r.base + P + tid) & R1)] = gt;
    }
    g[tid] = gt;
    beta[tid] = bt;
  }
  for (int i = tid; i < TT * span; i += 32 * WARPS) {
    int t = divide(i, inverse), v = (i - divide(i, inverse) * span);
    uy[t * (VB + 1) + v] = t < n ? ld(p.v, row * p.v_row + (tok0 + t) * p.v_tok + hv * p.v_head + (v0 + v) * p.v_elem, p.v_dtype) : 0.f;
  }
  __syncthreads();
  const int arrived = enter_row(p, r);

  // Decay from each window row to the window's end, as a sum of what follows it; scores of keys and queries.
  if (warp == WARPS - 1) {
    float total = 0.f;                                 // log-decay of the rows after these 32
    for (int j0 = (P - 1) & ~31; j0 >= 0; j0 -= 32) {
      float from = j0 + lane < P ? gw[j0 + lane] : 0.f;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        float other = __shfl_down_sync(FULL, from, d);
        if (lane + d < 32) from += other;
      }
      const float after = __shfl_down_sync(FULL, from, 1);
      if (j0 + lane < P) weight[j0 + lane] = expf((lane < 31 ? after : 0.f) + total);
      total += __shfl_sync(FULL, from, 0);
    }
    if (lane == 0) window_decay = expf(total);
  }
  for (int j = warp; j < P + n; j += WARPS) {
    const float* key = j < P ? ring_k + j * KP : X + (j - P) * KP;
    float s[2 * TT];
#pragma unroll
    for (int i = 0; i < 2 * TT; i++) s[i] = 0.f;
#pragma unroll
    for (int e = 0; e < 4 * NKB; e++) {
      float x = key[lane + 32 * e];
#pragma unroll
      for (int i = 0; i < 2 * TT; i++) s[i] += x * X[i * KP + lane + 32 * e];
    }
    const float mine = sum_lanes_of<2 * TT>(s, lane);
    if (lane < 2 * TT) score[(j < P ? j : W + j - P) * 2 * TT + lane] = mine;
  }
  __syncthreads();
  for (int i = tid; i < P * span; i += 32 * WARPS) wu[divide(i, inverse) * (VB + 4) + (i - divide(i, inverse) * span)] *= weight[divide(i, inverse)];
  const float decay = window_decay;

  // This lane's token side and its coefficients: u or y = own + sum over s of coef[s] u_s.
  const int side = lane % (2 * TT), t = side % TT;
  const bool is_y = side >= TT;
  float coef[TT], since = 0.f;
#pragma unroll
  for (int s = 0; s < TT; s++) coef[s] = 0.f;
#pragma unroll
  for (int s = TT - 1; s >= 0; s--) {
    if (s <= t && t < n) {
      if (s < t || is_y) coef[s] = (is_y ? 1.f : -beta[t]) * expf(since) * score[(W + s) * 2 * TT + side];
      since += g[s];
    }
  }
  const float now = expf(since), own_v = is_y ? 0.f : beta[t], own_s = is_y ? now : -beta[t] * now;
  __syncthreads();

  bool hit_u = false, hit_s = false;
  const int row_in_group = lane / (2 * TT);
  float S[RB][4 * NKB];
  for (int vg = warp * RB; vg < span; vg += WARPS * RB) {
#pragma unroll
    for (int b = 0; b < RB; b++) {
#if PREFETCH
#pragma unroll
      for (int e = 0; e < 4 * NKB; e++) S[b][e] = next[b][e];
      int ahead = vg + WARPS * RB + b;
      if (ahead < span)
#pragma unroll
        for (int kb = 0; kb < NKB; kb++) load_state(next[b] + 4 * kb, state + (i64)ahead * K, 128 * kb + 4 * lane, K, vec);
#else
      if (vg + b < span)
#pragma unroll
        for (int kb = 0; kb < NKB; kb++) load_state(S[b] + 4 * kb, state + (i64)(vg + b) * K, 128 * kb + 4 * lane, K, vec);
      else
#pragma unroll
        for (int e = 0; e < 4 * NKB; e++) S[b][e] = 0.f;
#endif
    }
    float acc[32];
#pragma unroll
    for (int i = 0; i < 2 * TT; i++) {
      float x[4 * NKB];
#pragma unroll
      for (int kb = 0; kb < NKB; kb++) {
        float4 y = *(const float4*)(X + i * KP + 128 * kb + 4 * lane);
        x[4 * kb] = y.x; x[4 * kb + 1] = y.y; x[4 * kb + 2] = y.z; x[4 * kb + 3] = y.w;
      }
#pragma unroll
      for (int b = 0; b < RB; b++) {
        float sum = S[b][0] * x[0];
#pragma unroll
        for (int e = 1; e < 4 * NKB; e++) sum += S[b][e] * x[e];
        acc[b * 2 * TT + i] = sum;
      }
    }
    const float product = sum_lanes_of_32(acc, lane);
    const int v = vg + row_in_group;
    const bool there = v < span;
    float history = 0.f;
#pragma unroll 4
    for (int j = 0; j < P; j++) history += score[j * 2 * TT + side] * (there ? wu[j * (VB + 4) + v] : 0.f);
    float mine = own_s * (decay * product + history);
    if (!is_y) mine += own_v * (there ? uy[t * (VB + 1) + v] : 0.f);
#pragma unroll
    for (int s = 0; s < TT; s++) {
      float us = __shfl_sync(FULL, mine, row_in_group * 2 * TT + s);
      if (s < t || (is_y && s == t)) mine += coef[s] * us;
    }
    if (there) uy[side * (VB + 1) + v] = mine;
    if (folds) {
#pragma unroll
      for (int b = 0; b < RB; b++)
#pragma unroll
        for (int e = 0; e < 4 * NKB; e++) S[b][e] *= decay;
#pragma unroll 2
      for (int j = 0; j < P; j++) {
        float x[4 * NKB];
#pragma unroll
        for (int kb = 0; kb < NKB; kb++) {
          float4 y = *(const float4*)(ring_k + j * KP + 128 * kb + 4 * lane);
          x[4 * kb] = y.x; x[4 * kb + 1] = y.y; x[4 * kb + 2] = y.z; x[4 * kb + 3] = y.w;
        }
#pragma unroll
        for (int b = 0; b < RB; b++) {
          float u = vg + b < span ? wu[j * (VB + 4) + vg + b] : 0.f;
#pragma unroll
          for (int e = 0; e < 4 * NKB; e++) S[b][e] += u * x[e];
        }
      }
#pragma unroll
      for (int b = 0; b < RB; b++)
        if (vg + b < span) {
#pragma unroll
          for (int e = 0; e < 4 * NKB; e++) S[b][e] = saturate(S[b][e], S_::MAX, hit_s);
#pragma unroll
          for (int kb = 0; kb < NKB; kb++) store_state(state + (i64)(vg + b) * K, S[b] + 4 * kb, 128 * kb + 4 * lane, K, vec);
        }
    }
  }
  __syncthreads();
  const float u_max = dtype_max((int)p.u_dtype);
  const i64 out_base = (p.padded_out || !p.ragged ? row * p.out_row : tok0 * p.out_tok) + hv * p.out_head;
  for (int i = tid; i < n * span; i += 32 * WARPS) {
    int token = divide(i, inverse), v = (i - divide(i, inverse) * span);
    float u = saturate(uy[token * (VB + 1) + v], u_max, hit_u);
    st(p.u_ring, u_base + (i64)((r.base + P + token) & R1) * V + v0 + v, p.u_dtype, u);
    st(p.out, out_base + token * p.out_tok + (v0 + v) * p.out_elem, p.out_dtype, uy[(TT + token) * (VB + 1) + v]);
  }
  if (p.status && (hit_u || hit_s)) atomicOr(&saturated, (hit_u ? RING_SATURATED : 0) | (hit_s ? STATE_SATURATED : 0));
  __syncthreads();
  if (tid == 0 && p.status && saturated) atomicOr(&p.status[slot * p.status_stride], saturated);
  finish_row(p, r, parts, arrived);
}
