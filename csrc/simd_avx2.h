// AVX2 + FMA + F16C: eight floats.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int N = 8;
constexpr int SUMS = 8;
constexpr int MOST_VECS = 4;
constexpr int TILE = 2;

using Vec = __m256;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec set1(float s) { return _mm256_set1_ps(s); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline float sum(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline Vec load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store_f16(uint16_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void store_bf16(uint16_t* p, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(even, nan, is_nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

// max and min return their second operand when one is NaN.
inline Vec larger(Vec a, Vec v) { return _mm256_max_ps(_mm256_andnot_ps(set1(-0.0f), v), a); }
inline Vec clamp(Vec v, float limit) { return _mm256_min_ps(set1(limit), _mm256_max_ps(set1(-limit), v)); }

inline bool any_above(Vec v, float limit) { return _mm256_movemask_ps(_mm256_cmp_ps(v, set1(limit), _CMP_GT_OQ)) != 0; }

inline Vec keep(Vec v) {
  __asm__("" : "+x"(v));
  return v;
}

// Eight sums at once: lane i is the sum of part[i].
inline __attribute__((always_inline)) Vec sums(const Vec (&part)[8]) {
  Vec s[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    s[r] = _mm256_add_ps(_mm256_permute2f128_ps(part[r], part[r + 4], 0x20), _mm256_permute2f128_ps(part[r], part[r + 4], 0x31));
  }
  const Vec even = _mm256_add_ps(_mm256_unpacklo_ps(s[0], s[2]), _mm256_unpackhi_ps(s[0], s[2]));
  const Vec odd = _mm256_add_ps(_mm256_unpacklo_ps(s[1], s[3]), _mm256_unpackhi_ps(s[1], s[3]));
  return _mm256_add_ps(_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
}

// out[m * ldo + r] = the sum of acc[r][m].
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void reduce(const Vec (&acc)[ROWS][VECS], float* out, int64_t ldo) {
  static_assert(ROWS * VECS == 8);
  Vec part[8];
#pragma GCC unroll 8
  for (int lane = 0; lane < 8; ++lane) part[lane] = acc[lane % ROWS][lane / ROWS];
  const Vec all = sums(part);
  const __m128 half[2] = {_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)};
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    if constexpr (ROWS == 4) {
      _mm_storeu_ps(out + c * ldo, half[c]);
    } else {
      _mm_storel_pi(reinterpret_cast<__m64*>(out + 2 * c * ldo), half[c]);
      _mm_storeh_pi(reinterpret_cast<__m64*>(out + (2 * c + 1) * ldo), half[c]);
    }
  }
}

}  // namespace
