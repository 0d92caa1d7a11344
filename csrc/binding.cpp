// torch.ops.replaystate_cpu.*: the backend's functions on torch's stable ABI. The only file that knows torch.
//
// Each op checks everything that an address or a loop bound is made of before it changes anything, decides on the host
// what each row does (cursors, folds, flags), and hands the rows to the kernels through torch's own thread pool.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>

#include "checks.h"

namespace replaystate {
namespace {

// Runs units 0..n-1 on torch's threads; contiguous static ranges.
template <class Args>
void run_units(const char* fn, bool (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t units) {
  std::atomic<bool> failed{false};
  if (units > 0) {
    torch::stable::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
      if (!kernel(args, begin, end)) failed.store(true, std::memory_order_relaxed);
    });
  }
  if (failed.load()) fail("CapacityError", fn, "out of memory for scratch");
}

// Units of one key head: its value heads together, unless that leaves threads without work.
int64_t splits_for(int64_t rows, const Sizes& sizes) {
  return rows * sizes.H >= int64_t(torch::stable::get_num_threads()) ? 1 : sizes.HV / sizes.H;
}

struct Packed {
  Tokens q, k, v, a, b, out;
};

Tokens gate_tokens(const char* fn, const char* name, const Tensor& x, int64_t tokens, int64_t HV) {
  check_cpu(fn, name, x);
  check_shape(fn, name, x, {tokens, HV});
  return {data(x), float_dtype(fn, name, x), 0, x.stride(0), x.stride(1)};
}

Packed packed_tokens(const char* fn, const Tensor& mixed_qkv, const Tensor& a, const Tensor& b, const Tensor& out, const Sizes& z) {
  check_cpu(fn, "mixed_qkv", mixed_qkv);
  check_cpu(fn, "out", out);
  check_shape(fn, "mixed_qkv", mixed_qkv, {-1, 2 * z.H * z.K + z.HV * z.V});
  const int64_t tokens = mixed_qkv.size(0);
  const DType dtype = float_dtype(fn, "mixed_qkv", mixed_qkv);
  if (!dense_from(mixed_qkv, 1)) fail("ShapeError", fn, "mixed_qkv: expected dense rows");
  check_shape(fn, "out", out, {tokens, z.HV, z.V});
  if (float_dtype(fn, "out", out) != dtype) fail("DTypeError", fn, "out: expected the dtype of mixed_qkv");
  if (!dense_from(out, 1) || (tokens > 1 && out.stride(0) < z.HV * z.V)) {
    fail("ShapeError", fn, "out: expected dense rows that do not overlap");
  }
  char* qkv = data(mixed_qkv);
  const int64_t stride = mixed_qkv.stride(0), size = size_of(dtype);
  return {{qkv, dtype, 0, stride, z.K},
          {qkv + z.H * z.K * size, dtype, 0, stride, z.K},
          {qkv + 2 * z.H * z.K * size, dtype, 0, stride, z.V},
          gate_tokens(fn, "a", a, tokens, z.HV),
          gate_tokens(fn, "b", b, tokens, z.HV),
          {data(out), dtype, 0, out.stride(0), z.V}};
}

void check_bounds(const char* fn, const Ints& bounds, int64_t tokens) {
  int64_t last = 0;
  for (int64_t i = 0; i < bounds.size(); ++i) {
    if (bounds[i] < last || bounds[i] > tokens || (i == 0 && bounds[0] != 0)) {
      fail("ArgumentError", fn, "query_start_loc: expected to start at 0, never fall and end at ", tokens, " or before, got ",
           bounds[i], " at ", i);
    }
    last = bounds[i];
  }
}

void zero_tokens(const Tokens& out, const Sizes& z, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) std::memset(out.at(0, t, 0), 0, size_t(z.HV * z.V * size_of(out.dtype)));
}

void check_slot(const char* fn, const char* name, int64_t slot, int64_t slots) {
  if (slot >= slots) fail("SlotError", fn, name, ": expected slots below ", slots, ", got ", slot);
}

// Sorts. Callers stop collecting once there are more slots than the pool has: one of them must be there twice.
void check_distinct(const char* fn, const char* name, std::vector<int64_t>& slots) {
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  if (twice != slots.end()) fail("SlotError", fn, name, ": slot ", *twice, " is named twice");
}

