// SPDX-License-Identifier: Apache-2.0
// What the AVX-512 and AMX files for linear maps share: rows of x in narrow types, 16 rows turned round, sums across
// lanes. Everything is static: see linear_loops.h.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/linear_loops.h"
#ifdef TREEATTN_SOFTWARE_TILES
#include "kernels/cpu/x86/software_tiles.h"
#endif

namespace treeattn::kernels::avx512 {

// The first `count` of 16 or 64 lanes; all of them if there are more.
static inline __mmask16 first_lanes(std::int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1);
}
static inline __mmask64 first_bytes(std::int64_t count) {
  return count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
}

// `bytes` bytes, zeros up to 64. Memory beyond them is not touched.
static inline __m512i load_bytes(const void* from, std::int64_t bytes) {
  if (bytes >= 64) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi8(first_bytes(bytes), from);
}

// For one row of x, which meets 16 rows of weights side by side: where in a row lies what has to be fetched while its
// bytes from `at` on are multiplied. Behind the end of a row it is in the row 16 below.
static inline std::int64_t bytes_ahead(std::int64_t at, std::int64_t row_bytes) {
  constexpr std::int64_t kBytes = 512, kRows = 16;
  return at + kBytes < row_bytes ? at + kBytes : at + kBytes + (kRows - 1) * row_bytes;
}

// 32 floats, or `count` and zeros, as bfloat16, rounded to nearest even. Subnormal numbers become zero.
static inline __m512i to_bfloat16(__m512 low, __m512 high) {
#ifdef TREEATTN_SOFTWARE_TILES
  return _mm512_inserti64x4(_mm512_castsi256_si512(amx::to_bfloat16(low)), amx::to_bfloat16(high), 1);
#else
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#endif
}
static inline __m512i to_bfloat16(const float* from, std::int64_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(first_lanes(count), from);
  const __m512 high = count > 16 ? _mm512_maskz_loadu_ps(first_lanes(count - 16), from + 16) : _mm512_setzero_ps();
  return to_bfloat16(low, high);
}

// As integers, magnitudes are in the order of the numbers, and NaN is the largest.
static inline __m512i magnitude_bits(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

// VPDPBUSD wants one factor unsigned. Adding 128 makes it so; 128 times the other factor is then too much.
static inline __m512i made_unsigned(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }

// 32 numbers to int8, as base::quantize_row_int8 does it.
struct QuantizedGroup {
  __m256i values;
  float scale;
};
static inline QuantizedGroup quantize_group(const float* from) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
  const unsigned most_bits = _mm512_reduce_max_epu32(_mm512_max_epu32(magnitude_bits(low), magnitude_bits(high)));
  if (most_bits > 0x7f7fffffu) return {_mm256_setzero_si256(), __builtin_nanf("")};
  float most = 0.0f;
  __builtin_memcpy(&most, &most_bits, sizeof(most));
  float scale = most / 127.0f;
  if (most == 0.0f) scale = 1.0f;
  if (scale * 127.0f < most) scale += __FLT_DENORM_MIN__;  // as base::scale_to_fit does it
  const __m512 divisor = _mm512_set1_ps(scale);
  const auto narrow = [&](__m512 x) {
    return _mm_max_epi8(_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(x, divisor))), _mm_set1_epi8(-127));
  };
  return {_mm256_set_m128i(narrow(high), narrow(low)), scale};
}

// 16 vectors of 16 numbers each, turned round.
static inline void transpose(__m512i (&v)[16]) {
  __m512i pairs[16], fours[16];
  TREEATTN_UNROLL
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // fours[4 i + j]: in quarter q column 4 q + j of rows 4 i to 4 i + 3.
  TREEATTN_UNROLL
  for (int i = 0; i < 16; i += 4) {
    fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // quarters 0 and 2, or 1 and 3, of either
  TREEATTN_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], kEven);
    const __m512i even_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], kEven);
    const __m512i odd_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], kOdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], kOdd);
    v[j] = _mm512_shuffle_i32x4(even_low, even_high, kEven);
    v[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, kEven);
    v[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, kOdd);
    v[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, kOdd);
  }
}

// The sums of the lanes of four vectors.
static inline __m128 sums_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto halves = [](__m512 v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); };
  const __m256 fours = _mm256_hadd_ps(_mm256_hadd_ps(halves(a), halves(b)), _mm256_hadd_ps(halves(c), halves(d)));
  return _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1));
}

// y[0 .. count) = or += values, count being at most 16.
static inline void put(float* y, std::int64_t count, __m512 values, bool add) {
  const __mmask16 lanes = first_lanes(count);
  if (add) values = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, y), values);
  _mm512_mask_storeu_ps(y, lanes, values);
}

}  // namespace treeattn::kernels::avx512
