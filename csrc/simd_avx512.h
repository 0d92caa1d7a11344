// AVX-512 (F, BW, DQ, VL): sixteen floats.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int N = 16;
constexpr int DOT_ROWS = 8;
constexpr int TILE = 4;

using Vec = __m512;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec set1(float s) { return _mm512_set1_ps(s); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline Vec load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store_f16(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store_bf16(uint16_t* p, Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __m512i words = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), even, nan);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}

inline Vec saturate(Vec v, float limit, bool& over) {
  over |= _mm512_cmp_ps_mask(_mm512_abs_ps(v), set1(limit), _CMP_GT_OQ) != 0;
  return _mm512_min_ps(set1(limit), _mm512_max_ps(set1(-limit), v));  // a NaN in the second operand is returned
}

inline void reduce(const Vec (&acc)[DOT_ROWS][2], float* out0, float* out1) {
  // Four rounds of pairwise adds; the order of the pairs puts vector 0 into the low half of the result.
  Vec half[2][4], quarter[4];
  for (int x = 0; x < 2; ++x) {
    for (int r = 0; r < 4; ++r) {
      const Vec a = acc[r][x], b = acc[r + 4][x];
      half[x][r] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
  }
  for (int r = 0; r < 4; ++r) {
    const Vec a = half[0][r], b = half[1][r];
    quarter[r] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const Vec even = _mm512_add_ps(_mm512_unpacklo_ps(quarter[0], quarter[2]), _mm512_unpackhi_ps(quarter[0], quarter[2]));
  const Vec odd = _mm512_add_ps(_mm512_unpacklo_ps(quarter[1], quarter[3]), _mm512_unpackhi_ps(quarter[1], quarter[3]));
  const Vec all = _mm512_add_ps(_mm512_unpacklo_ps(even, odd), _mm512_unpackhi_ps(even, odd));
  _mm256_storeu_ps(out0, _mm512_castps512_ps256(all));
  _mm256_storeu_ps(out1, _mm512_extractf32x8_ps(all, 1));
}

}  // namespace