// The arguments of a step, each checked: dtypes, shapes, strides, row bounds.
struct StepCall {
  const char* fn;
  Pools pools;
  Packed tokens;
  int64_t num_tokens;
  Parameter decay, bias;
  Words starts, counts, flags;
  Records records;
  Ints slots, bounds;

  StepCall(const char* name, const Tensor& mixed_qkv, const Tensor& a, const Tensor& b, const Tensor& A_log, const Tensor& dt_bias,
           const Tensor& state, const Tensor& u_ring, const Tensor& k_ring, const Tensor& g_ring, const Tensor& ring_start,
           const Tensor& num_committed, const Tensor& step_records, const Tensor& status, const Tensor& out,
           const Tensor& state_indices, const Tensor& query_start_loc, int64_t layer, int64_t executed_width, int64_t window)
      : fn(name),
        pools(check_pools(fn, state, u_ring, k_ring, g_ring)),
        tokens(packed_tokens(fn, mixed_qkv, a, b, out, pools.sizes)),
        num_tokens(mixed_qkv.size(0)),
        decay(parameter_of(fn, "A_log", A_log, pools.sizes.HV)),
        bias(parameter_of(fn, "dt_bias", dt_bias, pools.sizes.HV)),
        starts(fn, "ring_start", ring_start, pools.slots),
        counts(fn, "num_committed", num_committed, pools.slots),
        flags(fn, "status", status, pools.slots),
        records(fn, step_records, pools.slots),
        slots(fn, "state_indices", state_indices),
        bounds(fn, "query_start_loc", query_start_loc) {
    check_window(fn, window, executed_width, pools.sizes.R);
    if (executed_width > 0x7fff) fail("ArgumentError", fn, "executed_width: expected at most 32767, got ", executed_width);
    if (layer < 0 || layer >= records.layers()) {
      fail("ArgumentError", fn, "layer: expected 0..", records.layers() - 1, ", got ", layer);
    }
    if (bounds.size() != slots.size() + 1) fail("ShapeError", fn, "query_start_loc: expected one bound more than rows");
    check_bounds(fn, bounds, num_tokens);
  }
};

// The memory between the first byte of x and the last.
std::pair<const char*, const char*> byte_range(const Tensor& x) {
  int64_t last = 0;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) == 0) return {nullptr, nullptr};
    last += (x.size(i) - 1) * x.stride(i);
  }
  return {data(x), data(x) + (last + 1) * x.element_size()};
}

bool apart(const Tensor& x, const Tensor& other) {
  const auto [begin, end] = byte_range(x);
  const auto [other_begin, other_end] = byte_range(other);
  return begin >= other_end || other_begin >= end;
}

bool power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

// Whether nothing at all is wrong with the arguments of a step, values included. False: something may be; the caller
// looks closer and says what.
bool step_holds(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state, Tensor u_ring, Tensor k_ring,
                Tensor g_ring, Tensor ring_start, Tensor num_committed, Tensor step_records, Tensor status, Tensor out,
                Tensor state_indices, Tensor query_start_loc, int64_t layer, int64_t executed_width, int64_t window,
                int64_t null_slot) try {
  const StepCall call("step_holds", mixed_qkv, a, b, A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed,
                      step_records, status, out, state_indices, query_start_loc, layer, executed_width, window);
  if (!power_of_two(window) || !power_of_two(call.pools.sizes.R)) return false;
  for (const Tensor* other : {&mixed_qkv, &a, &b, &A_log, &dt_bias, &state, &u_ring, &k_ring, &g_ring}) {
    if (!apart(out, *other)) return false;
  }
  static thread_local std::vector<int64_t> live;
  live.clear();
  for (int64_t i = 0; i < call.slots.size() && int64_t(live.size()) <= call.pools.slots; ++i) {
    const int64_t slot = call.slots[i], length = call.bounds[i + 1] - call.bounds[i];
    if (slot >= call.pools.slots) return false;
    if (slot < 0 || slot == null_slot) continue;
    live.push_back(slot);
    if (length > executed_width || (call.flags[slot] & DEAD) || call.records.at(slot, layer) != 0) return false;
    const int32_t record = int32_t((executed_width << 16) | length);
    for (int64_t other = 0; other < call.records.layers(); ++other) {
      if (call.records.at(slot, other) != 0 && call.records.at(slot, other) != record) return false;
    }
    const int64_t start = call.starts[slot], count = call.counts[slot];
    if (start < 0 || start >= call.pools.sizes.R || count < 0 || count > window) return false;
  }
  std::sort(live.begin(), live.end());
  return std::adjacent_find(live.begin(), live.end()) == live.end();
} catch (const std::runtime_error&) {
  return false;
}

