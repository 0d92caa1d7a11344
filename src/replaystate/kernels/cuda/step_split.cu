// One replay step for K = V = 128 where state, rings or inputs are float32, on the tensor cores.
//
// Blocks, warps and token columns are those of step_parts.cuh. The products are mma.m16n8k8 on tf32 parts: a float32 operand
// x is x_hi + x_lo, both tf32, and x y = x_hi y_hi + (x_hi y_lo + x_lo y_hi), what is left out being about 2^-23 of it; a
// 16-bit operand is one tf32 part exactly. The large and the small products have accumulators of their own.
//
// Indices k are dealt to the columns of a product so that a lane reads 4 neighbouring ones: lane q has k = 16 g + 4 q + i,
// i = 0, 1 in one product and 2, 3 in the next. The fold has its values on the elements that the lane reads of the state,
// so it goes from registers to memory.
// Rows in shared memory have their 16-byte chunks XOR-ed with f(row): no bank conflicts.
//
// Compile-time: as step_fast.cu, with CPW = 1.

// Four neighbouring elements as they are in memory.
template <int D> struct Four {
  uint2 raw;
  __device__ __forceinline__ float operator[](int i) const { const u32 x = i & 2 ? raw.y : raw.x; return i & 1 ? high<D>(x) : low<D>(x); }
  __device__ __forceinline__ void zero() { raw = make_uint2(0, 0); }
  __device__ __forceinline__ void load(const void* p) { raw = ldg8(p); }
  __device__ __forceinline__ void load_shared(u32 at) { asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "r"(at) : "memory"); }
  __device__ __forceinline__ void gather(const void* p, i64 elem) {
    const u16* x = (const u16*)p;
    raw = make_uint2((u32)x[0] | (u32)x[elem] << 16, (u32)x[2 * elem] | (u32)x[3 * elem] << 16);
  }
  static __device__ __forceinline__ void store(void* p, const float* x) { *(uint2*)p = make_uint2(pack<D>(x[0], x[1]), pack<D>(x[2], x[3])); }
};
template <> struct Four<F32> {
  uint4 raw;
  __device__ __forceinline__ float operator[](int i) const { return __uint_as_float(i & 2 ? (i & 1 ? raw.w : raw.z) : (i & 1 ? raw.y : raw.x)); }
  __device__ __forceinline__ void zero() { raw = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ void load(const void* p) { raw = ldg16(p); }
  __device__ __forceinline__ void load_shared(u32 at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "r"(at) : "memory");
  }
  __device__ __forceinline__ void gather(const void* p, i64 elem) {
    const u32* x = (const u32*)p;
    raw = make_uint4(x[0], x[elem], x[2 * elem], x[3 * elem]);
  }
  static __device__ __forceinline__ void store(void* p, const float* x) { *(float4*)p = make_float4(x[0], x[1], x[2], x[3]); }
};

#define SIZE(D) ((D) == F32 ? 4 : 2)
#define TILE (32 * 128 * SIZE(STATE_D))
__device__ __forceinline__ int f(int row) { return ((row & 3) << 1) ^ ((row & 1) << 2); }
// Where elements 4 c .. 4 c + 3 of a row lie.
template <int D> __device__ __forceinline__ u32 four_at(int row, int c, int key) {
  return row * 128 * SIZE(D) + (D == F32 ? (c ^ f(key)) << 4 : (((c >> 1) ^ f(key)) << 4) + (c & 1) * 8);
}

struct Parts { u32 hi, lo; };
__device__ __forceinline__ Parts split(float x) {
  const u32 hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  return {hi, __float_as_uint(x - __uint_as_float(hi)) & 0xffffe000u};
}
__device__ __forceinline__ void mma_tf32(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The parts of an A fragment; the low ones are used where the operand is float32.
struct PartsA { u32 hi[4], lo[4]; };
template <int D> __device__ __forceinline__ PartsA split_a(float a0, float a1, float a2, float a3) {
  PartsA a;
  const float x[4] = {a0, a1, a2, a3};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (D == F32) { const Parts y = split(x[i]); a.hi[i] = y.hi; a.lo[i] = y.lo; }
    else { a.hi[i] = __float_as_uint(x[i]); a.lo[i] = 0; }
  }
  return a;
}
// large + small += a b, where a is of dtype DA and b of dtype DB.
template <int DA, int DB> __device__ __forceinline__ void product(float* large, float* small, const PartsA& a, Parts b0, Parts b1) {
  mma_tf32(large, a.hi, b0.hi, b1.hi);
  if (DB == F32) mma_tf32(small, a.hi, b0.lo, b1.lo);
  if (DA == F32) mma_tf32(small, a.lo, b0.hi, b1.hi);
}

