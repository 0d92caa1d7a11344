// AVX-512 (F, BW, DQ, VL): sixteen floats.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int N = 16;
constexpr int SUMS = 16;      // accumulators of a tile of dots()
constexpr int MOST_VECS = 8;  // vectors of its flattest tile
constexpr int TILE = 4;       // vectors of a tile of rank_update()

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

// range returns the number when one operand is NaN; min and max return the second.
inline Vec larger(Vec a, Vec v) { return _mm512_range_ps(a, v, 0xb); }  // 3: the larger magnitude, 8: without its sign
inline Vec clamp(Vec v, float limit) { return _mm512_min_ps(set1(limit), _mm512_max_ps(set1(-limit), v)); }

inline bool any_above(Vec v, float limit) { return _mm512_cmp_ps_mask(v, set1(limit), _CMP_GT_OQ) != 0; }

// Loaded once, kept in a register: GCC otherwise folds the load into every use, and the load ports become the limit.
inline Vec keep(Vec v) {
  __asm__("" : "+v"(v));
  return v;
}

inline Vec add_halves(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline Vec add_quarters(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline Vec add_lanes(Vec a, Vec b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }

// Sixteen sums at once by four rounds of pairwise adds: lane 4 c + i is the sum of part[c][i].
inline __attribute__((always_inline)) Vec sums(const Vec (&part)[4][4]) {
  Vec quarter[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    quarter[i] = add_quarters(add_halves(part[0][i], part[1][i]), add_halves(part[2][i], part[3][i]));
  }
  return add_lanes(add_lanes(quarter[0], quarter[2]), add_lanes(quarter[1], quarter[3]));
}

// out[m * ldo + r] = the sum of acc[r][m].
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void reduce(const Vec (&acc)[ROWS][VECS], float* out, int64_t ldo) {
  static_assert(ROWS * VECS == 16);
  Vec part[4][4];
#pragma GCC unroll 16
  for (int lane = 0; lane < 16; ++lane) part[lane / 4][lane % 4] = acc[lane % ROWS][lane / ROWS];
  const Vec all = sums(part);
  if constexpr (ROWS == 8) {
    _mm256_storeu_ps(out, _mm512_castps512_ps256(all));
    _mm256_storeu_ps(out + ldo, _mm512_extractf32x8_ps(all, 1));
  } else {
    const __m128 quarter[4] = {_mm512_castps512_ps128(all), _mm512_extractf32x4_ps(all, 1), _mm512_extractf32x4_ps(all, 2),
                               _mm512_extractf32x4_ps(all, 3)};
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      if constexpr (ROWS == 4) {
        _mm_storeu_ps(out + c * ldo, quarter[c]);
      } else {
        _mm_storel_pi(reinterpret_cast<__m64*>(out + 2 * c * ldo), quarter[c]);
        _mm_storeh_pi(reinterpret_cast<__m64*>(out + (2 * c + 1) * ldo), quarter[c]);
      }
    }
  }
}

}  // namespace
