// One replay step for K = V = 128 with 16-bit inputs, state and rings, on the tensor cores.
//
// A block has one row, NHV value heads of one key head, and 1 / VS of their values; a warp has CPW times 32 values of one
// head.
// Everything that belongs to the key head (normalised keys and queries, window keys, scores, Gram matrix) is computed
// once a block. The state comes in by cp.async, 8 KB a warp, while that is done.
//
// mma.m16n8k16 with A = 16 rows of the state, B = token columns: n = side * TT + t (side 0: key, 1: query). The warp's 32
// values are dealt to A rows as v = 4 r + x, r = lane / 4, x = 0..3 (x = 2 mt + half), so that a lane holds 4
// neighbouring values of the token columns 2 q, 2 q + 1 (q = lane % 4): v, u and y move as 8-byte vectors and need no
// shuffle, and the fold's product lands on the elements of the state that the lane's A fragment has.
// State rows are 256 bytes in shared memory, their 16-byte chunks XOR-ed with v / 4 (mod 8): no bank conflicts.
// A sum's order does not depend on NHV, VS, CPW or the batch.
//
// A 16-bit float matrix product is exact up to the rounding of its inputs: q and k are unit vectors in float16; beside a
// bfloat16 operand they are split into two bfloat16 parts.
//
// Compile-time: STATE_D, IO_D, RING_D, TT (4, 8, 16), WIN (16, 32), NHV, VS, CPW, VEC (inputs and outputs in 8-byte
// vectors), PLAIN, MIN_BLOCKS.

#define SPLIT (STATE_D == BF16 || RING_D == BF16)
#define HALF_X (STATE_D == F16 || RING_D == F16)  // float16 keys and queries are needed

