// ARMv8 NEON: four floats; half conversions are part of the base architecture.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int N = 4;
constexpr int SUMS = 16;
constexpr int MOST_VECS = 4;
constexpr int TILE = 4;

using Vec = float32x4_t;

inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec set1(float s) { return vdupq_n_f32(s); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline float sum(Vec v) { return vaddvq_f32(v); }
inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline Vec load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void store_f16(uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
inline Vec load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline void store_bf16(uint16_t* p, Vec v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t even = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  const uint32x4_t nan = vorrq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(0x40));
  vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(v, v), even, nan)));
}

inline Vec larger(Vec a, Vec v) { return vmaxnmq_f32(a, vabsq_f32(v)); }                       // the number, not the NaN
inline Vec clamp(Vec v, float limit) { return vminq_f32(set1(limit), vmaxq_f32(set1(-limit), v)); }  // NaN stays

inline bool any_above(Vec v, float limit) { return vmaxvq_u32(vcgtq_f32(v, set1(limit))) != 0; }

inline Vec keep(Vec v) { return v; }

// out[m * ldo + r] = the sum of acc[r][m].
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void reduce(const Vec (&acc)[ROWS][VECS], float* out, int64_t ldo) {
  static_assert(ROWS % 4 == 0);
  for (int m = 0; m < VECS; ++m) {
    for (int r = 0; r < ROWS; r += 4) {
      const Vec low = vpaddq_f32(acc[r][m], acc[r + 1][m]), high = vpaddq_f32(acc[r + 2][m], acc[r + 3][m]);
      vst1q_f32(out + m * ldo + r, vpaddq_f32(low, high));
    }
  }
}

}  // namespace
