// The kernels, once, for every ISA: included by kernels_<isa>.cpp after simd_<isa>.h, into an anonymous namespace.
//
// Everything is made of three pieces on float32 scratch whose rows are padded with zeros to whole vectors:
//   dots         out[x][r] = S_r . x          checkpoint, ring keys and new keys against all q~ and k^ at once
//   rank_update  dst_r = decay src_r + sum_j c_jr w_j      the window's part of the outputs, and the fold
//   substitute   (I + A) U = R, then y        forward substitution over the row's tokens
// A checkpoint passes once: DOT_ROWS-multiples of its rows are converted into L1, multiplied, folded if the row folds, stored.
//
// Bits depend on the unit's own data only: every sum runs in a fixed order that no batch, thread or pointer changes.
// Exponents are e^g per token and their products in double: no differences of sums, and e^{-inf} is 0.
#pragma once

#include <math.h>

#include "kernels.h"

using namespace replaystate;

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int BLOCK = 8;                   // checkpoint rows in L1 at a time; a multiple of DOT_ROWS
constexpr int64_t PREFETCH_BYTES = 8192;  // how far ahead of the block being worked on
constexpr float NORM_EPS = 1e-6f;
constexpr int64_t CHUNK = 16;           // tokens of one prefill chunk
constexpr int DOT_ROWS = SUMS / 2;      // rows come in multiples of the tallest tile of dots
static_assert(BLOCK % DOT_ROWS == 0 && BLOCK % 4 == 0);

template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// --- element types ---------------------------------------------------------------------------------------------------

struct F32 {
  using Word = float;
  static constexpr bool saturates = false;
  static constexpr float limit = INFINITY;
  static Vec load(const float* p) { return ::load(p); }
  static void store(float* p, Vec v) { ::store(p, v); }
};

struct BF16 {
  using Word = uint16_t;
  static constexpr bool saturates = true;
  static constexpr float limit = 0x1.fep127f;
  static Vec load(const uint16_t* p) { return load_bf16(p); }
  static void store(uint16_t* p, Vec v) { store_bf16(p, v); }
};

struct F16 {
  using Word = uint16_t;
  static constexpr bool saturates = true;
  static constexpr float limit = 65504.0f;
  static Vec load(const uint16_t* p) { return load_f16(p); }
  static void store(uint16_t* p, Vec v) { store_f16(p, v); }
};

// body(F32{}), body(BF16{}) or body(F16{}).
template <class Body>
INLINE auto with_type(DType dtype, Body body) {
  if (dtype == DType::f16) return body(F16{});
  if (dtype == DType::bf16) return body(BF16{});
  return body(F32{});
}

template <class Type>
inline typename Type::Word* words(char* p) { return reinterpret_cast<typename Type::Word*>(p); }
template <class Type>
inline const typename Type::Word* words(const char* p) { return reinterpret_cast<const typename Type::Word*>(p); }

// --- rows in memory <-> float32 scratch ------------------------------------------------------------------------------

template <class Type>
void load_as(float* dst, const char* from, int64_t n, int64_t padded) {
  const auto* src = words<Type>(from);
  int64_t i = 0;
  for (; i + N <= n; i += N) store(dst + i, Type::load(src + i));
  if (i < n) {
    typename Type::Word rest[N] = {};
    memcpy(rest, src + i, size_t(n - i) * sizeof rest[0]);
    store(dst + i, Type::load(rest));
    i += N;
  }
  for (; i < padded; i += N) store(dst + i, set1(0.0f));
}

// dst[0..n) = float(src[0..n)), zeros up to `padded` (a multiple of N).
inline void load_row(float* dst, const char* src, DType dtype, int64_t n, int64_t padded) {
  with_type(dtype, [&](auto type) { load_as<decltype(type)>(dst, src, n, padded); });
}

// dst[i] = float(src[i * stride]) for i < n; dst has room for whole vectors.
void load_strided(float* dst, const char* src, DType dtype, int64_t stride, int64_t n) {
  with_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto* from = words<Type>(src);
    for (int64_t i = 0; i < n; i += N) {
      typename Type::Word lanes[N] = {};
      for (int64_t j = 0; j < least(N, n - i); ++j) memcpy(lanes + j, from + (i + j) * stride, sizeof lanes[0]);
      store(dst + i, Type::load(lanes));
    }
  });
}

