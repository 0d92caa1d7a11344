// Publish the cursors of a step: one warp a row, its lanes over the layers' records.

struct CommitArgs {
  const void *state_indices, *num_accepted;
  int *ring_start, *num_committed, *step_records, *status;
  i64 idx_wide, acc_wide, idx_stride, acc_stride, rs_stride, nc_stride, status_stride, rec_slot, rec_layer;
  i64 B, num_layers, num_slots, null_slot, W, R;
};

extern "C" __global__ void __launch_bounds__(128) commit(const __grid_constant__ CommitArgs p) {
  wait_for_previous();
  const i64 row = blockIdx.x * 4 + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (row >= p.B) return;
  const i64 slot = ld_index(p.state_indices, row * p.idx_stride, p.idx_wide);
  if (slot < 0 || slot >= p.num_slots || slot == p.null_slot) return;
  const i64 accepted = ld_index(p.num_accepted, row * p.acc_stride, p.acc_wide);
  int* status = &p.status[slot * p.status_stride];
  const int was = *status, start = p.ring_start[slot * p.rs_stride], count = p.num_committed[slot * p.nc_stride];
  int most = 0, least = 0x7fffffff;
  for (i64 l = lane; l < p.num_layers; l += 32) {
    int* record = &p.step_records[slot * p.rec_slot + l * p.rec_layer];
    most = max(most, *record);
    least = min(least, *record);
    *record = 0;
  }
  most = __reduce_max_sync(FULL, most);
  least = __reduce_min_sync(FULL, least);
  if (lane) return;
  const bool no_step = least == 0;
  const int width = most >> 16, length = most & 0xffff;
  int hit = no_step ? NO_STEP | (most ? DEAD : 0) : accepted < 0 || accepted > length ? ACCEPTED_CLAMPED : 0;
  if (hit) *status = was | hit;
  if (no_step || ((was | hit) & DEAD)) return;
  const int kept = accepted < 0 ? 0 : accepted > length ? length : (int)accepted;
  const bool folded = count >= p.W + 1 - width;
  if (folded) p.ring_start[slot * p.rs_stride] = (start + count) & ((int)p.R - 1);
  p.num_committed[slot * p.nc_stride] = folded ? kept : count + kept;
}