template <int D> __device__ __forceinline__ Four<D> ld_io(const void* p, i64 at, i64 elem) {
  Four<D> x;
  const char* from = (const char*)p + at * SIZE(D);
  if (VEC) x.load(from); else x.gather(from, elem);
  return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) step_split(const __grid_constant__ StepArgs p) {
  wait_for_previous();
  constexpr int K = 128, V = 128, ROW = 128 * SIZE(RING_D);
  extern __shared__ __align__(128) unsigned char smem[];
  unsigned char* sK = smem + NWARP * TILE;             // [WIN][128] window keys
  unsigned char* sX = sK + WIN * ROW;                  // [XROWS][128] normalised keys, then queries: float32
  float* sS = (float*)(sX + XROWS * 512);              // [WIN][SS] scores of window keys
  float* sG = sS + WIN * SS;                           // [TT][SS] scores of new keys
  float* sH = sG + TT * SS;                            // per value head, see set_gates

  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, r = lane >> 2, q = lane & 3;
  const int R1 = (int)p.R - 1, row = blockIdx.y, part = blockIdx.x, parts = gridDim.x;
  const int hv0 = part / VS * NHV, h = hv0 * (int)p.inverse_group >> 20;
  const int local = warp / WPH, hv = hv0 + local, chunk = part % VS * WPH + warp % WPH;
  const bool owns_key = hv0 == h * (int)p.group && part % VS == 0;

  int head_tokens, tail_tokens;
  row_range(p, head_tokens, tail_tokens);
  RawGates raw;
  load_layer_gates(p, raw, warp, hv0);
  Row w = make_row(p, load_row(p, row));
  const Cursors cursors = load_cursors(p, row, w);
  const u32 tile = smem_addr(smem) + warp * TILE;      // this warp's rows of the state
  S_::T* state = (S_::T*)p.state + wide(w.slot, p.state_slot) + (hv * V + chunk * 32) * K;
  if (w.real) {
    constexpr int CHUNKS = 8 * SIZE(STATE_D);          // of 16 bytes, a row
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int at = 32 * i + lane, v = at / CHUNKS, c = at % CHUNKS;
      cp_async16(tile + v * 16 * CHUNKS + ((c ^ f(v >> 2)) << 4), (const char*)state + 16 * at, true);
    }
  }
  cp_commit();
  // Keys, queries and gates of the new tokens do not wait for the cursors.
  constexpr int XPW = (XROWS + NWARP - 1) / NWARP;
  Four<IO_D> x4[XPW];
#pragma unroll
  for (int m = 0; m < XPW; m++) {
    const int i = warp + m * NWARP, t = i % TT;
    x4[m].zero();
    if (i < XROWS && t < w.length && w.real) {
      const bool is_q = i >= TT;
      const i64 elem = is_q ? p.q_elem : p.k_elem;
      const i64 at = (PLAIN ? 0 : wide(row, is_q ? p.q_row : p.k_row)) + wide(w.begin + t, is_q ? p.q_tok : p.k_tok) + wide(h, is_q ? p.q_head : p.k_head);
      x4[m] = ld_io<IO_D>(is_q ? p.q : p.k, at + 4 * lane * (VEC ? 1 : elem), elem);
    }
  }
  load_token_gates(p, w, raw, row, warp, lane, hv0);
  settle_row(p, w, cursors, part);
  if (!w.alive) {
    cp_wait<0>();
    zero_outputs(p, w, row, head_tokens, tail_tokens, hv0, NHV, part % VS * (V / VS), (part % VS + 1) * (V / VS));
    return;
  }
  const int P = w.P, n = w.length, base = w.base;
  const bool folds = P >= (int)p.flush_min;

  // Loads that need the cursors, all in flight together: window keys, this warp's window corrections and values.
  R_::T* k_ring = (R_::T*)p.k_ring + wide(w.slot, p.k_slot) + h * (R1 + 1) * K;
  R_::T* u_ring = (R_::T*)p.u_ring + wide(w.slot, p.u_slot) + hv * (R1 + 1) * V + chunk * 32 + 4 * r;
  float* g_ring = p.g_ring + wide(w.slot, p.g_slot) + hv0 * (R1 + 1);
  float gw[GATES];
  load_window_decays(gw, g_ring, base, P, R1, warp, lane);
  constexpr int CHUNKS = ROW / 16, KEYS = WIN * CHUNKS / THREADS;
  uint4 key[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int j = (tid + i * THREADS) / CHUNKS, c = tid % CHUNKS;
    key[i] = j < P ? ldg16((const char*)(k_ring + ((base + j) & R1) * K) + 16 * c) : make_uint4(0, 0, 0, 0);
  }
  constexpr int VT = TT == 4 ? 2 : TT / 4;
  Four<RING_D> uw[4 * JT];                             // u of window rows 16 jt + 4 i + q
  Four<IO_D> vt[VT];                                   // v of this lane's keys
