// SPDX-License-Identifier: Apache-2.0
// Rearrangements of float32 vectors that several NEON files need. Static, for the reason in neon_loops.h.
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

}  // namespace treeattn::kernels::neon