void replay_step(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state, Tensor u_ring, Tensor k_ring,
                 Tensor g_ring, Tensor ring_start, Tensor num_committed, Tensor step_records, Tensor status, Tensor out,
                 Tensor state_indices, Tensor query_start_loc, int64_t layer, int64_t executed_width, int64_t window,
                 int64_t null_slot, double scale) {
  const StepCall call("replay_step", mixed_qkv, a, b, A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed,
                      step_records, status, out, state_indices, query_start_loc, layer, executed_width, window);
  const auto& [fn, pools, tokens, num_tokens, decay, bias, starts, counts, flags, records, slots, bounds] = call;
  const Sizes& z = pools.sizes;
  static thread_local std::vector<int64_t> live;
  live.clear();
  for (int64_t i = 0; i < slots.size() && int64_t(live.size()) <= pools.slots; ++i) {
    check_slot(fn, "state_indices", slots[i], pools.slots);
    if (slots[i] >= 0 && slots[i] != null_slot) live.push_back(slots[i]);
  }
  check_distinct(fn, "state_indices", live);

  // Which rows run: alive, last step committed, cursors in range. The rest is flagged, and its outputs are zero.
  static thread_local std::vector<StepRow> rows;
  rows.clear();
  for (int64_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i], begin = bounds[i], end = bounds[i + 1];
    bool runs = slot >= 0 && slot != null_slot;
    const int64_t length = std::min(end - begin, executed_width);
    if (runs) {
      const int32_t record = int32_t((executed_width << 16) | length);
      bool broken = records.at(slot, layer) != 0;
      for (int64_t other = 0; other < records.layers(); ++other) {
        broken |= records.at(slot, other) != 0 && records.at(slot, other) != record;
      }
      const int64_t start = starts[slot], count = counts[slot];
      int32_t word = flags[slot];
      if (broken) word |= NOT_COMMITTED | DEAD;
      if (start < 0 || start >= z.R || count < 0 || count > window) word |= BAD_CURSOR | DEAD;
      if (end - begin > executed_width) word |= ROW_CUT;
      flags[slot] = word;
      runs = (word & DEAD) == 0;
      if (runs) {
        records.at(slot, layer) = record;
        rows.push_back({slot, 0, begin, length, start, count, count >= window + 1 - executed_width, 0});
      }
    }
    zero_tokens(tokens.out, z, runs ? begin + length : begin, end);
  }
  zero_tokens(tokens.out, z, slots.size() ? bounds[slots.size()] : 0, num_tokens);

  const int64_t count = int64_t(rows.size()), splits = splits_for(count, z);
  const StepArgs args{z, tokens.q, tokens.k, tokens.v, tokens.a, tokens.b, tokens.out, decay, bias, pools.state, pools.u, pools.k,
                      pools.g, rows.data(), count, splits, float(scale)};
  run_units(fn, kernels().step, args, count * z.H * splits);
  for (const StepRow& row : rows) flags[row.slot] |= row.flags;
}

Tokens padded_tokens(const char* fn, const char* name, const Tensor& x, int64_t rows, int64_t width, int64_t heads, int64_t dim) {
  check_cpu(fn, name, x);
  check_shape(fn, name, x, {rows, width, heads, dim});
  if (!dense_from(x, 3)) fail("ShapeError", fn, name, ": expected a dense last dim");
  return {data(x), float_dtype(fn, name, x), x.stride(0), x.stride(1), x.stride(2)};
}

Tokens padded_gates(const char* fn, const char* name, const Tensor& x, int64_t rows, int64_t width, int64_t heads) {
  check_cpu(fn, name, x);
  check_shape(fn, name, x, {rows, width, heads});
  return {data(x), float_dtype(fn, name, x), x.stride(0), x.stride(1), x.stride(2)};
}