// dst[i..i + N) = each(src[i..i + N)), rounded; a last part is as long as it is.
template <class Type, class Each>
inline void store_as(typename Type::Word* dst, const float* src, int64_t n, Each each) {
  int64_t i = 0;
  for (; i + N <= n; i += N) Type::store(dst + i, each(load(src + i)));
  if (i < n) {
    float lanes[N] = {};
    typename Type::Word rest[N];
    memcpy(lanes, src + i, size_t(n - i) * sizeof(float));
    Type::store(rest, each(load(lanes)));
    memcpy(dst + i, rest, size_t(n - i) * sizeof rest[0]);
  }
}

// Round to dtype; what lies outside its range becomes inf, as in torch.
void store_row(char* dst, DType dtype, const float* src, int64_t n) {
  with_type(dtype, [&](auto type) { store_as<decltype(type)>(words<decltype(type)>(dst), src, n, [](Vec v) { return v; }); });
}

// Round to dtype, limited to its finite range; true when something was beyond it (NaN is not, and stays). Limits are
// rarely met: a first pass stores without them and keeps the largest magnitude, a second runs only when it was too large.
bool store_saturated(char* to, DType dtype, const float* src, int64_t n) {
  return with_type(dtype, [&](auto type) {
    using Type = decltype(type);
    auto* dst = words<Type>(to);
    Vec largest = set1(0.0f);
    store_as<Type>(dst, src, n, [&](Vec v) {
      if constexpr (Type::saturates) largest = larger(largest, v);
      return v;
    });
    if (!Type::saturates || !any_above(largest, Type::limit)) return false;
    store_as<Type>(dst, src, n, [](Vec v) { return clamp(v, Type::limit); });
    return true;
  });
}

double load_scalar(const Parameter& p, int64_t i) {
  float lanes[N];
  load_strided(lanes, p.data + i * p.stride * size_of(p.dtype), p.dtype, 1, 1);
  return double(lanes[0]);
}

// --- the three pieces ------------------------------------------------------------------------------------------------

// Memory that will be needed next, asked for between the arithmetic: a burst of requests would fill the core's miss
// buffers and hold up the loads behind it.
struct Ahead {
  const char* at;
  template <int BYTES>
  inline void step() {
    for (int i = 0; i < BYTES; i += 64) prefetch(at + i);
    at += BYTES;
  }
};

struct Nothing {
  template <int BYTES>
  inline void step() {}
};

// One tile of dots: ROWS rows, converted as they are read, with VECS vectors. Each accumulator sums in the order of k,
// whatever the tile.
template <class From, int ROWS, int VECS, class Next>
INLINE void dot_tile(const typename From::Word* s, int64_t lds, const float* x, int64_t len, float* out, int64_t ldo, Next& next) {
  Vec acc[ROWS][VECS];
  UNROLL for (int i = 0; i < ROWS; ++i) {
    UNROLL for (int m = 0; m < VECS; ++m) acc[i][m] = set1(0.0f);
  }
  for (int64_t k = 0; k < len; k += N) {
    next.template step<int(ROWS * N * sizeof(typename From::Word))>();
    Vec row[ROWS];
    UNROLL for (int i = 0; i < ROWS; ++i) row[i] = keep(From::load(s + i * lds + k));
    UNROLL for (int m = 0; m < VECS; ++m) {
      const Vec vec = keep(load(x + m * len + k));
      UNROLL for (int i = 0; i < ROWS; ++i) acc[i][m] = fma(row[i], vec, acc[i][m]);
    }
  }
  reduce(acc, out, ldo);
}

template <class From, int VECS, class Next>
void dot_rows(const typename From::Word* s, int64_t lds, int64_t rows, const float* x, int64_t len, float* out, int64_t ldo, Next next) {
  constexpr int ROWS = SUMS / VECS;
  for (int64_t r = 0; r < rows; r += ROWS) dot_tile<From, ROWS, VECS>(s + r * lds, lds, x, len, out + r, ldo, next);
}

// out[x * ldo + r] = S_r . X_x over `len`; rows a multiple of DOT_ROWS, vectors even, len a multiple of N. The first
// pass over the rows asks for what comes next.
template <class From, class Next>
inline void dots(const typename From::Word* S, int64_t lds, int64_t rows, const float* X, int64_t vectors, int64_t len, float* out,
                 int64_t ldo, Next next) {
  int64_t x = 0;
  const auto pass = [&](auto vecs, auto what) {
    dot_rows<From, decltype(vecs)::value>(S, lds, rows, X + x * len, len, out + x * ldo, ldo, what);
    x += decltype(vecs)::value;
  };
  const auto passes = [&](auto vecs) {
    if (x == 0 && x + decltype(vecs)::value <= vectors) pass(vecs, next);
    while (x + decltype(vecs)::value <= vectors) pass(vecs, Nothing{});
  };
  if constexpr (MOST_VECS >= 8) passes(Number<8>{});
  if constexpr (MOST_VECS >= 4) passes(Number<4>{});
  passes(Number<2>{});
}