// Four neighbouring elements of an io tensor; any element-aligned view.
__device__ __forceinline__ uint2 ld_io4(const void* p, i64 i, i64 elem) {
  const u16* x = (const u16*)p + i;
  if (VEC) return ldg8(x);
  return make_uint2((u32)x[0] | (u32)x[elem] << 16, (u32)x[2 * elem] | (u32)x[3 * elem] << 16);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) step_fast(const __grid_constant__ StepArgs p) {
  wait_for_previous();
  constexpr int K = 128, V = 128;
  extern __shared__ __align__(128) unsigned char smem[];
  unsigned char* sK = smem + NWARP * CPW * 8192;       // [WIN][128] window keys
  unsigned char* sX = sK + WIN * 256;                  // [XROWS][128] normalised keys, then queries: float16
  unsigned char* sXb = sX + (HALF_X ? XROWS * 256 : 0);  // the same as bfloat16 high and low parts
  float* sS = (float*)(sXb + (SPLIT ? 2 * XROWS * 256 : 0));  // [WIN][SS] scores of window keys
  float* sG = sS + WIN * SS;                           // [TT][SS] scores of new keys
  float* sH = sG + TT * SS;                            // per value head: weights, coefficients, own factors, betas

  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, r = lane >> 2, q = lane & 3;
  const int R1 = (int)p.R - 1, row = blockIdx.y, part = blockIdx.x, parts = gridDim.x;
  const int hv0 = part / VS * NHV, h = hv0 * (int)p.inverse_group >> 20;
  const int local = warp / WPH, hv = hv0 + local, chunk = (part % VS * WPH + warp % WPH) * CPW;
  const bool owns_key = hv0 == h * (int)p.group && part % VS == 0;

  // Chores of the block, dealt out to its warps: score window tiles and new keys, gates of each head, window weights.
  int head_tokens, tail_tokens;
  row_range(p, head_tokens, tail_tokens);
  RawGates raw;
  load_layer_gates(p, raw, warp, hv0);
  Row w = make_row(p, load_row(p, row));
  const Cursors cursors = load_cursors(p, row, w);
  unsigned char* tile = smem + warp * CPW * 8192;      // this warp's rows of the state
  const u32 tile_addr = smem_addr(tile);
  u16* state = (u16*)p.state + wide(w.slot, p.state_slot) + (hv * V + chunk * 32) * K;
  const u32 cell = (lane >> 4) * 256 + ((lane & 15) << 4);  // where the lane's 16 bytes of two rows lie, not swizzled
  if (w.real) {
    const u16* from = state + lane * 8;
#pragma unroll
    for (int i = 0; i < 16 * CPW; i++)
      cp_async16(tile_addr + ((i * 512 + cell) ^ ((i >> 1 & 7) << 4)), from + 256 * i, true);
  }
  cp_commit();
  // Keys, queries and gates of the new tokens do not wait for the cursors.
  constexpr int XPW = (XROWS + NWARP - 1) / NWARP;
  uint2 x4[XPW];
#pragma unroll
  for (int m = 0; m < XPW; m++) {
    const int i = warp + m * NWARP, t = i % TT;
    x4[m] = make_uint2(0, 0);
    if (i < XROWS && t < w.length && w.real) {
      const bool is_q = i >= TT;
      const i64 at = (PLAIN ? 0 : wide(row, is_q ? p.q_row : p.k_row)) + wide(w.begin + t, is_q ? p.q_tok : p.k_tok) + wide(h, is_q ? p.q_head : p.k_head);
      const i64 elem = is_q ? p.q_elem : p.k_elem;
      x4[m] = ld_io4(is_q ? p.q : p.k, at + (VEC ? 4 * lane : 4 * lane * elem), elem);
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
  const u16* k_ring = (const u16*)p.k_ring + wide(w.slot, p.k_slot) + h * (R1 + 1) * K;
  u16* u_ring = (u16*)p.u_ring + wide(w.slot, p.u_slot) + hv * (R1 + 1) * V + chunk * 32 + 4 * r;
  float* g_ring = p.g_ring + wide(w.slot, p.g_slot) + hv0 * (R1 + 1);
  float gw[GATES];
  load_window_decays(gw, g_ring, base, P, R1, warp, lane);
  constexpr int KEYS = (WIN * 16 + THREADS - 1) / THREADS;
  uint4 key[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    int j = (tid + i * THREADS) >> 4;
    key[i] = j < P ? ldg16(k_ring + ((base + j) & R1) * K + (tid & 15) * 8) : make_uint4(0, 0, 0, 0);
  }
  constexpr int VT = TT == 4 ? 2 : TT / 4;
  uint2 uw[CPW][4 * JT], vt[CPW][VT];                  // u of window rows 16 jt + 2q, +1, +8, +9, and v of this lane's keys
#pragma unroll
  for (int i = 0; i < 4 * JT; i++) {
    const int j = i / 4 * 16 + 2 * q + (i & 1) + (i & 2) * 4;
    const u16* from = u_ring + ((base + j) & R1) * V;
#pragma unroll
    for (int c = 0; c < CPW; c++) uw[c][i] = j < P ? ldg8(from + 32 * c) : make_uint2(0, 0);
  }
#pragma unroll
  for (int i = 0; i < VT; i++) {
    const int t = 8 * (i / 2) + 2 * q + (i & 1);
    const i64 at = (PLAIN ? 0 : wide(row, p.v_row)) + wide(w.begin + t, p.v_tok) + wide(hv, p.v_head);
    const int v = chunk * 32 + 4 * r;
#pragma unroll
    for (int c = 0; c < CPW; c++)
      vt[c][i] = t < n && t < TT ? ld_io4(p.v, at + (VEC ? v + 32 * c : (v + 32 * c) * p.v_elem), p.v_elem) : make_uint2(0, 0);
  }

  // Normalise; append the new keys.
#pragma unroll
  for (int m = 0; m < XPW; m++) {
    const int i = warp + m * NWARP, t = i % TT;
    if (i < XROWS) {
      float x0 = low<IO_D>(x4[m].x), x1 = high<IO_D>(x4[m].x), x2 = low<IO_D>(x4[m].y), x3 = high<IO_D>(x4[m].y);
      float sum = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3;
#pragma unroll
      for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(FULL, sum, d);
      const float norm = rsqrtf(sum + 1e-6f);
      x0 *= norm; x1 *= norm; x2 *= norm; x3 *= norm;
      const int at = i * 256 + (((lane >> 1) ^ (i & 7)) << 4) + (lane & 1) * 8;
      uint2 packed = make_uint2(pack<F16>(x0, x1), pack<F16>(x2, x3));
      if (HALF_X) *(uint2*)(sX + at) = packed;
      if (SPLIT) {
        uint2 hi = make_uint2(pack<BF16>(x0, x1), pack<BF16>(x2, x3));
        *(uint2*)(sXb + at) = hi;
        *(uint2*)(sXb + XROWS * 256 + at) = make_uint2(rest(x0, x1, hi.x), rest(x2, x3, hi.y));
        if (RING_D == BF16) packed = hi;
      }
      if (i < TT && t < n && owns_key)
        *(uint2*)((u16*)k_ring + ((base + P + t) & R1) * K + 4 * lane) = packed;
    }
  }
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    int j = (tid + i * THREADS) >> 4;
    *(uint4*)(sK + j * 256 + (((tid & 15) ^ (j & 7)) << 4)) = key[i];
  }
  __syncthreads();

  const int arrived = enter_row(p, w);
  set_gates(p, w, raw, sH, g_ring, part % VS == 0, warp, lane);
  set_weights(gw, sH, P, warp, lane);
  // Scores of the window's keys and of the new ones: one tile of 16 a warp.
#pragma unroll
  for (int task = warp; task < JT + 1; task += NWARP) {
    const bool gram = task == JT;
    float s[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) s[nt][0] = s[nt][1] = s[nt][2] = s[nt][3] = 0.f;
    if (gram || P > 16 * task) {
#pragma unroll
      for (int kp = 0; kp < 4; kp++) {
        u32 b[NT][4], bl[NT][4], a[4], al[4];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          const u32 at = (8 * nt + (lane & 7)) * 256 + (((4 * kp + (lane >> 3)) ^ (lane & 7)) << 4);
          if (gram ? HALF_X : RING_D == F16) ldsm4(b[nt], smem_addr(sX) + at);
          else {
            ldsm4(b[nt], smem_addr(sXb) + at);
            ldsm4(bl[nt], smem_addr(sXb) + XROWS * 256 + at);
          }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
          if (gram) {
            constexpr int NEXT = NT == 1 ? 0 : 1;
            a[0] = b[0][2 * m]; a[2] = b[0][2 * m + 1];
            a[1] = TT == 16 ? b[NEXT][2 * m] : 0; a[3] = TT == 16 ? b[NEXT][2 * m + 1] : 0;
            if (!HALF_X) {
              al[0] = bl[0][2 * m]; al[2] = bl[0][2 * m + 1];
              al[1] = TT == 16 ? bl[NEXT][2 * m] : 0; al[3] = TT == 16 ? bl[NEXT][2 * m + 1] : 0;
            }
          } else {
            int j = 16 * task + (lane & 7) + (lane & 8);
            ldsm4(a, smem_addr(sK) + j * 256 + (((4 * kp + 2 * m + (lane >> 4)) ^ (j & 7)) << 4));
          }
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            if (gram ? HALF_X : RING_D == F16) mma<F16>(s[nt], a, b[nt][2 * m], b[nt][2 * m + 1]);
            else {
              mma<BF16>(s[nt], a, b[nt][2 * m], b[nt][2 * m + 1]);
              mma<BF16>(s[nt], a, bl[nt][2 * m], bl[nt][2 * m + 1]);
              if (gram && !HALF_X) mma<BF16>(s[nt], al, b[nt][2 * m], b[nt][2 * m + 1]);
            }
          }
        }
      }
    }
    float* to = gram ? sG : sS + 16 * task * SS;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (!gram || r < TT) *(float2*)(to + r * SS + 8 * nt + 2 * q) = make_float2(s[nt][0], s[nt][1]);
      if (!gram || r + 8 < TT) *(float2*)(to + (r + 8) * SS + 8 * nt + 2 * q) = make_float2(s[nt][2], s[nt][3]);
    }
  }
  cp_wait<0>();
  __syncwarp();
  // S_0 x for all token columns x.
  float products[CPW][2][NT][4];
