// SPDX-License-Identifier: Apache-2.0
// The merge operator on scalars, for the host and for CUDA threads, and on packed rows.
//
// The state of attention over a set of keys is (m_log2, l, o): the largest logit in log2 units, the sum of
// 2^(logit - m_log2), and the unnormalised sum of 2^(logit - m_log2) * v. merge(lower, higher) is the state of the
// union. Laws: identity (-inf, 0, 0) merged with s is s bit for bit; empty with empty is empty; associative up to
// rounding; the order of the arguments is fixed by position in the tree and matters for the bits.
//
// A packed row is [m_log2, l, o[0] ... o[v_dim - 1]] (treeattn/state.h).
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "merge/exp2_polynomial.h"
#include "merge/log_polynomial.h"

#if defined(__CUDACC__)
#define TREEATTN_MERGE_FN __host__ __device__ inline
#else
#define TREEATTN_MERGE_FN inline
#endif

namespace treeattn::merge {

// Arithmetic on one float. fma is always fused, so the bits agree between hosts, SIMD targets and devices.
struct ScalarOps {
  TREEATTN_MERGE_FN static float set(float x) { return x; }
  TREEATTN_MERGE_FN static float add(float a, float b) { return a + b; }
  TREEATTN_MERGE_FN static float sub(float a, float b) { return a - b; }
  TREEATTN_MERGE_FN static float mul(float a, float b) { return a * b; }
  TREEATTN_MERGE_FN static float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return std::fma(a, b, c);
#endif
  }
  // b when either is NaN.
  TREEATTN_MERGE_FN static float max(float a, float b) { return a > b ? a : b; }
  // p * 2^n, n being the integer that exp2_in_range left in the low mantissa bits of `shifted`. A product, not an
  // addition to the exponent bits of p, which could turn a NaN into a number.
  TREEATTN_MERGE_FN static float times_power_of_two(float p, float shifted) {
#if defined(__CUDA_ARCH__)
    return p * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
#else
    return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000u);
#endif
  }
};

#include "merge/operator-inl.h"

inline constexpr float kEmptyMax = -std::numeric_limits<float>::infinity();

// What a state with maximum m weighs in a union with maximum m_union >= m. Requires m != -inf.
TREEATTN_MERGE_FN float state_weight(float m, float m_union) { return exp2_weight<ScalarOps>(m - m_union); }

// Row `lower` becomes merge(lower, higher). An empty side is selected away, never multiplied: its l and o may hold
// anything, NaN included.
TREEATTN_MERGE_FN void merge_row(float* lower, const float* higher, std::size_t row_floats) {
  if (higher[0] == kEmptyMax) return;
  if (lower[0] == kEmptyMax) {
    for (std::size_t i = 0; i < row_floats; ++i) lower[i] = higher[i];
    return;
  }
  const float m = ScalarOps::max(lower[0], higher[0]);
  const float w_lower = state_weight(lower[0], m);
  const float w_higher = state_weight(higher[0], m);
  lower[0] = m;
  for (std::size_t i = 1; i < row_floats; ++i) {
    lower[i] = merge_component<ScalarOps>(lower[i], w_lower, higher[i], w_higher);
  }
}

inline constexpr double kLn2 = 0x1.62e42fefa39efp-1;

// ln(1 + r), |r| <= 1/3.
TREEATTN_MERGE_FN float log_near_one(float r) {
  float p = kLogB8;
  p = ScalarOps::fma(p, r, kLogB7);
  p = ScalarOps::fma(p, r, kLogB6);
  p = ScalarOps::fma(p, r, kLogB5);
  p = ScalarOps::fma(p, r, kLogB4);
  p = ScalarOps::fma(p, r, kLogB3);
  p = ScalarOps::fma(p, r, kLogB2);
  p = ScalarOps::fma(p, r, kLogB1);
  p = ScalarOps::fma(p, r, -0.5f);
  return ScalarOps::fma(r * r, p, r);
}

// lse = ln 2 * m_log2 + ln l of a row whose l is neither 0 nor subnormal nor infinite, with l = 2^e f and
// 2/3 <= f < 4/3. Not by a logarithm in double precision: this is the last thing that a call on a GPU waits for. The
// bits agree between hosts and devices.
TREEATTN_MERGE_FN float usual_row_lse(float m_log2, float l) {
  constexpr std::uint32_t kTwoThirds = 0x3f2aaaab;
  const std::uint32_t above = std::bit_cast<std::uint32_t>(l) - kTwoThirds;
  const float ln_f = log_near_one(std::bit_cast<float>((above & 0x7fffff) + kTwoThirds) - 1.0f);
  return static_cast<float>((static_cast<double>(m_log2) + (static_cast<std::int32_t>(above) >> 23)) * kLn2 + ln_f);
}
// The same for every row that is not empty.
TREEATTN_MERGE_FN float row_lse(float m_log2, float l) {
  if (l >= 0x1p-126f && l <= std::numeric_limits<float>::max()) return usual_row_lse(m_log2, l);
  return static_cast<float>(m_log2 * kLn2 + std::log(l));
}

// What a component o of a state comes to in the end: 0 for the empty one.
TREEATTN_MERGE_FN float finished(float m_log2, float l, float o) { return m_log2 == kEmptyMax ? 0.0f : o / l; }

// out[v_dim] = o / l and the row's lse. The empty row gives (0, -inf).
inline float finalize_row(const float* row, std::size_t v_dim, float* out) {
  for (std::size_t i = 0; i < v_dim; ++i) out[i] = finished(row[0], row[1], row[2 + i]);
  return row[0] == kEmptyMax ? kEmptyMax : row_lse(row[0], row[1]);
}

}  // namespace treeattn::merge