inline void dots(const float* S, int64_t lds, int64_t rows, const float* X, int64_t vectors, int64_t len, float* out, int64_t ldo) {
  dots<F32>(S, lds, rows, X, vectors, len, out, ldo, Nothing{});
}

// Coefficients c_jr at c[j * step_j + r * step_r], vectors w_j at w[j * ldw].
struct Update {
  float decay;
  const float* c;
  int64_t step_j, step_r;
  const float* w;
  int64_t ldw, count;
};

template <class From, class To, int ROWS, int VECS>
INLINE bool update_tile(typename To::Word* dst, int64_t ldd, const typename From::Word* src, int64_t lds, const Update& up,
                        int64_t row, int64_t at) {
  Vec acc[ROWS][VECS];
  const Vec decay = set1(up.decay);
  UNROLL for (int i = 0; i < ROWS; ++i) {
    UNROLL for (int m = 0; m < VECS; ++m) acc[i][m] = mul(decay, From::load(src + (row + i) * lds + at + m * N));
  }
  for (int64_t j = 0; j < up.count; ++j) {
    const float *w = up.w + j * up.ldw + at, *c = up.c + j * up.step_j + row * up.step_r;
    Vec vec[VECS];
    UNROLL for (int m = 0; m < VECS; ++m) vec[m] = keep(load(w + m * N));
    UNROLL for (int i = 0; i < ROWS; ++i) {
      const Vec scalar = keep(set1(c[i * up.step_r]));
      UNROLL for (int m = 0; m < VECS; ++m) acc[i][m] = fma(scalar, vec[m], acc[i][m]);
    }
  }
  bool over = false;
  if constexpr (To::saturates) {
    Vec largest = set1(0.0f);
    UNROLL for (int i = 0; i < ROWS; ++i) {
      UNROLL for (int m = 0; m < VECS; ++m) largest = larger(largest, acc[i][m]);
    }
    over = any_above(largest, To::limit);
    if (__builtin_expect(over, 0)) {
      UNROLL for (int i = 0; i < ROWS; ++i) {
        UNROLL for (int m = 0; m < VECS; ++m) acc[i][m] = clamp(acc[i][m], To::limit);
      }
    }
  }
  UNROLL for (int i = 0; i < ROWS; ++i) {
    UNROLL for (int m = 0; m < VECS; ++m) To::store(dst + (row + i) * ldd + at + m * N, acc[i][m]);
  }
  return over;
}

template <class From, class To, int ROWS>
inline bool update_rows(typename To::Word* dst, int64_t ldd, const typename From::Word* src, int64_t lds, const Update& up,
                        int64_t row, int64_t len) {
  bool over = false;
  int64_t at = 0;
  for (; at + TILE * N <= len; at += TILE * N) over |= update_tile<From, To, ROWS, TILE>(dst, ldd, src, lds, up, row, at);
  for (; at < len; at += N) over |= update_tile<From, To, ROWS, 1>(dst, ldd, src, lds, up, row, at);
  return over;
}

// dst_r = decay src_r + sum_j c_jr w_j over `len` (a multiple of N), j ascending, limited to the finite range of a
// 16-bit `To`: true when something was beyond it. dst may be src. Rows are even.
template <class From, class To>
bool rank_update(typename To::Word* dst, int64_t ldd, const typename From::Word* src, int64_t lds, int64_t rows, int64_t len,
                 const Update& up) {
  bool over = false;
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) over |= update_rows<From, To, 4>(dst, ldd, src, lds, up, row, len);
  for (; row < rows; row += 2) over |= update_rows<From, To, 2>(dst, ldd, src, lds, up, row, len);
  return over;
}

// New tokens of one head. `products` holds S_P k^_t in rows 0..T-1 and S_P q~_t in rows T..2T-1; the latter become y_t.
// ck[t][s] = e^{c_t - c_s} k^_t . k^_s (s < t), cq likewise with q~_t (s <= t); whole[t] = e^{c_t}. All rows have length ld.
void substitute(float* products, float* u, const float* v, int64_t ld, int64_t T, const float* beta, const float* whole,
                const float* ck, const float* cq) {
  for (int64_t at = 0; at < ld; at += N) {
    for (int64_t t = 0; t < T; ++t) {
      const Vec total = set1(whole[t]);
      Vec predicted = mul(total, load(products + t * ld + at));
      Vec y = mul(total, load(products + (T + t) * ld + at));
      for (int64_t s = 0; s < t; ++s) {
        const Vec earlier = load(u + s * ld + at);
        predicted = fma(set1(ck[t * T + s]), earlier, predicted);
        y = fma(set1(cq[t * T + s]), earlier, y);
      }
      const Vec mine = mul(set1(beta[t]), sub(load(v + t * ld + at), predicted));
      store(u + t * ld + at, mine);
      store(products + (T + t) * ld + at, fma(set1(cq[t * T + t]), mine, y));
    }
  }
}