#pragma unroll
  for (int c = 0; c < CPW; c++)
#pragma unroll
  for (int mt = 0; mt < 2; mt++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++) products[c][mt][nt][0] = products[c][mt][nt][1] = products[c][mt][nt][2] = products[c][mt][nt][3] = 0.f;
  const u32 frag = tile_addr + 4 * (lane & 7) * 256 + (lane >> 3 & 1) * 256;
#pragma unroll
  for (int kp = 0; kp < 4; kp++) {
    u32 b[NT][4], bl[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      u32 at = (8 * nt + (lane & 7)) * 256 + (((4 * kp + (lane >> 3)) ^ (lane & 7)) << 4);
      if (STATE_D == F16) ldsm4(b[nt], smem_addr(sX) + at);
      else {
        ldsm4(b[nt], smem_addr(sXb) + at);
        ldsm4(bl[nt], smem_addr(sXb) + XROWS * 256 + at);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int x = 0; x < 2 * CPW; x++) {
        const int c = x / 2, mt = x % 2;
        u32 a[4];
        ldsm4(a, frag + c * 8192 + 2 * mt * 256 + (((4 * kp + 2 * m + (lane >> 4)) ^ (lane & 7)) << 4));
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          mma<STATE_D>(products[c][mt][nt], a, b[nt][2 * m], b[nt][2 * m + 1]);
          if (STATE_D == BF16) mma<STATE_D>(products[c][mt][nt], a, bl[nt][2 * m], bl[nt][2 * m + 1]);
        }
      }
  }
  // ... e^{G_P} S_0 x + sum_j e^{G_P - G_j} u_j (k_j . x)
  __syncthreads();                                     // the scores are there
  const float *weight = sH + local * HEAD_FLOATS, *coef = weight + WIN, *own = coef + TT * 2 * TT, *betas = own + 2 * TT;
  const float decay = betas[TT];
  bool hit_u = false, hit_s = false;
  const i64 out_row = (FLAG(p.padded_out, 0) || !FLAG(p.ragged, 1) ? wide(row, p.out_row) : wide(w.begin, p.out_tok)) + wide(hv, p.out_head);
