// Tensor-core pieces: mma.m16n8k16 and its fragments, and the fold of a tile of 32 x 128 16-bit state values.
//
// A tile lies in shared memory in rows of 256 bytes, their 16-byte chunks XOR-ed with v / 4 (mod 8); window keys in rows of
// 256 bytes, XOR-ed with the row (mod 8). Values are dealt to A rows as v = 4 r + x, r = lane / 4, x = 2 mt + half.

__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void cp_async16(u32 to, const void* from, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void ldsm4(u32* r, u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldsm4_trans(u32* r, u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void sts(u32 to, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
__device__ __forceinline__ u32 lds(u32 from) { u32 x; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory"); return x; }
template <int D> __device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  if (D == F16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <int D> __device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  if (D == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <int D> __device__ __forceinline__ float low(u32 x) { return Elem<D>::up((u16)x); }
template <int D> __device__ __forceinline__ float high(u32 x) {
  return D == BF16 ? __uint_as_float(x & 0xffff0000u) : Elem<D>::up((u16)(x >> 16));
}
// What is left of two floats after rounding to bfloat16, again as bfloat16.
__device__ __forceinline__ u32 rest(float lo, float hi, u32 packed) {
  return pack<BF16>(lo - low<BF16>(packed), hi - high<BF16>(packed));
}
// Element-wise max(|a|, |b|) of pairs, and whether the low half is an infinity.
template <int D> __device__ __forceinline__ u32 max_abs2(u32 a, u32 b) {
  u32 r;
  if (D == F16) asm("{ .reg .b32 x; and.b32 x, %2, 0x7fff7fff; max.f16x2 %0, %1, x; }" : "=r"(r) : "r"(a), "r"(b));
  else asm("{ .reg .b32 x; and.b32 x, %2, 0x7fff7fff; max.bf16x2 %0, %1, x; }" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
template <int D> __device__ __forceinline__ bool is_inf(u32 x) { return (x & 0x7fff) == (D == F16 ? 0x7c00 : 0x7f80); }
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
__device__ __forceinline__ uint2 ldg8(const void* p) {
  uint2 r;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
  return r;
}
__device__ __forceinline__ uint4 ldg16(const void* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}

// A fragments of u^T from the 8-byte vectors that a lane holds of window rows 16 jt + 2q, +1, +8, +9 (values 4 r ..).
template <int JT> __device__ __forceinline__ void u_fragments(u32 (&ua)[JT][2][4], const uint2* uw) {
#pragma unroll
  for (int jt = 0; jt < JT; jt++)
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint2 lo = uw[4 * jt + (i & 2)], hi = uw[4 * jt + (i & 2) + 1];
        ua[jt][mt][i] = mt ? prmt(lo.y, hi.y, i & 1 ? 0x7632 : 0x5410) : prmt(lo.x, hi.x, i & 1 ? 0x7632 : 0x5410);
      }
}

// tile <- decay tile + sum_j (weight_j u_j) k_j^T, saturated; whether a value of this lane was. ua is used up.
template <int SD, int RD, int JT>
__device__ __forceinline__ bool fold_tile(u32 tile, u32 keys, u32 (&ua)[JT][2][4], const float* weight, float decay, int lane) {
  const int r = lane >> 2, q = lane & 3;
  const u32 frag = tile + 4 * (lane & 7) * 256 + (lane >> 3 & 1) * 256;
  u32 ul[RD == BF16 ? JT : 1][2][4], most = 0;      // most: largest magnitude, in pairs; NaN does not count
#pragma unroll
  for (int jt = 0; jt < JT; jt++) {
    const int j = 16 * jt + 2 * q;
    const float w0 = weight[j], w1 = weight[j + 1], w2 = weight[j + 8], w3 = weight[j + 9];
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a0 = low<RD>(ua[jt][mt][i]) * (i & 2 ? w2 : w0), a1 = high<RD>(ua[jt][mt][i]) * (i & 2 ? w3 : w1);
        ua[jt][mt][i] = pack<RD>(a0, a1);
        if (RD == BF16) ul[RD == BF16 ? jt : 0][mt][i] = rest(a0, a1, ua[jt][mt][i]);
      }
  }
#pragma unroll 2
  for (int ks = 0; ks < 8; ks++) {
    u32 b[JT][4], a[2][4];
#pragma unroll
    for (int jt = 0; jt < JT; jt++) {
      const int j = 16 * jt + (lane & 15);
      ldsm4_trans(b[jt], keys + j * 256 + (((2 * ks + (lane >> 4)) ^ (j & 7)) << 4));
    }
#pragma unroll
    for (int mt = 0; mt < 2; mt++) ldsm4(a[mt], frag + 2 * mt * 256 + (((2 * ks + (lane >> 4)) ^ (lane & 7)) << 4));
    __syncwarp();
#pragma unroll
    for (int mt = 0; mt < 2; mt++) {
      float d[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        d[i][0] = decay * low<SD>(a[mt][2 * i]); d[i][1] = decay * high<SD>(a[mt][2 * i]);
        d[i][2] = decay * low<SD>(a[mt][2 * i + 1]); d[i][3] = decay * high<SD>(a[mt][2 * i + 1]);
#pragma unroll
        for (int jt = 0; jt < JT; jt++) {
          mma<RD>(d[i], ua[jt][mt], b[jt][2 * i], b[jt][2 * i + 1]);
          if (RD == BF16) mma<RD>(d[i], ul[RD == BF16 ? jt : 0][mt], b[jt][2 * i], b[jt][2 * i + 1]);
        }
        const u32 to = tile + (4 * r + 2 * mt) * 256 + 4 * q + (((2 * ks + i) ^ r) << 4);
        const u32 s0 = pack<SD>(d[i][0], d[i][1]), s1 = pack<SD>(d[i][2], d[i][3]);
        most = max_abs2<SD>(max_abs2<SD>(most, s0), s1);
        sts(to, s0);
        sts(to + 256, s1);
      }
    }
  }
  __syncwarp();
  bool hit = false;
  if (__any_sync(FULL, is_inf<SD>(most) || is_inf<SD>(most >> 16))) {  // infinity becomes the largest finite value
    for (int i = lane; i < 2048; i += 32) {
      u32 x = lds(tile + 4 * i);
      if (is_inf<SD>(x)) { hit = true; x -= 1; }
      if (is_inf<SD>(x >> 16)) { hit = true; x -= 0x10000; }
      sts(tile + 4 * i, x);
    }
    __syncwarp();
  }
  return hit;
}