// --- gates and normalisation -----------------------------------------------------------------------------------------

// g = -e^{A_log} softplus(x), in double. The plain product is exact in double's range for any |A_log| that is not extreme;
// beyond it the sum of logarithms has no inf * 0. `rate` is e^{A_log}.
float log_decay(double A_log, double rate, double x) {
  if (fabs(A_log) < 300.0 && !(x < -300.0 && x > -INFINITY)) {
    return float(-rate * (x > 40.0 ? x : log1p(exp(x))));
  }
  const double log_softplus = x < -37.0 ? x : log(x > 40.0 ? x : log1p(exp(x)));
  return float(-exp(A_log + log_softplus));
}

float sigmoid(double b) { return float(1.0 / (1.0 + exp(-b))); }

// dst = scale src / sqrt(sum src^2 + eps)
void load_normalized(float* dst, const char* src, DType dtype, int64_t n, int64_t padded, float scale) {
  load_row(dst, src, dtype, n, padded);
  Vec squares = set1(0.0f);
  for (int64_t i = 0; i < padded; i += N) squares = fma(load(dst + i), load(dst + i), squares);
  const Vec factor = set1(scale / sqrtf(sum(squares) + NORM_EPS));
  for (int64_t i = 0; i < padded; i += N) store(dst + i, mul(factor, load(dst + i)));
}

// Scratch carved from the thread's buffer: whole cache lines, so that neighbours do not share one.
struct Arena {
  float* base;
  int64_t used = 0;

  float* take(int64_t floats) {
    float* p = base + used;
    used += round_up(floats, 16);
    return base ? p : nullptr;
  }
};

// New tokens of a (row, key head): k^ in rows 0..T-1 of x, q~ in T..2T-1, and their products.
struct Fresh {
  int64_t T, Kp, Vp, Tp;
  float *x, *gram;                                  // [2T + pad, Kp]; gram[x][s] = x . k^_s, [2T, Tp]
  float *v, *u, *products;                          // [T, Vp], [T, Vp], [2T, Vp]
  float *beta, *whole, *weight, *g, *ck, *cq;       // per head: [T] four times, [T, T] twice
  double *decay, *between;                          // e^{g_t}; running products

  void carve(Arena& arena, int64_t tokens, int64_t K, int64_t V) {
    T = tokens, Kp = round_up(K, N), Vp = round_up(V, N > BLOCK ? N : BLOCK), Tp = round_up(T, DOT_ROWS);
    x = arena.take((2 * T + DOT_ROWS) * Kp), gram = arena.take(2 * T * Tp);
    v = arena.take(T * Vp), u = arena.take(T * Vp), products = arena.take(2 * T * Vp);
    beta = arena.take(round_up(T, N)), g = arena.take(round_up(T, N)), whole = arena.take(T), weight = arena.take(T);
    ck = arena.take(T * T), cq = arena.take(T * T);
    decay = reinterpret_cast<double*>(arena.take(2 * T)), between = reinterpret_cast<double*>(arena.take(2 * T));
  }

  // Shared by the value heads of key head h.
  template <class Args>
  void load_keys(const Args& args, int64_t row, int64_t first, int64_t h) {
    const int64_t K = args.sizes.K;
    for (int64_t t = 0; t < T; ++t) {
      load_normalized(x + t * Kp, args.k.at(row, first + t, h), args.k.dtype, K, Kp, 1.0f);
      load_normalized(x + (T + t) * Kp, args.q.at(row, first + t, h), args.q.dtype, K, Kp, args.scale);
    }
    memset(x + 2 * T * Kp, 0, size_t(DOT_ROWS * Kp) * sizeof(float));
    dots(x, Kp, Tp, x, 2 * T, Kp, gram, Tp);
  }