#pragma unroll
  for (int i = 0; i < 4 * JT; i++) {
    const int j = 4 * i + q;
    uw[i].zero();
    if (j < P) uw[i].load(u_ring + ((base + j) & R1) * V);
  }
#pragma unroll
  for (int i = 0; i < VT; i++) {
    const int t = 8 * (i / 2) + 2 * q + (i & 1);
    vt[i].zero();
    if (t < n && t < TT) {
      const i64 at = (PLAIN ? 0 : wide(row, p.v_row)) + wide(w.begin + t, p.v_tok) + wide(hv, p.v_head);
      vt[i] = ld_io<IO_D>(p.v, at + (chunk * 32 + 4 * r) * (VEC ? 1 : p.v_elem), p.v_elem);
    }
  }

  // Normalise; append the new keys.
#pragma unroll
  for (int m = 0; m < XPW; m++) {
    const int i = warp + m * NWARP, t = i % TT;
    if (i < XROWS) {
      float x[4] = {x4[m][0], x4[m][1], x4[m][2], x4[m][3]}, sum = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
#pragma unroll
      for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(FULL, sum, d);
      const float norm = 1.f / sqrtf(sum + 1e-6f);
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] *= norm;
      *(float4*)(sX + four_at<F32>(i, lane, i)) = make_float4(x[0], x[1], x[2], x[3]);
      if (i < TT && t < n && owns_key) Four<RING_D>::store(k_ring + ((base + P + t) & R1) * K + 4 * lane, x);
    }
  }
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int j = (tid + i * THREADS) / CHUNKS, c = tid % CHUNKS;
    *(uint4*)(sK + j * ROW + ((c ^ f(j)) << 4)) = key[i];
  }
  __syncthreads();

  const int arrived = enter_row(p, w);
  set_gates(p, w, raw, sH, g_ring, part % VS == 0, warp, lane);
  set_weights(gw, sH, P, warp, lane);
  // Scores of the window's keys and of the new ones: one tile of 16 a warp.
  const u32 keys = smem_addr(sK), columns = smem_addr(sX);
#pragma unroll 1
  for (int task = warp; task < JT + 1; task += NWARP) {
    const bool gram = task == JT;
    float s[NT][4], small[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[nt][e] = small[nt][e] = 0.f;
    if (gram || P > 16 * task) {
#pragma unroll 2
      for (int g = 0; g < 8; g++) {
        Four<F32> b[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) b[nt].load_shared(columns + four_at<F32>(8 * nt + r, 4 * g + q, r));
        Four<RING_D> lo, hi;
        if (!gram) {
          const int j = 16 * task + r;
          lo.load_shared(keys + four_at<RING_D>(j, 4 * g + q, j));
          hi.load_shared(keys + four_at<RING_D>(j + 8, 4 * g + q, j + 8));
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          constexpr int NEXT = NT == 1 ? 0 : 1;
          PartsA a;
          if (gram) a = split_a<F32>(b[0][i], TT == 16 ? b[NEXT][i] : 0.f, b[0][i + 1], TT == 16 ? b[NEXT][i + 1] : 0.f);
          else a = split_a<RING_D>(lo[i], hi[i], lo[i + 1], hi[i + 1]);
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            const Parts b0 = split(b[nt][i]), b1 = split(b[nt][i + 1]);
            if (gram) product<F32, F32>(s[nt], small[nt], a, b0, b1);
            else product<RING_D, F32>(s[nt], small[nt], a, b0, b1);
          }
        }
      }
    }
    float* to = gram ? sG : sS + 16 * task * SS;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int e = 0; e < 4; e++) s[nt][e] += small[nt][e];
      if (!gram || r < TT) *(float2*)(to + r * SS + 8 * nt + 2 * q) = make_float2(s[nt][0], s[nt][1]);
      if (!gram || r + 8 < TT) *(float2*)(to + (r + 8) * SS + 8 * nt + 2 * q) = make_float2(s[nt][2], s[nt][3]);
    }
  }
  cp_wait<0>();
  __syncwarp();
  // S_0 x for all token columns x.
  float acc[2][NT][4], small[2][NT][4];
