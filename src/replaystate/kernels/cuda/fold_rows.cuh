// What the fold kernels share: arguments, the list of rows that are active, and the cursors at the end.
//
// Every block reads the whole list of rows and keeps the active ones in shared memory. The cursors are written by the block
// that finishes last: each block counts down the first active row's step record, which is 0 before and after.

#ifndef WARPS
#define WARPS 8
#endif
#define MAX_LAYERS 48
#define SATURATED_NOW (1 << 30)
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


struct Rows { int active, first, last_block, saturated; };

// Fill `list` with the active rows, ascending; `skip` is scratch of one int a row. One block-wide answer in `rows`.
__device__ __forceinline__ void scan_rows(const FoldArgs& p, int* skip, int* list, Rows& rows) {
  const int tid = threadIdx.x, mode = (int)p.mode, R = (int)p.R;
  const bool words = mode == MATERIALIZE || mode == FLUSH;
  if (tid == 0) { rows.active = 0; rows.first = 0x7fffffff; }
  bool any = mode == READ;                             // the quick way out of a call with nothing to do
  for (int i = tid; i < p.rows && !any; i += 32 * WARPS) any = ld_index(p.src, i * p.src_stride, p.src_wide) >= 0;
  if (!__syncthreads_or(any)) return;
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
      if (words && (p.status[src * p.status_stride] & DEAD)) skip[i] |= 4;
      if (mode == MATERIALIZE) {
        i64 count = ld_index(p.count, i * p.count_stride, p.count_wide);
        bool bad_count = count < 0 || count > live || (src == dst && count != live);
        if (bad_count && blockIdx.x == 0 && p.finalize) atomicOr(&p.status[src * p.status_stride], BAD_COUNT);
        bad |= bad_count;
      }
      if (bad) skip[i] |= 2;
    }
  }
  __syncthreads();
  if (words) {
    for (i64 i = tid; i < p.rows * p.num_layers; i += 32 * WARPS) {
      int row = (int)(i / p.num_layers);
      i64 l = i % p.num_layers;
      if (skip[row] == 1) continue;
      int record = ((volatile int*)p.step_records)[ld_index(p.src, row * p.src_stride, p.src_wide) * p.rec_slot + l * p.rec_layer];
      if (l == 0 ? record > 0 : record != 0) atomicOr(&skip[row], 8);
    }
    __syncthreads();
  }
  if (words && p.finalize && blockIdx.x == 0)           // pending sources are flagged; a dst that gets nothing must say so
    for (int i = tid; i < p.rows; i += 32 * WARPS) {
      if (skip[i] == 1 || !(skip[i] & 12)) continue;
      if (skip[i] & 8) atomicOr(&p.status[ld_index(p.src, i * p.src_stride, p.src_wide) * p.status_stride], NOT_COMMITTED);
      if (mode == MATERIALIZE) atomicOr(&p.status[ld_index(p.dst, i * p.dst_stride, p.dst_wide) * p.status_stride], DEAD);
    }
  if (tid < 32) {  // in order: the blocks share out the rows by their place in the list, so all must have the same list
    int kept = 0;
    for (int first = 0; first < p.rows; first += 32) {
      const bool keep = first + tid < p.rows && !skip[first + tid];
      const u32 mask = __ballot_sync(FULL, keep);
      if (keep) list[kept + __popc(mask & ((1u << tid) - 1))] = first + tid;
      kept += __popc(mask);
    }
    __syncwarp();
    if (tid == 0 && kept) { rows.active = kept; rows.first = list[0]; }
  }
  __syncthreads();
}

// Write the cursors once every block has read them.
__device__ __forceinline__ void finish_rows(const FoldArgs& p, const int* list, Rows& rows) {
  const int tid = threadIdx.x, mode = (int)p.mode, R = (int)p.R;
  if (mode != MATERIALIZE && mode != FLUSH || !p.finalize) return;
  int* arrivals = &p.step_records[ld_index(p.src, rows.first * p.src_stride, p.src_wide) * p.rec_slot];
  __syncthreads();
  if (tid == 0) {
    __threadfence();
    rows.last_block = atomicSub(arrivals, 1) == 1 - (int)gridDim.x;
    __threadfence();
  }
  __syncthreads();
  if (!rows.last_block) return;
  for (int i = tid; i < rows.active; i += 32 * WARPS) {
    int row = list[i];
    i64 src = ld_index(p.src, row * p.src_stride, p.src_wide), dst = ld_index(p.dst, row * p.dst_stride, p.dst_wide);
    int was = ((volatile int*)p.status)[src * p.status_stride], now = ((volatile int*)p.status)[dst * p.status_stride];
    p.status[dst * p.status_stride] = (was & ~SATURATED_NOW) | (now & SATURATED_NOW ? STATE_SATURATED : 0);
    if (mode == FLUSH) p.ring_start[src * p.rs_stride] = (p.ring_start[src * p.rs_stride] + p.num_committed[src * p.nc_stride]) % R;
    else p.ring_start[dst * p.rs_stride] = 0;
    p.num_committed[dst * p.nc_stride] = 0;
  }
  if (mode == MATERIALIZE)
    for (i64 i = tid; i < rows.active * p.num_layers; i += 32 * WARPS)
      p.step_records[ld_index(p.dst, list[i / p.num_layers] * p.dst_stride, p.dst_wide) * p.rec_slot + i % p.num_layers * p.rec_layer] = 0;
  __syncthreads();
  if (tid == 0) *arrivals = 0;
}
struct Item { int hv, row, base, C; i64 src, dst; };

// The item's row, cursors and slots; `at` counts rows within layers.
__device__ __forceinline__ Item read_item(const FoldArgs& p, int row, int hv) {
  Item x;
  x.hv = hv;
  x.row = row;
  x.src = ld_index(p.src, row * p.src_stride, p.src_wide);
  x.dst = p.mode == READ ? x.src : ld_index(p.dst, row * p.dst_stride, p.dst_wide);
  if (p.mode == PREFIX) {
    x.base = (int)((ld_index(p.start, row * p.start_stride, p.start_wide) % p.R + p.R) % p.R);
    x.C = (int)ld_index(p.count, row * p.count_stride, p.count_wide);
  } else {
    x.base = p.ring_start[x.src * p.rs_stride];
    x.C = p.mode == MATERIALIZE ? (int)ld_index(p.count, row * p.count_stride, p.count_wide) : p.num_committed[x.src * p.nc_stride];
  }
  return x;
}