// No two elements share an address, for output layouts that are nested (each stride at least the extent of those inside).
bool nested(const Tensor& x) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) > 1) dims.push_back({x.stride(i), x.size(i)});
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return false;
    extent = stride * (size - 1) + extent;
  }
  return true;
}

void ucache_flush(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state, Tensor u_cache,
                  Tensor k_cache, Tensor g_cache, Tensor state_indices, Tensor hist_len, Tensor cache_base, Tensor output,
                  int64_t flush_min, int64_t window, double scale) {
  const char* fn = "gated_delta_rule_mtp_ucache_flush";
  const Pools pools = check_pools(fn, state, u_cache, k_cache, g_cache);
  const Sizes& z = pools.sizes;
  check_shape(fn, "q", q, {-1, -1, z.H, z.K});
  const int64_t num_rows = q.size(0), width = q.size(1);
  check_window(fn, window, width, z.R);
  if (flush_min < 1 || flush_min > window + 1 - width) {
    fail("ArgumentError", fn, "flush_min: expected 1..", window + 1 - width, ", got ", flush_min);
  }
  const Tokens tq = padded_tokens(fn, "q", q, num_rows, width, z.H, z.K), tk = padded_tokens(fn, "k", k, num_rows, width, z.H, z.K);
  const Tokens tv = padded_tokens(fn, "v", v, num_rows, width, z.HV, z.V);
  const Tokens to = padded_tokens(fn, "output", output, num_rows, width, z.HV, z.V);
  if (!nested(output)) fail("ShapeError", fn, "output: expected elements that do not overlap");
  const Tokens ta = padded_gates(fn, "a", a, num_rows, width, z.HV), tb = padded_gates(fn, "b", b, num_rows, width, z.HV);
  const Parameter decay = parameter_of(fn, "A_log", A_log, z.HV), bias = parameter_of(fn, "dt_bias", dt_bias, z.HV);
  const Ints slots(fn, "initial_state_indices", state_indices), lens(fn, "hist_len", hist_len), bases(fn, "cache_base", cache_base);
  if (slots.size() != num_rows || lens.size() != num_rows || bases.size() != num_rows) {
    fail("ShapeError", fn, "initial_state_indices, hist_len, cache_base: expected one a row");
  }
  static thread_local std::vector<StepRow> rows;
  static thread_local std::vector<int64_t> live;
  rows.clear();
  live.clear();
  for (int64_t i = 0; i < num_rows && int64_t(live.size()) <= pools.slots; ++i) {
    const int64_t slot = slots[i], start = bases[i], count = lens[i];
    check_slot(fn, "initial_state_indices", slot, pools.slots);
    if (slot < 0) continue;
    if (start < 0 || start >= z.R || count < 0 || count > window) {
      fail("ArgumentError", fn, "slot ", slot, ": expected hist_len in 0..", window, " and cache_base in 0..", z.R - 1, ", got ",
           count, " and ", start);
    }
    live.push_back(slot);
    rows.push_back({slot, i, 0, width, start, count, count >= flush_min, 0});
  }
  check_distinct(fn, "initial_state_indices", live);
  const int64_t count = int64_t(rows.size()), splits = splits_for(count, z);
  const StepArgs args{z, tq, tk, tv, ta, tb, to, decay, bias, pools.state, pools.u, pools.k, pools.g, rows.data(), count, splits,
                      float(scale)};
  run_units(fn, kernels().step, args, count * z.H * splits);
}

// The rows of a fold: slots in range, cursors in range, rows with a negative slot dropped.
std::vector<FoldRow> fold_rows(const char* fn, const Ints& src, const Ints* dst, const Ints& start, const Ints& count,
                               int64_t window, const Pools& pools) {
  const int64_t n = src.size();
  if ((dst && dst->size() != n) || start.size() != n || count.size() != n) {
    fail("ShapeError", fn, "slots, start, count: expected one a row");
  }
  if (window < 0 || window > pools.sizes.R) {
    fail("ArgumentError", fn, "window: expected 0..", pools.sizes.R, ", got ", window);
  }
  std::vector<FoldRow> rows;
  for (int64_t i = 0; i < n && (!dst || int64_t(rows.size()) <= pools.slots); ++i) {
    const int64_t to = dst ? (*dst)[i] : i;
    if (src[i] < 0 || to < 0) continue;
    check_slot(fn, "src_slots", src[i], pools.slots);
    if (dst) check_slot(fn, "dst_slots", to, pools.slots);
    if (start[i] < 0 || start[i] >= pools.sizes.R || count[i] < 0 || count[i] > window) {
      fail("ArgumentError", fn, "slot ", src[i], ": expected start in 0..", pools.sizes.R - 1, " and count in 0..", window, ", got ",
           start[i], " and ", count[i]);
    }
    rows.push_back({src[i], to, start[i], count[i], 0});
  }
  return rows;
}

