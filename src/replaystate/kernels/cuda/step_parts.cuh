// What the two tensor-core steps (step_fast.cu, step_split.cu) share: how a block is dealt out, gates, the decays of the
// window, and the substitution that solves for u.
//
// A block has one row, NHV value heads of one key head, and 1 / VS of their values; a warp has CPW times 32 values of one
// head. Token columns are n = side * TT + t (side 0: key, 1: query). The warp's 32 values are dealt to matrix rows as
// v = 4 r + x, r = lane / 4, x = 0..3 (x = 2 mt + half), so that a lane holds 4 neighbouring values of the token columns
// 2 q, 2 q + 1 (q = lane % 4): v, u and y move as vectors and need no shuffle.

#define NWARP (NHV * 4 / VS / CPW)
#define WPH (4 / VS / CPW)          // warps a head
#define THREADS (32 * NWARP)
#define NT (2 * TT / 8)           // token columns in tiles of 8
#define JT (WIN / 16)             // window rows in tiles of 16
#define XROWS (2 * TT)
#define SS (TT == 8 ? 16 : 2 * TT + 4)       // row stride of the scores; without padding three blocks of TT = 8 fit
#define GATES ((NHV + NWARP - 1) / NWARP)    // at most so many chores of a kind a warp
#define HEAD_FLOATS (WIN + TT * 2 * TT + 2 * TT + TT + 4)

typedef Elem<STATE_D> S_;
typedef Elem<IO_D> IO_;
typedef Elem<RING_D> R_;

// The m-th of a kind of chores that a warp has: kinds start at different warps, so that each warp has few.
__device__ __forceinline__ int chore(int warp, int m, int start) { return (warp + 64 * NWARP - start) % NWARP + m * NWARP; }

struct RawGates { u32 A[GATES], dt[GATES], a[GATES], b[GATES]; };

__device__ __forceinline__ void load_layer_gates(const StepArgs& p, RawGates& raw, int warp, int hv0) {
#pragma unroll
  for (int m = 0; m < GATES; m++) {
    const int of = chore(warp, m, JT + 1);
    raw.A[m] = raw.dt[m] = raw.a[m] = raw.b[m] = 0;
    if (of < NHV) {
      raw.A[m] = ld_raw(p.A_log, wide(hv0 + of, p.A_stride), FLAG(p.A_dtype, F32));
      raw.dt[m] = ld_raw(p.dt_bias, wide(hv0 + of, p.dt_stride), FLAG(p.dt_dtype, F32));
    }
  }
}
__device__ __forceinline__ void load_token_gates(const StepArgs& p, const Row& w, RawGates& raw, int row, int warp, int lane, int hv0) {
#pragma unroll
  for (int m = 0; m < GATES; m++) {
    const int of = chore(warp, m, JT + 1);
    if (of < NHV && lane < w.length && w.real) {
      raw.a[m] = ld_raw(p.a, (PLAIN ? 0 : wide(row, p.a_row)) + wide(w.begin + lane, p.a_tok) + wide(hv0 + of, p.a_head), FLAG(p.a_dtype, IO_D));
      raw.b[m] = ld_raw(p.b, (PLAIN ? 0 : wide(row, p.b_row)) + wide(w.begin + lane, p.b_tok) + wide(hv0 + of, p.b_head), FLAG(p.b_dtype, IO_D));
    }
  }
}
__device__ __forceinline__ void load_window_decays(float (&gw)[GATES], const float* g_ring, int base, int P, int R1, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < GATES; m++) {
    const int of = chore(warp, m, JT + 1 + NHV);
    gw[m] = of < NHV && lane < P ? g_ring[of * (R1 + 1) + ((base + lane) & R1)] : 0.f;
  }
}