#pragma unroll
  for (int c = 0; c < CPW; c++) {
  float (&acc)[2][NT][4] = products[c];
#pragma unroll
  for (int mt = 0; mt < 2; mt++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[mt][nt][e] *= decay;
  u32 ua[JT][2][4];                                    // u as A fragments: values by window rows
  u_fragments<JT>(ua, uw[c]);
#pragma unroll
  for (int jt = 0; jt < JT; jt++)
    if (P > 16 * jt) {
      const int j = 16 * jt + 2 * q;
      const float w0 = weight[j], w1 = weight[j + 1], w2 = weight[j + 8], w3 = weight[j + 9];
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const float* s = sS + j * SS + 8 * nt + r;
        const float s0 = s[0] * w0, s1 = s[SS] * w1, s2 = s[8 * SS] * w2, s3 = s[9 * SS] * w3;
        const u32 b0 = pack<RING_D>(s0, s1), b1 = pack<RING_D>(s2, s3);
#pragma unroll
        for (int mt = 0; mt < 2; mt++) mma<RING_D>(acc[mt][nt], ua[jt][mt], b0, b1);
        if (RING_D == BF16) {
          const u32 l0 = rest(s0, s1, b0), l1 = rest(s2, s3, b1);
#pragma unroll
          for (int mt = 0; mt < 2; mt++) mma<RING_D>(acc[mt][nt], ua[jt][mt], l0, l1);
        }
      }
    }
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int col = 8 * nt + 2 * q;
    const float2 f = *(const float2*)(own + col);
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[mt][nt][e] *= e & 1 ? f.y : f.x;
    if (8 * nt < TT) {
      const bool key = TT > 4 || q < 2;
      const float b0 = key ? betas[col] : 0.f, b1 = key ? betas[col + 1] : 0.f;
      const uint2 v0 = vt[c][2 * nt < VT ? 2 * nt : 0], v1 = vt[c][2 * nt < VT ? 2 * nt + 1 : 0];
      if (key) {
        acc[0][nt][0] += b0 * low<IO_D>(v0.x); acc[0][nt][2] += b0 * high<IO_D>(v0.x);
        acc[1][nt][0] += b0 * low<IO_D>(v0.y); acc[1][nt][2] += b0 * high<IO_D>(v0.y);
        acc[0][nt][1] += b1 * low<IO_D>(v1.x); acc[0][nt][3] += b1 * high<IO_D>(v1.x);
        acc[1][nt][1] += b1 * low<IO_D>(v1.y); acc[1][nt][3] += b1 * high<IO_D>(v1.y);
      }
    }
  }
  substitute(acc, coef, sG, lane);
  // Append u, write y.
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int col = 8 * nt + 2 * q + e, t = col % TT;
      const bool key = TT == 4 ? q < 2 : 8 * nt < TT;
      float x0 = acc[0][nt][e], x1 = acc[0][nt][2 + e], x2 = acc[1][nt][e], x3 = acc[1][nt][2 + e];
      uint2 packed;
      if (TT == 4 || key) {
        packed = make_uint2(pack<RING_D>(x0, x1), pack<RING_D>(x2, x3));
        if (key && t < n && fmaxf(fmaxf(fabsf(x0), fabsf(x1)), fmaxf(fabsf(x2), fabsf(x3))) > R_::MAX) {
          x0 = saturate(x0, R_::MAX, hit_u); x1 = saturate(x1, R_::MAX, hit_u);
          x2 = saturate(x2, R_::MAX, hit_u); x3 = saturate(x3, R_::MAX, hit_u);
          packed = make_uint2(pack<RING_D>(x0, x1), pack<RING_D>(x2, x3));
        }
      }
      if (!key) packed = make_uint2(pack<IO_D>(x0, x1), pack<IO_D>(x2, x3));
      u16* out = (u16*)p.out + out_row + wide(t, p.out_tok);
      if (VEC) {
        u16* to = key ? u_ring + ((base + P + t) & R1) * V + 32 * c : out + chunk * 32 + 4 * r + 32 * c;
        if (t < n) *(uint2*)to = packed;
      } else if (t < n) {
        if (key) *(uint2*)(u_ring + ((base + P + t) & R1) * V + 32 * c) = packed;
        else {
          out += (chunk * 32 + 4 * r + 32 * c) * p.out_elem;
          out[0] = (u16)packed.x; out[p.out_elem] = (u16)(packed.x >> 16);
          out[2 * p.out_elem] = (u16)packed.y; out[3 * p.out_elem] = (u16)(packed.y >> 16);
        }
      }
    }
  if (folds) {
    hit_s |= fold_tile<STATE_D, RING_D, JT>(tile_addr + c * 8192, smem_addr(sK), ua, weight, decay, lane);
    u16* to = state + c * 32 * K + lane * 8;
#pragma unroll 4
    for (int i = 0; i < 16; i++) *(uint4*)(to + 256 * i) = *(const uint4*)(tile + c * 8192 + ((i * 512 + cell) ^ ((i >> 1 & 7) << 4)));
  }
  }
  if ((PLAIN || p.status) && __any_sync(FULL, hit_u || hit_s)) {
    const int hit = (hit_u ? RING_SATURATED : 0) | (hit_s ? STATE_SATURATED : 0);
    if (hit) set_bits(&p.status[wide(w.slot, p.status_stride)], hit);
  }
  finish_row(p, w, parts, arrived);
  zero_outputs(p, w, row, head_tokens, tail_tokens, hv0, NHV, part % VS * (V / VS), (part % VS + 1) * (V / VS));
}