void fold_slots(std::vector<Tensor> states, std::vector<Tensor> u_rings, std::vector<Tensor> k_rings, std::vector<Tensor> g_rings,
                Tensor src_slots, Tensor dst_slots, Tensor start, Tensor count, int64_t window, std::optional<Tensor> status) {
  const char* fn = "fold_slots";
  const size_t layers = states.size();
  if (u_rings.size() != layers || k_rings.size() != layers || g_rings.size() != layers) {
    fail("ShapeError", fn, "states, u_rings, k_rings, g_rings: expected one tensor a layer in each");
  }
  const Ints src(fn, "src_slots", src_slots), dst(fn, "dst_slots", dst_slots), starts(fn, "start", start), counts(fn, "count", count);
  std::vector<Pools> pools;
  for (size_t i = 0; i < layers; ++i) {
    pools.push_back(check_pools(fn, states[i], u_rings[i], k_rings[i], g_rings[i]));
    if (pools[i].slots != pools[0].slots || pools[i].sizes.R != pools[0].sizes.R) {
      fail("ShapeError", fn, "states, k_rings: expected the same slots and ring slots in every layer");
    }
  }
  if (layers == 0) return;
  std::vector<FoldRow> rows = fold_rows(fn, src, &dst, starts, counts, window, pools[0]);
  // A dst that another row reads or writes would make the result depend on the order of rows.
  std::vector<int64_t> written;
  for (const FoldRow& row : rows) written.push_back(row.dst);
  check_distinct(fn, "dst_slots", written);
  for (const FoldRow& row : rows) {
    if (row.src != row.dst && std::binary_search(written.begin(), written.end(), row.src)) {
      fail("SlotError", fn, "dst_slots: slot ", row.src, " is also the source of another row");
    }
  }
  std::optional<Words> flags;
  if (status.has_value()) flags.emplace(fn, "status", *status, pools[0].slots);
  for (const Pools& p : pools) {
    const FoldArgs args{p.sizes, p.state, p.u, p.k, p.g, p.state, rows.data(), int64_t(rows.size())};
    run_units(fn, kernels().fold, args, int64_t(rows.size()) * p.sizes.H);
  }
  if (flags) {
    for (const FoldRow& row : rows) (*flags)[row.dst] |= row.flags;
  }
}

void read_state(Tensor state, Tensor u_ring, Tensor k_ring, Tensor g_ring, Tensor slots, Tensor start, Tensor count,
                int64_t window, Tensor out) {
  const char* fn = "read_state";
  const Pools pools = check_pools(fn, state, u_ring, k_ring, g_ring);
  const Ints src(fn, "slots", slots), starts(fn, "start", start), counts(fn, "count", count);
  const Sizes& z = pools.sizes;
  check_cpu(fn, "out", out);
  check_dtype(fn, "out", out, ScalarType::Float, "float32");
  check_shape(fn, "out", out, {src.size(), z.HV, z.V, z.K});
  std::vector<FoldRow> rows = fold_rows(fn, src, nullptr, starts, counts, window, pools);
  const FoldArgs args{z, pools.state, pools.u, pools.k, pools.g, pool_of(fn, "out", out), rows.data(), int64_t(rows.size())};
  run_units(fn, kernels().fold, args, int64_t(rows.size()) * z.H);
}