  // Gates, coefficients and values of value head hv.
  template <class Args>
  void load_head(const Args& args, int64_t row, int64_t first, int64_t hv) {
    const double A_log = load_scalar(args.A_log, hv), dt_bias = load_scalar(args.dt_bias, hv), rate = exp(A_log);
    load_strided(g, args.a.at(row, first, hv), args.a.dtype, args.a.token, T);
    load_strided(beta, args.b.at(row, first, hv), args.b.dtype, args.b.token, T);
    for (int64_t t = 0; t < T; ++t) {
      g[t] = log_decay(A_log, rate, double(g[t]) + dt_bias);
      beta[t] = sigmoid(double(beta[t]));
      decay[t] = exp(double(g[t]));
      load_row(v + t * Vp, args.v.at(row, first + t, hv), args.v.dtype, args.sizes.V, Vp);
    }
    double all = 1.0;
    for (int64_t t = 0; t < T; ++t) {
      all *= decay[t];
      whole[t] = float(all);
      for (int64_t s = 0; s < t; ++s) between[s] *= decay[t];
      between[t] = 1.0;
      for (int64_t s = 0; s <= t; ++s) {
        ck[t * T + s] = float(between[s]) * gram[t * Tp + s];
        cq[t * T + s] = float(between[s]) * gram[(T + t) * Tp + s];
      }
    }
    for (int64_t s = 0; s < T; ++s) weight[s] = float(between[s]);
  }
};

// The live window of a (row, key head): ring keys once, corrections per value head.
struct Past {
  int64_t P, Pp, Kp, Vp;
  float *k, *u;  // [Pp, Kp]; [P, Vp], each row scaled with e^{G_P - G_j}
  float decay;   // e^{G_P}

  void carve(Arena& arena, int64_t count, int64_t K, int64_t V) {
    P = count, Pp = round_up(P, DOT_ROWS), Kp = round_up(K, N), Vp = round_up(V, N > BLOCK ? N : BLOCK);
    k = arena.take(Pp * Kp), u = arena.take(P * Vp);
  }

  void load_keys(const Pool& k_ring, const Sizes& sizes, int64_t slot, int64_t h, int64_t start) {
    const char* ring = k_ring.at(slot, h);
    for (int64_t j = 0; j < P; ++j) {
      load_row(k + j * Kp, ring + (start + j) % sizes.R * sizes.K * size_of(k_ring.dtype), k_ring.dtype, sizes.K, Kp);
    }
    memset(k + P * Kp, 0, size_t((Pp - P) * Kp) * sizeof(float));
  }

  void load_head(const Pool& u_ring, const Pool& g_ring, const Sizes& sizes, int64_t slot, int64_t hv, int64_t start) {
    const char *ring = u_ring.at(slot, hv), *g = g_ring.at(slot, hv);
    double after = 1.0;
    for (int64_t j = P - 1; j >= 0; --j) {
      const int64_t at = (start + j) % sizes.R;
      float* row = u + j * Vp;
      load_row(row, ring + at * sizes.V * size_of(u_ring.dtype), u_ring.dtype, sizes.V, Vp);
      const Vec weight = set1(float(after));
      for (int64_t i = 0; i < Vp; i += N) store(row + i, mul(weight, load(row + i)));
      float log_decay;
      memcpy(&log_decay, g + at * 4, 4);
      after *= exp(double(log_decay));
    }
    decay = float(after);
  }
};

// A block of checkpoint rows as float32, padded with zeros: what the kernels below take when K is not whole vectors, or
// the block not BLOCK rows.
void load_block(float* block, const char* src, DType dtype, int64_t rows, int64_t K, int64_t Kp) {
  for (int64_t r = 0; r < rows; ++r) load_row(block + r * Kp, src + r * K * size_of(dtype), dtype, K, Kp);
  for (int64_t i = rows * Kp; i < BLOCK * Kp; i += N) store(block + i, set1(0.0f));
}

// The other way; true when something was beyond the dtype's range.
bool store_block(char* dst, DType dtype, const float* block, int64_t rows, int64_t K, int64_t Kp) {
  bool over = false;
  for (int64_t r = 0; r < rows; ++r) over |= store_saturated(dst + r * K * size_of(dtype), dtype, block + r * Kp, K);
  return over;
}

// A value head of a row: what is worked on, or comes next.
struct Place {
  const StepRow* row;
  int64_t hv;
};

inline void prefetch_row(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(p + i);
}

