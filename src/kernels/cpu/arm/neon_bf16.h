// SPDX-License-Identifier: Apache-2.0
// What the kernels for bfloat16 K and V by BFMMLA have in common: limbs, and blocks of values that lie as it takes
// them. Static, for the reason in neon_loops.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/arm/neon_vectors.h"
#include "kernels/cpu/bfloat16_limbs.h"

namespace treeattn::kernels::neon {

// The next limb of four numbers, of which it leaves the rest. Truncation keeps that exact and of the same sign; a NaN
// or infinity belongs to the first limb alone, and a NaN becomes quiet: the upper half of another may be an infinity.
static inline uint16x4_t take_limb(float32x4_t& x) {
  const uint32x4_t quiet = vbicq_u32(vdupq_n_u32(0x00400000u), vceqq_f32(x, x));
  const uint32x4_t bits = vorrq_u32(vreinterpretq_u32_f32(x), quiet);
  const float32x4_t rest = vsubq_f32(x, vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xFFFF0000u))));
  x = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(rest), vceqq_f32(rest, rest)));
  return vshrn_n_u32(bits, 16);
}

static inline bfloat16x8_t load8(const std::uint16_t* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }
static inline bfloat16x8_t load8(const std::byte* p) { return load8(reinterpret_cast<const std::uint16_t*>(p)); }

// Two rows of eight elements as the 2x4 blocks of the first four and of the last four.
static inline bfloat16x8_t zip1_64(bfloat16x8_t a, bfloat16x8_t b) {
  return vreinterpretq_bf16_u64(vzip1q_u64(vreinterpretq_u64_bf16(a), vreinterpretq_u64_bf16(b)));
}
static inline bfloat16x8_t zip2_64(bfloat16x8_t a, bfloat16x8_t b) {
  return vreinterpretq_bf16_u64(vzip2q_u64(vreinterpretq_u64_bf16(a), vreinterpretq_u64_bf16(b)));
}

// Weights of two rows and four tokens in two limbs, each a 2x4 block.
struct WeightLimbs {
  bfloat16x8_t high, low;
};
static inline WeightLimbs split_weights(float32x4_t a, float32x4_t b) {
  const bfloat16x8_t high = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b);
  const float32x4_t rest_a = vsubq_f32(a, vcvtq_low_f32_bf16(high)), rest_b = vsubq_f32(b, vcvtq_high_f32_bf16(high));
  return {high, vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(rest_a), rest_b)};
}

// 4 tokens by 8 dims.
struct Rows4 {
  uint16x8_t rows[4];
};
static inline Rows4 load_rows(const std::byte* const* rows, std::ptrdiff_t at) {
  const auto load = [&](int i) { return vld1q_u16(reinterpret_cast<const std::uint16_t*>(rows[i] + at)); };
  return {{load(0), load(1), load(2), load(3)}};
}

// The same as four blocks of {dim, dim + 1} x 4 tokens.
struct Transposed {
  bfloat16x8_t dims[4];
};
static inline Transposed transposed(const Rows4& x) {
  const auto zip = [&](int i) { return vreinterpretq_u32_u16(vzip1q_u16(x.rows[i], x.rows[i + 1])); };
  const auto zip_high = [&](int i) { return vreinterpretq_u32_u16(vzip2q_u16(x.rows[i], x.rows[i + 1])); };
  const uint32x4_t a = zip(0), b = zip_high(0), c = zip(2), d = zip_high(2);
  return {{vreinterpretq_bf16_u32(vzip1q_u32(a, c)), vreinterpretq_bf16_u32(vzip2q_u32(a, c)),
           vreinterpretq_bf16_u32(vzip1q_u32(b, d)), vreinterpretq_bf16_u32(vzip2q_u32(b, d))}};
}

}  // namespace treeattn::kernels::neon