void commit(Tensor state_indices, Tensor num_accepted, Tensor ring_start, Tensor num_committed, Tensor step_records,
            Tensor status, int64_t window, int64_t ring_slots, int64_t null_slot) {
  const char* fn = "commit";
  const Ints slots(fn, "state_indices", state_indices), accepted(fn, "num_accepted", num_accepted);
  if (accepted.size() != slots.size()) fail("ShapeError", fn, "num_accepted: expected one a row");
  check_shape(fn, "ring_start", ring_start, {-1});
  const int64_t pool = ring_start.size(0);
  const Words starts(fn, "ring_start", ring_start, pool), counts(fn, "num_committed", num_committed, pool);
  const Words flags(fn, "status", status, pool);
  const Records records(fn, step_records, pool);
  if (window < 1 || ring_slots < 1 || records.layers() < 1) {
    fail("ArgumentError", fn, "window, ring_slots, layers: expected at least 1");
  }
  static thread_local std::vector<int64_t> live;
  live.clear();
  for (int64_t i = 0; i < slots.size() && int64_t(live.size()) <= pool; ++i) {
    check_slot(fn, "state_indices", slots[i], pool);
    if (slots[i] >= 0 && slots[i] != null_slot) live.push_back(slots[i]);
  }
  check_distinct(fn, "state_indices", live);
  for (int64_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i];
    if (slot < 0 || slot == null_slot) continue;
    int32_t record = records.at(slot, 0), least = record;
    for (int64_t layer = 1; layer < records.layers(); ++layer) {
      record = std::max(record, records.at(slot, layer));
      least = std::min(least, records.at(slot, layer));
    }
    int32_t word = flags[slot];
    if (least == 0) word |= record != 0 ? NO_STEP | DEAD : NO_STEP;  // some layers stepped: their rings and the others' differ
    const int64_t width = record >> 16, length = record & 0xffff, kept = std::clamp<int64_t>(accepted[i], 0, length);
    if (least != 0 && kept != accepted[i]) word |= ACCEPTED_CLAMPED;
    flags[slot] = word;
    if (least != 0 && (word & DEAD) == 0) {
      const int64_t count = counts[slot];
      const bool folded = count >= window + 1 - width;
      if (folded) starts[slot] = int32_t((int64_t(starts[slot]) + count) % ring_slots);
      counts[slot] = int32_t(folded ? kept : count + kept);
    }
    for (int64_t layer = 0; layer < records.layers(); ++layer) records.at(slot, layer) = 0;
  }
}

// final_state holds the initial state when has_initial, and is overwritten.
void gated_delta_rule(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, bool has_initial, Tensor query_start_loc,
                      Tensor out, Tensor final_state, double scale) {
  const char* fn = "gated_delta_rule";
  check_cpu(fn, "final_state", final_state);
  check_dtype(fn, "final_state", final_state, ScalarType::Float, "float32");
  check_shape(fn, "final_state", final_state, {-1, -1, -1, -1});
  const Ints bounds(fn, "query_start_loc", query_start_loc);
  const int64_t num_rows = final_state.size(0), HV = final_state.size(1), V = final_state.size(2), K = final_state.size(3);
  if (bounds.size() != num_rows + 1) fail("ShapeError", fn, "query_start_loc: expected ", num_rows + 1, " bounds");
  check_shape(fn, "mixed_qkv", mixed_qkv, {-1, -1});
  const int64_t keys = HV < 1 || V < 1 || K < 1 ? -1 : mixed_qkv.size(1) - HV * V;
  if (keys <= 0 || keys % (2 * K) || HV % (keys / (2 * K))) {
    fail("ShapeError", fn, "mixed_qkv: expected rows of 2 H K + HV V with H that divides HV=", HV, ", K=", K, ", V=", V, ", got ",
         shape_text(mixed_qkv));
  }
  const Sizes z{keys / (2 * K), HV, K, V, 1};
  const Packed tokens = packed_tokens(fn, mixed_qkv, a, b, out, z);
  const Parameter decay = parameter_of(fn, "A_log", A_log, z.HV), bias = parameter_of(fn, "dt_bias", dt_bias, z.HV);
  check_bounds(fn, bounds, mixed_qkv.size(0));
  std::vector<int64_t> starts;
  for (int64_t i = 0; i <= num_rows; ++i) starts.push_back(bounds[i]);
  zero_tokens(tokens.out, z, starts.back(), mixed_qkv.size(0));
  const int64_t splits = splits_for(num_rows, z);
  const PrefillArgs args{z, tokens.q, tokens.k, tokens.v, tokens.a, tokens.b, tokens.out, decay, bias,
                         pool_of(fn, "final_state", final_state), starts.data(), num_rows, splits, has_initial, float(scale)};
  run_units(fn, kernels().prefill, args, num_rows * z.H * splits);
}