// Asks for a part of what the head that comes next reads besides its checkpoint: part `step` of `steps`, while this
// head's blocks are worked on. Window rows from the first step on, tokens from the last one back.
void prefetch_head(const StepArgs& args, const Place& place, int64_t step, int64_t steps) {
  const Sizes& z = args.sizes;
  const StepRow& row = *place.row;
  const int64_t per_key = z.HV / z.H, h = place.hv / per_key;
  const bool new_key = place.hv % per_key == 0;
  const int64_t u_bytes = z.V * size_of(args.u_ring.dtype), k_bytes = z.K * size_of(args.k_ring.dtype);
  if (step == 0) prefetch(args.g_ring.at(row.slot, place.hv) + row.start * 4);
  for (int64_t j = step; j < row.count; j += steps) {
    const int64_t at = (row.start + j) % z.R;
    prefetch_row(args.u_ring.at(row.slot, place.hv) + at * u_bytes, u_bytes);
    if (new_key) prefetch_row(args.k_ring.at(row.slot, h) + at * k_bytes, k_bytes);
  }
  for (int64_t t = steps - 1 - step; t < row.length; t += steps) {
    const int64_t token = row.first_token + t, size = size_of(args.v.dtype);
    prefetch_row(args.v.at(row.row, token, place.hv), z.V * size);
    prefetch_row(args.out.at(row.row, token, place.hv), z.V * size);
    if (new_key) prefetch_row(args.q.at(row.row, token, h), z.K * size), prefetch_row(args.k.at(row.row, token, h), z.K * size);
  }
}

void raise_flag(int32_t* flags, int32_t bit) { __atomic_fetch_or(flags, bit, __ATOMIC_RELAXED); }

// --- the step --------------------------------------------------------------------------------------------------------

// Heads first_head .. last_head-1 of key head h. `next`: what this thread works on after them.
bool step_unit(const StepArgs& args, StepRow& row, int64_t h, int64_t first_head, int64_t last_head, bool owns_keys,
               const Place& next) {
  const Sizes& z = args.sizes;
  const int64_t T = row.length, P = row.count, R = z.R;
  if (T == 0 && !row.fold) return true;
  Fresh fresh;
  Past past;
  float *block = nullptr, *scores = nullptr;
  Arena arena{nullptr};
  for (int pass = 0; pass < 2; ++pass) {  // the first pass only counts
    fresh.carve(arena, T, z.K, z.V);
    past.carve(arena, P, z.K, z.V);
    block = arena.take(BLOCK * past.Kp);
    scores = arena.take(2 * T * past.Pp);
    if (pass == 0) {
      float* scratch = thread_scratch(size_t(arena.used));
      if (!scratch) return false;
      arena = Arena{scratch};
    }
  }
  const int64_t Kp = past.Kp, Vp = past.Vp;
  past.load_keys(args.k_ring, z, row.slot, h, row.start);
  if (T) {
    fresh.load_keys(args, row.row, row.first_token, h);
    dots(past.k, Kp, past.Pp, fresh.x, 2 * T, Kp, scores, past.Pp);
  }
  if (owns_keys) {
    char* ring = args.k_ring.at(row.slot, h);
    for (int64_t t = 0; t < T; ++t) {
      store_row(ring + (row.start + P + t) % R * z.K * size_of(args.k_ring.dtype), args.k_ring.dtype, fresh.x + t * Kp, z.K);
    }
  }
  const int64_t row_bytes = z.K * size_of(args.state.dtype);
  bool state_over = false, ring_over = false;
  for (int64_t hv = first_head; hv < last_head; ++hv) {
    past.load_head(args.u_ring, args.g_ring, z, row.slot, hv, row.start);
    if (T) fresh.load_head(args, row.row, row.first_token, hv);
    char* state = args.state.at(row.slot, hv);
    const int64_t written = round_up(z.V, BLOCK);
    for (int64_t x = 0; x < 2 * T && written < Vp; ++x) {  // lanes that no block writes would carry stale scratch
      memset(fresh.products + x * Vp + written, 0, size_t(Vp - written) * sizeof(float));
    }
    const Place after = hv + 1 < last_head ? Place{&row, hv + 1} : next;
    const char* next_state = args.state.at(after.row->slot, after.hv);
    for (int64_t v0 = 0; v0 < z.V; v0 += BLOCK) {
      const int64_t rows = least(BLOCK, z.V - v0), offset = v0 * row_bytes + PREFETCH_BYTES, head_bytes = z.V * row_bytes;
      prefetch_head(args, after, v0 / BLOCK, round_up(z.V, BLOCK) / BLOCK);
      const Ahead ahead{offset < head_bytes ? state + offset : next_state + (offset - head_bytes)};
      const Update window{past.decay, past.u + v0, Vp, 1, past.k, Kp, P};
      char* at = state + v0 * row_bytes;
      if (rows == BLOCK && z.K == Kp) {
        with_type(args.state.dtype, [&](auto type) {
          using Type = decltype(type);
          auto* S = words<Type>(at);
          dots<Type>(S, z.K, BLOCK, fresh.x, 2 * T, Kp, fresh.products + v0, Vp, ahead);
          if (row.fold) state_over |= rank_update<Type, Type>(S, z.K, S, z.K, BLOCK, Kp, window);
        });
      } else {
        load_block(block, at, args.state.dtype, rows, z.K, Kp);
        dots<F32>(block, Kp, BLOCK, fresh.x, 2 * T, Kp, fresh.products + v0, Vp, ahead);
        if (row.fold) {
          rank_update<F32, F32>(block, Kp, block, Kp, BLOCK, Kp, window);
          state_over |= store_block(at, args.state.dtype, block, rows, z.K, Kp);
        }
      }
    }
    if (!T) continue;
    rank_update<F32, F32>(fresh.products, Vp, fresh.products, Vp, 2 * T, Vp, {past.decay, scores, 1, past.Pp, past.u, Vp, P});
    substitute(fresh.products, fresh.u, fresh.v, Vp, T, fresh.beta, fresh.whole, fresh.ck, fresh.cq);
    char *u_ring = args.u_ring.at(row.slot, hv), *g_ring = args.g_ring.at(row.slot, hv);
    for (int64_t t = 0; t < T; ++t) {
      const int64_t at = (row.start + P + t) % R;
      ring_over |= store_saturated(u_ring + at * z.V * size_of(args.u_ring.dtype), args.u_ring.dtype, fresh.u + t * Vp, z.V);
      memcpy(g_ring + at * 4, fresh.g + t, 4);
      store_row(args.out.at(row.row, row.first_token + t, hv), args.out.dtype, fresh.products + (T + t) * Vp, z.V);
    }
  }
  if (state_over) raise_flag(&row.flags, STATE_SATURATED);
  if (ring_over) raise_flag(&row.flags, RING_SATURATED);
  return true;
}

