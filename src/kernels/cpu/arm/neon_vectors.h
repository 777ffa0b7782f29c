// SPDX-License-Identifier: Apache-2.0
// Small operations on vectors that several NEON files need. Static, for the reason in neon_loops.h.
#pragma once

#include <arm_neon.h>

namespace treeattn::kernels::neon {

// Of two blocks {row 0: 0, 1; row 1: 0, 1}, as BFMMLA leaves them, the four elements of either row.
static inline float32x4_t first_row(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
static inline float32x4_t second_row(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

// Four rows of four, turned round.
struct Turned4 {
  float32x4_t first, second, third, fourth;

  __attribute__((always_inline)) Turned4(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    const float32x4_t ab0 = vzip1q_f32(a, b), ab1 = vzip2q_f32(a, b);
    const float32x4_t cd0 = vzip1q_f32(c, d), cd1 = vzip2q_f32(c, d);
    first = first_row(ab0, cd0), second = second_row(ab0, cd0);
    third = first_row(ab1, cd1), fourth = second_row(ab1, cd1);
  }
};

// Eight elements of a row as float32, exactly.
struct Floats8 {
  float32x4_t low, high;
};

static inline Floats8 load_floats8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline Floats8 widened(float16x8_t x) { return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)}; }
// bfloat16: each behind 16 bits of zeros. ZIP runs on both vector pipes of a Neoverse N1, shifts on one of them.
static inline Floats8 widened_bf16(uint16x8_t x) {
  const uint16x8_t zeros = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(zeros, x)), vreinterpretq_f32_u16(vzip2q_u16(zeros, x))};
}

// Zero by an instruction that takes no vector pipe. Compilers copy a register of zeros instead, which takes one.
static inline int32x4_t fresh_zero() {
  int32x4_t zero;
  asm volatile("movi %0.2d, #0" : "=w"(zero));
  return zero;
}

// Keeps what gave x before what is pinned next, by an empty `asm volatile` too.
static inline void settle(float32x4_t x) { asm volatile("" : : "w"(x)); }

}  // namespace treeattn::kernels::neon