#pragma unroll
  for (int mt = 0; mt < 2; mt++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[mt][nt][e] = small[mt][nt][e] = 0.f;
#pragma unroll (TT == 4 ? 8 : 2)
  for (int g = 0; g < 8; g++) {
    Four<STATE_D> s[4];
    Four<F32> b[NT];
#pragma unroll
    for (int x = 0; x < 4; x++) s[x].load_shared(tile + four_at<STATE_D>(4 * r + x, 4 * g + q, r));
#pragma unroll
    for (int nt = 0; nt < NT; nt++) b[nt].load_shared(columns + four_at<F32>(8 * nt + r, 4 * g + q, r));
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      PartsA a[2];
#pragma unroll
      for (int mt = 0; mt < 2; mt++) a[mt] = split_a<STATE_D>(s[2 * mt][i], s[2 * mt + 1][i], s[2 * mt][i + 1], s[2 * mt + 1][i + 1]);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const Parts b0 = split(b[nt][i]), b1 = split(b[nt][i + 1]);
#pragma unroll
        for (int mt = 0; mt < 2; mt++) product<STATE_D, F32>(acc[mt][nt], small[mt][nt], a[mt], b0, b1);
      }
    }
  }
  // ... e^{G_P} S_0 x + sum_j e^{G_P - G_j} u_j (k_j . x)
  __syncthreads();                                     // the scores are there
  const float *weight = sH + local * HEAD_FLOATS, *coef = weight + WIN, *own = coef + TT * 2 * TT, *betas = own + 2 * TT;
  const float decay = betas[TT];
#pragma unroll
  for (int mt = 0; mt < 2; mt++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        acc[mt][nt][e] = decay * (acc[mt][nt][e] + small[mt][nt][e]);
        small[mt][nt][e] = 0.f;
      }