bool step(const StepArgs& args, int64_t begin, int64_t end) {
  const int64_t H = args.sizes.H, per_key = args.sizes.HV / H, per_unit = per_key / args.splits;
  const auto row_of = [&](int64_t unit) -> StepRow& { return args.rows[unit / args.splits / H]; };
  const auto head_of = [&](int64_t unit) { return unit / args.splits % H * per_key + unit % args.splits * per_unit; };
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t hv = head_of(unit), then = least(unit + 1, end - 1);
    const Place next{&row_of(then), head_of(then)};
    if (!step_unit(args, row_of(unit), hv / per_key, hv, hv + per_unit, unit % args.splits == 0, next)) return false;
  }
  return true;
}

// --- folds -----------------------------------------------------------------------------------------------------------

bool fold(const FoldArgs& args, int64_t begin, int64_t end) {
  const Sizes& z = args.sizes;
  const int64_t per_key = z.HV / z.H;
  for (int64_t unit = begin; unit < end; ++unit) {
    FoldRow& row = args.rows[unit / z.H];
    const int64_t h = unit % z.H, in_bytes = z.K * size_of(args.state.dtype), out_bytes = z.K * size_of(args.out.dtype);
    if (row.count == 0 && args.state.dtype == args.out.dtype) {  // the same bits, NaN payloads included
      for (int64_t hv = h * per_key; hv < (h + 1) * per_key; ++hv) {
        memmove(args.out.at(row.dst, hv), args.state.at(row.src, hv), size_t(z.V * in_bytes));
      }
      continue;
    }
    Past past;
    float* block = nullptr;
    Arena arena{nullptr};
    for (int pass = 0; pass < 2; ++pass) {
      past.carve(arena, row.count, z.K, z.V);
      block = arena.take(BLOCK * past.Kp);
      if (pass == 0) {
        float* scratch = thread_scratch(size_t(arena.used));
        if (!scratch) return false;
        arena = Arena{scratch};
      }
    }
    past.load_keys(args.k_ring, z, row.src, h, row.start);
    bool over = false;
    for (int64_t hv = h * per_key; hv < (h + 1) * per_key; ++hv) {
      past.load_head(args.u_ring, args.g_ring, z, row.src, hv, row.start);
      const char* from = args.state.at(row.src, hv);
      char* to = args.out.at(row.dst, hv);
      for (int64_t v0 = 0; v0 < z.V; v0 += BLOCK) {
        const int64_t rows = least(BLOCK, z.V - v0);
        const Update window{past.decay, past.u + v0, past.Vp, 1, past.k, past.Kp, past.P};
        const char* src = from + v0 * in_bytes;
        char* dst = to + v0 * out_bytes;
        if (rows == BLOCK && z.K == past.Kp) {
          over |= with_type(args.state.dtype, [&](auto type) {
            using From = decltype(type);
            const auto into = [&](auto out) {
              using To = decltype(out);
              return rank_update<From, To>(words<To>(dst), z.K, words<From>(src), z.K, BLOCK, z.K, window);
            };
            return args.out.dtype == args.state.dtype ? into(type) : into(F32{});
          });
        } else {
          load_block(block, src, args.state.dtype, rows, z.K, past.Kp);
          rank_update<F32, F32>(block, past.Kp, block, past.Kp, BLOCK, past.Kp, window);
          over |= store_block(dst, args.out.dtype, block, rows, z.K, past.Kp);
        }
      }
    }
    if (over) raise_flag(&row.flags, STATE_SATURATED);
  }
  return true;
}

