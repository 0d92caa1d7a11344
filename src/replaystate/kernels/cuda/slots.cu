// Slot upkeep that engines call between steps, without waiting for the host: one launch for all layers and slots.
//
// Modes: RESET (checkpoint zero, words 0), INVALIDATE (status |= DEAD), CROP (forget `count` rows), LOAD (a checkpoint of
// one layer from src, where the window is empty), GATHER (slots' bytes into a buffer) and SCATTER (from it into slots).
// Slots that are padding or outside the pool are skipped. blockIdx.x: row, blockIdx.y: part of a row's bytes.

#define MAX_TENSORS 160
enum { RESET, INVALIDATE, CROP, LOAD, GATHER, SCATTER };

struct SlotArgs {
  const void *slots, *other, *count, *src;
  int *ring_start, *num_committed, *step_records, *status;
  unsigned char* buffer;
  i64 slots_wide, other_wide, count_wide, slots_stride, other_stride, count_stride, rs_stride, nc_stride, status_stride, rec_slot, rec_layer;
  i64 mode, rows, tensors, num_layers, num_slots, null_slot, words, src_dtype, state_dtype, row_bytes, layer;
  i64 ptr[MAX_TENSORS], slot_bytes[MAX_TENSORS], bytes[MAX_TENSORS];  // pools: address, bytes from slot to slot, bytes a slot
};

__device__ __forceinline__ bool is_real(const SlotArgs& p, i64 slot) { return slot >= 0 && slot < p.num_slots && slot != p.null_slot; }

// Whether a slot has a step pending in layers [begin, end).
__device__ __forceinline__ bool is_pending(const SlotArgs& p, i64 slot, i64 begin, i64 end) {
  bool found = false;
  for (i64 l = begin; l < end; l++) found |= p.step_records[slot * p.rec_slot + l * p.rec_layer] != 0;
  return found;
}

// Copy or zero `bytes` bytes, this block's share, in the widest units that all addresses allow.
__device__ __forceinline__ void move(unsigned char* to, const unsigned char* from, i64 bytes) {
  const i64 at = blockIdx.y * (i64)blockDim.x + threadIdx.x, step = gridDim.y * (i64)blockDim.x;
  const i64 low = (i64)to | (i64)from | bytes;
  if (low % 16 == 0)
    for (i64 i = at; i < bytes / 16; i += step) ((uint4*)to)[i] = from ? ((const uint4*)from)[i] : make_uint4(0, 0, 0, 0);
  else if (low % 4 == 0)
    for (i64 i = at; i < bytes / 4; i += step) ((u32*)to)[i] = from ? ((const u32*)from)[i] : 0;
  else
    for (i64 i = at; i < bytes / 2; i += step) ((u16*)to)[i] = from ? ((const u16*)from)[i] : (u16)0;
}

extern "C" __global__ void __launch_bounds__(256) slot_upkeep(const __grid_constant__ SlotArgs p) {
  wait_for_previous();
  const i64 row = blockIdx.x, slot = ld_index(p.slots, row * p.slots_stride, p.slots_wide);
  const int mode = (int)p.mode;
  if (!is_real(p, slot)) return;
  if ((mode == GATHER || mode == SCATTER) && !is_real(p, ld_index(p.other, row * p.other_stride, p.other_wide))) return;
  const bool leads = threadIdx.x == 0 && blockIdx.y == 0;
  int* status = &p.status[slot * p.status_stride];
  if (mode == INVALIDATE) {
    if (leads) atomicOr(status, DEAD);
  } else if (mode == CROP) {
    if (leads) {
      const i64 count = ld_index(p.count, row * p.count_stride, p.count_wide);
      const int held = p.num_committed[slot * p.nc_stride];
      if (is_pending(p, slot, 0, p.num_layers)) { atomicOr(status, NOT_COMMITTED); return; }
      if (*status & DEAD) return;
      if (count < 0 || count > held) atomicOr(status, BAD_COUNT);
      p.num_committed[slot * p.nc_stride] = held - (int)(count < 0 ? 0 : count > held ? held : count);
    }
  } else if (mode == RESET) {
    for (int i = 0; i < p.tensors; i++) move((unsigned char*)p.ptr[i] + slot * p.slot_bytes[i], nullptr, p.bytes[i]);
    if (p.words && leads) p.ring_start[slot * p.rs_stride] = p.num_committed[slot * p.nc_stride] = *status = 0;
    if (p.words && blockIdx.y == 0)
      for (i64 l = threadIdx.x; l < p.num_layers; l += blockDim.x) p.step_records[slot * p.rec_slot + l * p.rec_layer] = 0;
  } else if (mode == LOAD) {
    if (p.num_committed[slot * p.nc_stride] != 0) {
      if (leads) atomicOr(status, is_pending(p, slot, p.layer, p.layer + 1) ? WINDOW_NOT_EMPTY | NOT_COMMITTED : WINDOW_NOT_EMPTY);
      return;
    }
    if (is_pending(p, slot, p.layer, p.layer + 1)) {
      if (leads) atomicOr(status, NOT_COMMITTED);
      return;
    }
    if (*status & DEAD) return;
    bool hit = false;
    const float limit = dtype_max((int)p.state_dtype);
    const i64 size = p.bytes[0];  // here elements of a slot
    for (i64 i = blockIdx.y * 256 + threadIdx.x; i < size; i += gridDim.y * 256) {
      float x;
      if (p.src_dtype == 3) {
        const double y = ((const double*)p.src)[row * size + i];
        if (fabs(y) > (double)limit) { hit = true; x = copysignf(limit, (float)y); }
        else x = (float)y;
      } else x = saturate(ld(p.src, row * size + i, (int)p.src_dtype), limit, hit);
      st((void*)p.ptr[0], slot * p.slot_bytes[0] + i, (int)p.state_dtype, x);
    }
    if (hit) atomicOr(status, STATE_SATURATED);
  } else {
    unsigned char* at = p.buffer + row * p.row_bytes;
    int* kept = (int*)(at + p.row_bytes - 16);
    if (mode == SCATTER && !kept[3]) {                 // whoever continues from this slot must learn that nothing came
      if (leads && p.words) atomicOr(status, DEAD);
      return;
    }
    for (int i = 0; i < p.tensors; i++) {
      unsigned char* pool = (unsigned char*)p.ptr[i] + slot * p.slot_bytes[i];
      if (mode == GATHER) move(at, pool, p.bytes[i]);
      else move(pool, at, p.bytes[i]);
      at += (p.bytes[i] + 15) / 16 * 16;
    }
    if (mode == GATHER && leads) {
      const bool pending = is_pending(p, slot, 0, p.num_layers);
      if (pending) atomicOr(status, NOT_COMMITTED);
      kept[3] = !pending && !(*status & DEAD);
      kept[0] = p.ring_start[slot * p.rs_stride];
      kept[1] = p.num_committed[slot * p.nc_stride];
      kept[2] = *status;
    }
    if (p.words && mode == SCATTER && leads) {
      p.ring_start[slot * p.rs_stride] = kept[0];
      p.num_committed[slot * p.nc_stride] = kept[1];
      *status = kept[2];
    }
    if (p.words && mode == SCATTER && blockIdx.y == 0)
      for (i64 l = threadIdx.x; l < p.num_layers; l += blockDim.x) p.step_records[slot * p.rec_slot + l * p.rec_layer] = 0;
  }
}
