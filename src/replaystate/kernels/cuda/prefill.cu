// Prefill: the recurrence token by token. A block has one row, one value head and 32 values; their state stays in
// registers (a warp has 4 values, a lane 4 of 128 k's of each). Tokens are normalised CHUNK at a time in shared memory.
//
// Compile-time: NKB (K rounded up to 128, over 128).

#define WARPS 8
#define RB 4
#define VB (WARPS * RB)
#define CHUNK 16
#define KP (NKB * 128)

struct PrefillArgs {
  const void *mixed_qkv, *a, *b, *A_log, *dt_bias, *initial, *query_start_loc;
  void* out;
  float* final;
  i64 io_dtype, a_dtype, b_dtype, A_dtype, dt_dtype, initial_dtype, qsl_wide;
  i64 x_tok, x_elem, a_tok, a_head, b_tok, b_head, A_stride, dt_stride, qsl_stride, out_tok;
  i64 B, N, H, HV, K, V;
  double scale;
};

__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(FULL, x, d);
  return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) prefill(const __grid_constant__ PrefillArgs p) {
  wait_for_previous();
  extern __shared__ __align__(16) float smem[];
  float* X = smem;                       // [CHUNK][2][KP]
  float* vs = X + 2 * CHUNK * KP;        // [CHUNK][VB], then y
  float* decay = vs + CHUNK * VB;        // [CHUNK]
  float* beta = decay + CHUNK;
  const int K = (int)p.K, V = (int)p.V, HV = (int)p.HV, H = (int)p.H;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int vblocks = (V + VB - 1) / VB, v0 = blockIdx.x % vblocks * VB, hv = blockIdx.x / vblocks % HV, h = hv / (HV / H);
  const i64 row = blockIdx.x / vblocks / HV;
  i64 lo = ld_index(p.query_start_loc, row * p.qsl_stride, p.qsl_wide), hi = ld_index(p.query_start_loc, (row + 1) * p.qsl_stride, p.qsl_wide);
  lo = lo < 0 ? 0 : lo > p.N ? p.N : lo;
  hi = hi < lo ? lo : hi > p.N ? p.N : hi;
  const i64 v_off = 2 * (i64)H * K + (i64)hv * V;
  float S[RB][4 * NKB];
  const i64 head = (row * HV + hv) * V;
#pragma unroll
  for (int b = 0; b < RB; b++)
#pragma unroll
    for (int e = 0; e < 4 * NKB; e++) {
      int v = v0 + warp * RB + b, k = 128 * (e / 4) + 4 * lane + e % 4;
      S[b][e] = 0.f;
      if (p.initial && v < V && k < K) {
        i64 i = (head + v) * K + k;
        S[b][e] = p.initial_dtype == 3 ? (float)((const double*)p.initial)[i] : ld(p.initial, i, (int)p.initial_dtype);
      }
    }
  for (i64 t0 = lo; t0 < hi; t0 += CHUNK) {
    const int n = hi - t0 < CHUNK ? (int)(hi - t0) : CHUNK;
    __syncthreads();
    for (int i = warp; i < 2 * n; i += WARPS) {
      const int t = i >> 1, is_q = i & 1;
      float x[4 * NKB], sum = 0.f;
#pragma unroll
      for (int e = 0; e < 4 * NKB; e++) {
        int k = lane + 32 * e;
        x[e] = k < K ? ld(p.mixed_qkv, (t0 + t) * p.x_tok + ((is_q ? 0 : (i64)H * K) + (i64)h * K + k) * p.x_elem, (int)p.io_dtype) : 0.f;
        sum += x[e] * x[e];
      }
      const float norm = (is_q ? (float)p.scale : 1.f) / sqrtf(sum_lanes(sum) + 1e-6f);
#pragma unroll
      for (int e = 0; e < 4 * NKB; e++) X[i * KP + lane + 32 * e] = x[e] * norm;
    }
    if (tid < n) {
      i64 token = t0 + tid;
      float x = ld(p.a, token * p.a_tok + hv * p.a_head, (int)p.a_dtype) + ld(p.dt_bias, hv * p.dt_stride, (int)p.dt_dtype);
      decay[tid] = expf(log_decay(x, ld(p.A_log, hv * p.A_stride, (int)p.A_dtype)));
      beta[tid] = sigmoid(ld(p.b, token * p.b_tok + hv * p.b_head, (int)p.b_dtype));
    }
    for (int i = tid; i < n * VB; i += 32 * WARPS) {
      int v = v0 + i % VB;
      vs[i] = v < V ? ld(p.mixed_qkv, (t0 + i / VB) * p.x_tok + (v_off + v) * p.x_elem, (int)p.io_dtype) : 0.f;
    }
    __syncthreads();
    for (int t = 0; t < n; t++) {
      const float d = decay[t], be = beta[t];
      float k[4 * NKB], q[4 * NKB];
#pragma unroll
      for (int kb = 0; kb < NKB; kb++) {
        float4 x = *(const float4*)(X + 2 * t * KP + 128 * kb + 4 * lane), y = *(const float4*)(X + (2 * t + 1) * KP + 128 * kb + 4 * lane);
        k[4 * kb] = x.x; k[4 * kb + 1] = x.y; k[4 * kb + 2] = x.z; k[4 * kb + 3] = x.w;
        q[4 * kb] = y.x; q[4 * kb + 1] = y.y; q[4 * kb + 2] = y.z; q[4 * kb + 3] = y.w;
      }
#pragma unroll
      for (int b = 0; b < RB; b++) {
        float pred = 0.f, y = 0.f;
#pragma unroll
        for (int e = 0; e < 4 * NKB; e++) { S[b][e] *= d; pred += S[b][e] * k[e]; }
        const float u = be * (vs[t * VB + warp * RB + b] - sum_lanes(pred));
#pragma unroll
        for (int e = 0; e < 4 * NKB; e++) { S[b][e] += u * k[e]; y += S[b][e] * q[e]; }
        y = sum_lanes(y);
        __syncwarp();
        if (lane == 0) vs[t * VB + warp * RB + b] = y;
      }
    }
    __syncthreads();
    for (int i = tid; i < n * VB; i += 32 * WARPS) {
      int v = v0 + i % VB;
      if (v < V) st(p.out, (t0 + i / VB) * p.out_tok + (i64)hv * V + v, (int)p.io_dtype, vs[i]);
    }
  }
#pragma unroll
  for (int b = 0; b < RB; b++)
#pragma unroll
    for (int e = 0; e < 4 * NKB; e++) {
      int v = v0 + warp * RB + b, k = 128 * (e / 4) + 4 * lane + e % 4;
      if (v < V && k < K) p.final[(head + v) * K + k] = S[b][e];
    }
}
