// Portable "SIMD": four floats, software half conversions. Correct everywhere, fast nowhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int N = 4;         // lanes
constexpr int SUMS = 8;       // accumulators of a tile of dots()
constexpr int MOST_VECS = 2;  // vectors of its flattest tile
constexpr int TILE = 2;       // vectors of a tile of rank_update()

struct Vec {
  float x[N];
};

inline Vec load(const float* p) { Vec v; std::memcpy(v.x, p, sizeof v.x); return v; }
inline void store(float* p, Vec v) { std::memcpy(p, v.x, sizeof v.x); }
inline Vec set1(float s) { return {{s, s, s, s}}; }
inline Vec mul(Vec a, Vec b) { for (int i = 0; i < N; ++i) a.x[i] *= b.x[i]; return a; }
inline Vec sub(Vec a, Vec b) { for (int i = 0; i < N; ++i) a.x[i] -= b.x[i]; return a; }
inline Vec fma(Vec a, Vec b, Vec c) { for (int i = 0; i < N; ++i) c.x[i] += a.x[i] * b.x[i]; return c; }
inline float sum(Vec v) { return (v.x[0] + v.x[2]) + (v.x[1] + v.x[3]); }
inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest << 13));  // inf, NaN
  if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + 0x38000000));
  return from_bits(to_bits(float(rest) * 0x1p-24f) | sign);  // subnormal, zero
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(sign | 0x7e00 | ((rest >> 13) & 0x3ff));  // NaN
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);                          // rounds to inf
  if (rest >= 0x38800000) return uint16_t(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
  const float magic = from_bits(rest) + 0.5f;  // the sum's last bit is 2^-24: rounds to even there
  return uint16_t(sign | (to_bits(magic) - 0x3f000000));
}

inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec load_f16(const uint16_t* p) { Vec v; for (int i = 0; i < N; ++i) v.x[i] = half_to_float(p[i]); return v; }
inline void store_f16(uint16_t* p, Vec v) { for (int i = 0; i < N; ++i) p[i] = float_to_half(v.x[i]); }
inline Vec load_bf16(const uint16_t* p) { Vec v; for (int i = 0; i < N; ++i) v.x[i] = from_bits(uint32_t(p[i]) << 16); return v; }
inline void store_bf16(uint16_t* p, Vec v) { for (int i = 0; i < N; ++i) p[i] = float_to_bfloat(v.x[i]); }

// Lane-wise max(a, |v|), where a NaN in v counts as nothing; and v limited to +-limit, where NaN stays.
inline Vec larger(Vec a, Vec v) {
  for (int i = 0; i < N; ++i) a.x[i] = std::fabs(v.x[i]) > a.x[i] ? std::fabs(v.x[i]) : a.x[i];
  return a;
}
inline Vec clamp(Vec v, float limit) {
  for (int i = 0; i < N; ++i) v.x[i] = std::fabs(v.x[i]) > limit ? std::copysign(limit, v.x[i]) : v.x[i];
  return v;
}

inline bool any_above(Vec v, float limit) {
  bool above = false;
  for (int i = 0; i < N; ++i) above |= v.x[i] > limit;
  return above;
}

inline Vec keep(Vec v) { return v; }

// out[m * ldo + r] = the sum of acc[r][m].
template <int ROWS, int VECS>
inline void reduce(const Vec (&acc)[ROWS][VECS], float* out, int64_t ldo) {
  for (int r = 0; r < ROWS; ++r) {
    for (int m = 0; m < VECS; ++m) out[m * ldo + r] = sum(acc[r][m]);
  }
}

}  // namespace