// Per value head in `heads`: weights [WIN], coefficients [TT][2 TT], own factors [2 TT], betas [TT], decay of the window.
// Coefficients between the new tokens, own factors and betas; the new log-decays are appended.
__device__ __forceinline__ void set_gates(const StepArgs& p, const Row& w, const RawGates& raw, float* heads, float* g_ring, bool appends, int warp, int lane) {
  const int R1 = (int)p.R - 1;
#pragma unroll
  for (int m = 0; m < GATES; m++) {
    const int of = chore(warp, m, JT + 1);
    if (of >= NHV) break;
    float *coef = heads + of * HEAD_FLOATS + WIN, *own = coef + TT * 2 * TT, *betas = own + 2 * TT;
    float g = 0.f, beta = 0.f;
    if (lane < w.length) {
      g = log_decay(from_raw(raw.a[m], FLAG(p.a_dtype, IO_D)) + from_raw(raw.dt[m], FLAG(p.dt_dtype, F32)), from_raw(raw.A[m], FLAG(p.A_dtype, F32)));
      beta = sigmoid(from_raw(raw.b[m], FLAG(p.b_dtype, IO_D)));
      if (appends) g_ring[of * (R1 + 1) + ((w.base + w.P + lane) & R1)] = g;
    }
    const float scale = (float)p.scale;
    float now = 0.f;
#pragma unroll
    for (int s = 0; s < TT; s++) {
      float gs = __shfl_sync(FULL, g, s);
      if (s <= lane) now += gs;
    }
    if (lane < TT) {
      const float factor = expf(now);
      betas[lane] = beta;
      own[lane] = -beta * factor;
      own[TT + lane] = scale * factor;
    }
    if (TT == 16) {                                    // a lane has a column: one sum grows from token to token
      const int t = lane % TT;
      const float bt = __shfl_sync(FULL, beta, t);
      float since = 0.f;
#pragma unroll
      for (int s = TT - 1; s >= 0; s--) {
        const float gs = __shfl_sync(FULL, g, s), e = expf(since);
        coef[s * 2 * TT + lane % (2 * TT)] = lane >= TT ? (s <= t ? scale * e : 0.f) : (s < t ? -bt * e : 0.f);
        if (s <= t) since += gs;
      }
    } else {
#pragma unroll
      for (int i = 0; i < TT * 2 * TT / 32; i++) {
        int e = 32 * i + lane, s = e / (2 * TT), col = e % (2 * TT), t = col % TT;
        float since = 0.f, bt = __shfl_sync(FULL, beta, t);
#pragma unroll
        for (int x = TT - 1; x > 0; x--) {
          float gx = __shfl_sync(FULL, g, x);
          if (x > s && x <= t) since += gx;
        }
        since = expf(since);
        coef[e] = col >= TT ? (s <= t ? scale * since : 0.f) : (s < t ? -bt * since : 0.f);
      }
    }
  }
}
// Decay of each window row to the window's end, and of the checkpoint.
__device__ __forceinline__ void set_weights(const float (&gw)[GATES], float* heads, int P, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < GATES; m++) {
    const int of = chore(warp, m, JT + 1 + NHV);
    if (of >= NHV) break;
    float* weight = heads + of * HEAD_FLOATS;
    float from = gw[m];                                // sum of rows j, j + 1, ... P - 1
#pragma unroll
    for (int d = 1; d < WIN; d <<= 1) {
      float other = __shfl_down_sync(FULL, from, d);
      if (lane + d < WIN) from += other;
    }
    const float after = __shfl_down_sync(FULL, from, 1);
    if (lane < WIN) weight[lane] = lane < P ? expf(lane + 1 < WIN ? after : 0.f) : 0.f;
    if (lane == 0) weight[WIN + TT * 2 * TT + 2 * TT + TT] = expf(from);
  }
}

// Solve for u of the new tokens by substitution; y is carried along. acc[x / 2][nt][2 (x % 2) + e]: value x.
__device__ __forceinline__ void substitute(float (&acc)[2][NT][4], const float* coef, const float* gram, int lane) {
  const int q = lane & 3;
#pragma unroll
  for (int s = 0; s < TT; s++) {
    float u[4];
#pragma unroll
    for (int x = 0; x < 4; x++) u[x] = __shfl_sync(FULL, acc[x / 2][s / 8][2 * (x % 2) + (s & 1)], (lane & ~3) | (s % 8) >> 1);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (8 * nt + 7 <= s) continue;                   // keys no later than s
      const int col = 8 * nt + 2 * q;
      const float2 c = *(const float2*)(coef + s * 2 * TT + col), d = *(const float2*)(gram + s * SS + col);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int t = (col + e) % TT;
        if (t > s || (t == s && col + e >= TT)) {      // a token that comes earlier is not touched: u may be NaN
          const float f = e ? c.y * d.y : c.x * d.x;
#pragma unroll
          for (int x = 0; x < 4; x++) acc[x / 2][nt][2 * (x % 2) + e] += f * u[x];
        }
      }
    }
  }
}