#pragma unroll
  for (int ks = 0; ks < 2 * JT; ks++)
    if (P > 8 * ks) {
      const int j = 8 * ks + q;
      const float w0 = weight[j], w1 = weight[j + 4];
      PartsA a[2];
#pragma unroll
      for (int mt = 0; mt < 2; mt++) a[mt] = split_a<RING_D>(uw[2 * ks][2 * mt], uw[2 * ks][2 * mt + 1], uw[2 * ks + 1][2 * mt], uw[2 * ks + 1][2 * mt + 1]);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const float* s = sS + j * SS + 8 * nt + r;
        const Parts b0 = split(s[0] * w0), b1 = split(s[4 * SS] * w1);
#pragma unroll
        for (int mt = 0; mt < 2; mt++) product<RING_D, F32>(acc[mt][nt], small[mt][nt], a[mt], b0, b1);
      }
    }
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int col = 8 * nt + 2 * q;
    const float2 factor = *(const float2*)(own + col);
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[mt][nt][e] = (acc[mt][nt][e] + small[mt][nt][e]) * (e & 1 ? factor.y : factor.x);
    if (8 * nt < TT && (TT > 4 || q < 2)) {
      const float b0 = betas[col], b1 = betas[col + 1];
#pragma unroll
      for (int x = 0; x < 4; x++) {
        acc[x / 2][nt][2 * (x % 2)] += b0 * vt[2 * nt < VT ? 2 * nt : 0][x];
        acc[x / 2][nt][2 * (x % 2) + 1] += b1 * vt[2 * nt < VT ? 2 * nt + 1 : 0][x];
      }
    }
  }
  substitute(acc, coef, sG, lane);
  // Append u, write y.
  bool hit_u = false, hit_s = false;
  const i64 out_row = (FLAG(p.padded_out, 0) || !FLAG(p.ragged, 1) ? wide(row, p.out_row) : wide(w.begin, p.out_tok)) + wide(hv, p.out_head);
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int col = 8 * nt + 2 * q + e, t = col % TT;
      float y[4] = {acc[0][nt][e], acc[0][nt][2 + e], acc[1][nt][e], acc[1][nt][2 + e]};
      if (t < n) {
        if (col < TT) {
#pragma unroll
          for (int x = 0; x < 4; x++) y[x] = saturate(y[x], R_::MAX, hit_u);
          Four<RING_D>::store(u_ring + ((base + P + t) & R1) * V, y);
        } else {
          const i64 elem = VEC ? 1 : p.out_elem;
          IO_::T* out = (IO_::T*)p.out + out_row + wide(t, p.out_tok) + (chunk * 32 + 4 * r) * elem;
          if (VEC) Four<IO_D>::store(out, y);
          else {
#pragma unroll
            for (int x = 0; x < 4; x++) out[x * elem] = IO_::down(y[x]);
          }
        }
      }
    }
  if (folds) {
    PartsA a[2 * JT][2];                               // e^{G_P - G_j} u_j
#pragma unroll
    for (int ks = 0; ks < 2 * JT; ks++) {
      const float w0 = weight[8 * ks + q], w1 = weight[8 * ks + q + 4];
#pragma unroll
      for (int mt = 0; mt < 2; mt++)
        a[ks][mt] = split_a<F32>(w0 * uw[2 * ks][2 * mt], w0 * uw[2 * ks][2 * mt + 1], w1 * uw[2 * ks + 1][2 * mt], w1 * uw[2 * ks + 1][2 * mt + 1]);
    }
#pragma unroll 2
    for (int g = 0; g < 8; g++) {
      float d[2][2][4], e[2][2][4];
#pragma unroll
      for (int i = 0; i < 16; i++) d[i >> 3][i >> 2 & 1][i & 3] = e[i >> 3][i >> 2 & 1][i & 3] = 0.f;
#pragma unroll
      for (int ks = 0; ks < 2 * JT; ks++) {
        float b[2][2];                                 // rows j, j + 4; two neighbouring keys
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const int j = 8 * ks + 4 * m + q;
          const u32 at = keys + four_at<RING_D>(j, 4 * g + (r >> 1), j) + 2 * (r & 1) * SIZE(RING_D);
          if (RING_D == F32) {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(b[m][0]), "=f"(b[m][1]) : "r"(at) : "memory");
          } else {
            const u32 x = lds(at);
            b[m][0] = low<RING_D>(x); b[m][1] = high<RING_D>(x);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          Parts b0 = {__float_as_uint(b[0][i]), 0}, b1 = {__float_as_uint(b[1][i]), 0};
          if (RING_D == F32) { b0 = split(b[0][i]); b1 = split(b[1][i]); }
#pragma unroll
          for (int mt = 0; mt < 2; mt++) product<F32, RING_D>(d[mt][i], e[mt][i], a[ks][mt], b0, b1);
        }
      }
#pragma unroll
      for (int x = 0; x < 4; x++) {
        Four<STATE_D> s;
        s.load_shared(tile + four_at<STATE_D>(4 * r + x, 4 * g + q, r));
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = 2 * (x & 1) + (i >> 1);
          y[i] = saturate(fmaf(decay, s[i], d[x >> 1][i & 1][at] + e[x >> 1][i & 1][at]), S_::MAX, hit_s);
        }
        Four<STATE_D>::store(state + (4 * r + x) * K + 16 * g + 4 * q, y);
      }
    }
  }
  if ((PLAIN || p.status) && __any_sync(FULL, hit_u || hit_s)) {
    const int hit = (hit_u ? RING_SATURATED : 0) | (hit_s ? STATE_SATURATED : 0);
    if (hit) set_bits(&p.status[wide(w.slot, p.status_stride)], hit);
  }
  finish_row(p, w, parts, arrived);
  zero_outputs(p, w, row, head_tokens, tail_tokens, hv0, NHV, part % VS * (V / VS), (part % VS + 1) * (V / VS));
}