std::string isa() { return kernels().name; }

bool use_isa(std::string name) { return use_kernels(name.c_str()); }

// Sum of x as 64-bit words, read once by all threads: the memory speed that benchmarks compare with.
int64_t read_words(Tensor x) {
  check_cpu("read_words", "x", x);
  check_dtype("read_words", "x", x, ScalarType::Long, "int64");
  if (x.dim() != 1 || !x.is_contiguous()) fail("ShapeError", "read_words", "x: expected 1 dense dim");
  const uint64_t* words = reinterpret_cast<const uint64_t*>(data(x));
  std::atomic<uint64_t> total{0};
  torch::stable::parallel_for(0, x.size(0), 4096, [&](int64_t begin, int64_t end) {
    uint64_t sum[4] = {};
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) {
      for (int j = 0; j < 4; ++j) sum[j] += words[i + j];
    }
    for (; i < end; ++i) sum[0] += words[i];
    total.fetch_add(sum[0] + sum[1] + sum[2] + sum[3], std::memory_order_relaxed);
  });
  return int64_t(total.load());
}

}  // namespace

STABLE_TORCH_LIBRARY(replaystate_cpu, m) {
  m.def(
      "replay_step(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, Tensor(b!) u_ring, "
      "Tensor(c!) k_ring, Tensor(d!) g_ring, Tensor ring_start, Tensor num_committed, Tensor(e!) step_records, "
      "Tensor(f!) status, Tensor(g!) out, Tensor state_indices, Tensor query_start_loc, int layer, int executed_width, "
      "int window, int null_slot, float scale) -> ()");
  m.def(
      "ucache_flush(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, "
      "Tensor(b!) u_cache, Tensor(c!) k_cache, Tensor(d!) g_cache, Tensor state_indices, Tensor hist_len, Tensor cache_base, "
      "Tensor(e!) output, int flush_min, int window, float scale) -> ()");
  m.def(
      "fold_slots(Tensor(a!)[] states, Tensor[] u_rings, Tensor[] k_rings, Tensor[] g_rings, Tensor src_slots, "
      "Tensor dst_slots, Tensor start, Tensor count, int window, Tensor(b!)? status) -> ()");
  m.def(
      "read_state(Tensor state, Tensor u_ring, Tensor k_ring, Tensor g_ring, Tensor slots, Tensor start, Tensor count, "
      "int window, Tensor(a!) out) -> ()");
  m.def(
      "commit(Tensor state_indices, Tensor num_accepted, Tensor(a!) ring_start, Tensor(b!) num_committed, "
      "Tensor(c!) step_records, Tensor(d!) status, int window, int ring_slots, int null_slot) -> ()");
  m.def(
      "gated_delta_rule(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, bool has_initial, "
      "Tensor query_start_loc, Tensor(a!) out, Tensor(b!) final_state, float scale) -> ()");
  m.def(
      "step_holds(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state, Tensor u_ring, Tensor k_ring, "
      "Tensor g_ring, Tensor ring_start, Tensor num_committed, Tensor step_records, Tensor status, Tensor out, "
      "Tensor state_indices, Tensor query_start_loc, int layer, int executed_width, int window, int null_slot) -> bool");
  m.def("isa() -> str");
  m.def("use_isa(str name) -> bool");
  m.def("read_words(Tensor x) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(replaystate_cpu, CPU, m) {
  m.impl("replay_step", TORCH_BOX(&replay_step));
  m.impl("step_holds", TORCH_BOX(&step_holds));
  m.impl("ucache_flush", TORCH_BOX(&ucache_flush));
  m.impl("fold_slots", TORCH_BOX(&fold_slots));
  m.impl("read_state", TORCH_BOX(&read_state));
  m.impl("commit", TORCH_BOX(&commit));
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
  m.impl("read_words", TORCH_BOX(&read_words));
}

STABLE_TORCH_LIBRARY_IMPL(replaystate_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("use_isa", TORCH_BOX(&use_isa));
}

}  // namespace replaystate
