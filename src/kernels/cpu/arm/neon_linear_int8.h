// SPDX-License-Identifier: Apache-2.0
// What the files for int8 weights on Arm share: x becoming int8. Each group of 32 elements of x is quantised to int8,
// so the sum over a group is an exact integer, whichever instruction makes it. Static, for the reason in
// linear_loops.h.
#pragma once

#include <arm_neon.h>

#include "kernels/cpu/arm/neon_vectors.h"
#include "kernels/cpu/linear_loops.h"

namespace treeattn::kernels::neon {

inline constexpr std::int64_t kGroup = 32;

static inline const std::int8_t* bytes_at(const std::byte* p) { return reinterpret_cast<const std::int8_t*>(p); }
static inline const float* floats_at(const std::byte* p) { return reinterpret_cast<const float*>(p); }

// As base::quantize_row_int8 does it; returns the scale.
static inline float quantize_group(const float* x, std::int8_t* out) {
  float32x4_t value[8], largest = vdupq_n_f32(0.0f);
  TREEATTN_UNROLL
  for (int i = 0; i < 8; ++i) {
    value[i] = vld1q_f32(x + 4 * i);
    largest = vmaxq_f32(largest, vabsq_f32(value[i]));  // NaN if one is
  }
  const float most = vmaxvq_f32(largest);
  if (!(most <= __FLT_MAX__)) {
    __builtin_memset(out, 0, kGroup);
    return __builtin_nanf("");
  }
  float scale = most / 127.0f;
  if (most == 0.0f) scale = 1.0f;
  if (scale * 127.0f < most) scale += __FLT_DENORM_MIN__;  // as base::scale_to_fit does it
  const float32x4_t divisor = vdupq_n_f32(scale);
  int16x4_t narrow[8];
  TREEATTN_UNROLL
  for (int i = 0; i < 8; ++i) narrow[i] = vqmovn_s32(vcvtnq_s32_f32(vdivq_f32(value[i], divisor)));
  TREEATTN_UNROLL
  for (int i = 0; i < 8; i += 2) {
    vst1_s8(out + 4 * i, vmax_s8(vqmovn_s16(vcombine_s16(narrow[i], narrow[i + 1])), vdup_n_s8(-127)));
  }
  return scale;
}

// A row of x: its bytes, then its scales.
static inline void pack_row(const float* x, std::int64_t cols, std::byte* packed) {
  float* scales = reinterpret_cast<float*>(packed + cols);
  for (std::int64_t col = 0; col < cols; col += kGroup) {
    scales[col / kGroup] = quantize_group(x + col, reinterpret_cast<std::int8_t*>(packed + col));
  }
}

}  // namespace treeattn::kernels::neon