// --- prefill ---------------------------------------------------------------------------------------------------------

// A key head's states stay in this thread's cache over the whole prompt; CHUNK tokens at a time are a step without a
// window, followed by the fold of their own rows.
bool prefill_unit(const PrefillArgs& args, int64_t row, int64_t h, int64_t first_head, int64_t last_head) {
  const Sizes& z = args.sizes;
  const int64_t begin = args.bounds[row], end = args.bounds[row + 1], longest = least(CHUNK, end - begin);
  const int64_t heads = last_head - first_head;
  Fresh fresh;
  float* states = nullptr;
  Arena arena{nullptr};
  for (int pass = 0; pass < 2; ++pass) {
    fresh.carve(arena, longest, z.K, z.V);
    states = arena.take(heads * fresh.Vp * fresh.Kp);
    if (pass == 0) {
      float* scratch = thread_scratch(size_t(arena.used));
      if (!scratch) return false;
      arena = Arena{scratch};
    }
  }
  const int64_t Kp = fresh.Kp, Vp = fresh.Vp, row_bytes = z.K * 4;
  memset(states, 0, size_t(heads * Vp * Kp) * sizeof(float));
  for (int64_t i = 0; i < heads && args.has_initial; ++i) {
    for (int64_t v = 0; v < z.V; ++v) {
      load_row(states + (i * Vp + v) * Kp, args.state.at(row, first_head + i) + v * row_bytes, DType::f32, z.K, Kp);
    }
  }
  const int64_t scratch_used = arena.used;
  for (int64_t token = begin; token < end; token += longest) {
    const int64_t T = least(longest, end - token);
    if (T != fresh.T) {
      arena.used = 0;  // a shorter last chunk fits where the longer ones were, in front of the states
      fresh.carve(arena, T, z.K, z.V);
      arena.used = scratch_used;
    }
    fresh.load_keys(args, 0, token, h);
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t hv = first_head + i;
      float* S = states + i * Vp * Kp;
      fresh.load_head(args, 0, token, hv);
      dots(S, Kp, Vp, fresh.x, 2 * T, Kp, fresh.products, Vp);
      substitute(fresh.products, fresh.u, fresh.v, Vp, T, fresh.beta, fresh.whole, fresh.ck, fresh.cq);
      for (int64_t t = 0; t < T; ++t) {
        store_row(args.out.at(0, token + t, hv), args.out.dtype, fresh.products + (T + t) * Vp, z.V);
        const Vec weight = set1(fresh.weight[t]);
        for (int64_t v = 0; v < Vp; v += N) store(fresh.u + t * Vp + v, mul(weight, load(fresh.u + t * Vp + v)));
      }
      rank_update<F32, F32>(S, Kp, S, Kp, Vp, Kp, {fresh.whole[T - 1], fresh.u, Vp, 1, fresh.x, Kp, T});
    }
  }
  for (int64_t i = 0; i < heads; ++i) {
    for (int64_t v = 0; v < z.V; ++v) {
      store_row(args.state.at(row, first_head + i) + v * row_bytes, DType::f32, states + (i * Vp + v) * Kp, z.K);
    }
  }
  return true;
}

bool prefill(const PrefillArgs& args, int64_t begin, int64_t end) {
  const int64_t per_key = args.sizes.HV / args.sizes.H, per_unit = per_key / args.splits;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t split = unit % args.splits, h = unit / args.splits % args.sizes.H;
    const int64_t hv = h * per_key + split * per_unit;
    if (!prefill_unit(args, unit / args.splits / args.sizes.H, h, hv, hv + per_unit)) return false;
  }
  return true;
}

}  // namespace
