// ARMv8 NEON: four floats; half conversions are part of the base architecture.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int N = 4;
constexpr int DOT_ROWS = 4;
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

inline Vec keep(Vec v) { return v; }

inline void reduce(const Vec (&acc)[DOT_ROWS][2], float* out, int64_t ldo) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(acc[0][0], acc[1][0]), vpaddq_f32(acc[2][0], acc[3][0])));
  vst1q_f32(out + ldo, vpaddq_f32(vpaddq_f32(acc[0][1], acc[1][1]), vpaddq_f32(acc[2][1], acc[3][1])));
}

}  // namespace
