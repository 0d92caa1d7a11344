// The same as fold.cu for K = V = 128 with 16-bit state and rings, on the tensor cores; not READ.
//
// Warps work alone: an item is (layer, row, value head, 32 values), its state tile and window keys come to the warp's own
// shared memory by cp.async, and the folded tile goes out in whole rows. The arithmetic is that of the step's fold.
//
// What a warp's next item is, is read while the data of the current one is on its way.
//
// Compile-time: STATE_D, RING_D, WIN (16, 32), WARPS.

#define JT (WIN / 16)

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) fold_fast(const __grid_constant__ FoldArgs p) {
  wait_for_previous();
  constexpr int K = 128, V = 128;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ Rows rows;
  __shared__ float weights[WARPS][WIN];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, r = lane >> 2, q = lane & 3;
  const int R1 = (int)p.R - 1, HV = (int)p.HV, group = HV / (int)p.H, mode = (int)p.mode;
  const u32 tile = smem_addr(smem) + warp * (8192 + WIN * 256), keys = tile + 8192;
  int* list = (int*)(smem + WARPS * (8192 + WIN * 256));
  scan_rows(p, (int*)smem, list, rows);
  const int active = rows.active;
  if (active == 0) return;
  const u32 items = (u32)p.layers * active * HV * 4, step = gridDim.x * WARPS;
  const u32 cell = (lane >> 4) * 256 + ((lane & 15) << 4);
  float* weight = weights[warp];
  u32 item = blockIdx.x * WARPS + warp;
  Item next;
  if (item < items) next = read_item(p, list[(item >> 2) / HV % active], 0);
  for (; item < items; item += step) {
    const int chunk = (int)(item & 3), hv = (int)((item >> 2) % HV), h = hv / group;
    const Layer& L = p.layer[(item >> 2) / HV / active];
    const Item it = next;
    const int C = it.C, base = it.base;
    const bool idle = C == 0 && it.src == it.dst;
    const i64 at = ((i64)hv * V + chunk * 32) * K + lane * 8;
    const u16* from = (const u16*)L.state + it.src * L.state_slot + at;
    u16* to = (u16*)L.state + it.dst * L.state_slot + at;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (!idle) cp_async16(tile + ((i * 512 + cell) ^ ((i >> 1 & 7) << 4)), from + 256 * i, true);
    float decay = 1.f;
    u32 ua[JT][2][4];
    uint2 uw[4 * JT];
    float sum = 0.f;
    if (C > 0) {
      const u16* k_ring = (const u16*)L.k + it.src * L.k_slot + (i64)h * p.R * K;
      const u16* u_ring = (const u16*)L.u + it.src * L.u_slot + (i64)hv * p.R * V + chunk * 32 + 4 * r;
#pragma unroll
      for (int i = 0; i < WIN / 2; i++) {
        const int j = 2 * i + (lane >> 4);
        cp_async16(keys + j * 256 + (((lane & 15) ^ (j & 7)) << 4), k_ring + ((base + j) & R1) * K + (lane & 15) * 8, j < C);
      }
#pragma unroll
      for (int i = 0; i < 4 * JT; i++) {
        const int j = i / 4 * 16 + 2 * q + (i & 1) + (i & 2) * 4;
        uw[i] = j < C ? ldg8(u_ring + ((base + j) & R1) * V) : make_uint2(0, 0);
      }
      if (lane < C) sum = L.g[it.src * L.g_slot + (i64)hv * p.R + ((base + lane) & R1)];
    }
    cp_commit();
    if (item + step < items) next = read_item(p, list[((item + step) >> 2) / HV % active], 0);
    if (idle) continue;
    if (C > 0) {
#pragma unroll
      for (int d = 1; d < WIN; d <<= 1) {
        float other = __shfl_down_sync(FULL, sum, d);
        if (lane + d < WIN) sum += other;
      }
      const float after = __shfl_down_sync(FULL, sum, 1);
      if (lane < WIN) weight[lane] = lane < C ? expf(lane + 1 < WIN ? after : 0.f) : 0.f;
      decay = expf(__shfl_sync(FULL, sum, 0));
      u_fragments<JT>(ua, uw);
    }
    cp_wait<0>();
    __syncwarp();
    if (C > 0 && fold_tile<STATE_D, RING_D, JT>(tile, keys, ua, weight, decay, lane) && (mode == MATERIALIZE || mode == FLUSH))
      atomicOr(&p.status[it.dst * p.status_stride], SATURATED_NOW);
    __syncwarp();
#pragma unroll 4
    for (int i = 0; i < 16; i++)
      *(uint4*)(to + 256 * i) = *(const uint4*)(smem + warp * (8192 + WIN * 256) + ((i * 512 + cell) ^ ((i >> 1 & 7) << 4)));
  }
  finish_rows(p, list, rows);
}
