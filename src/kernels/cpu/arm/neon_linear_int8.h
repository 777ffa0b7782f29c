// SPDX-License-Identifier: Apache-2.0
// What the files for int8 weights on Arm share: x becoming int8, and one row of x by SDOT. Each group of 32 elements of
// x is quantised to int8, so the sum over a group is an exact integer, whichever instruction makes it. The groups are
// added one after the other: sum = fma(integer, scale of x * scale of the weights, sum). Static, for the reason in
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
  if (scale == 0.0f) scale = __FLT_DENORM_MIN__;
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

// A group of four rows of weights, or of one four times.
struct WeightBytes {
  int8x16_t half[4][2];

  template <int N>
  __attribute__((always_inline)) WeightBytes(const std::int8_t* const (&w)[N], std::int64_t col) {
    TREEATTN_UNROLL
    for (int n = 0; n < 4; ++n) {
      half[n][0] = vld1q_s8(w[n % N] + col);
      half[n][1] = vld1q_s8(w[n % N] + col + 16);
    }
  }
  // Sums over the group: element n for row n.
  __attribute__((always_inline)) int32x4_t times(const std::int8_t* x) const {
    int32x4_t sums[4];
    TREEATTN_UNROLL
    for (int n = 0; n < 4; ++n) {
      sums[n] = vdotq_s32(vdotq_s32(fresh_zero(), vld1q_s8(x), half[n][0]), vld1q_s8(x + 16), half[n][1]);
    }
    return vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
  }
};

// R rows of x, `x_bytes` apart, against N (1 or 4) rows of weights, as they lie. prepare(g) comes before the groups g
// to g + 3 of four rows, for what caches have to be told.
template <int R, int N, class Prepare>
static inline void multiply_rows(const LinearArgs& args, std::int64_t x_bytes, std::int64_t first,
                                 std::int64_t distance, const Prepare& prepare) {
  const std::int64_t groups = args.cols / kGroup;
  const std::int8_t* w[N];
  const float* scales[N];
  float32x4_t sums[R];
  TREEATTN_UNROLL
  for (int n = 0; n < N; ++n) {
    w[n] = bytes_at(args.w) + (first + n * distance) * args.cols;
    scales[n] = args.scales + (first + n * distance) * groups;
  }
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) sums[r] = vdupq_n_f32(0.0f);
  const auto add_group = [&](std::int64_t g, auto scale_of) __attribute__((always_inline)) {
    const WeightBytes weights(w, g * kGroup);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const int32x4_t integers = weights.times(bytes_at(args.x + r * x_bytes) + g * kGroup);
      sums[r] = vfmaq_f32(sums[r], vcvtq_f32_s32(integers), scale_of(r));
    }
  };
  const auto x_scales = [&](int r) { return floats_at(args.x + r * x_bytes + args.cols); };
  std::int64_t g = 0;
  for (; N == 4 && g + 4 <= groups; g += 4) {
    // Scales of four groups of four rows, turned round: one vector per group.
    const Turned4 by_group(vld1q_f32(scales[0] + g), vld1q_f32(scales[1 % N] + g), vld1q_f32(scales[2 % N] + g),
                           vld1q_f32(scales[3 % N] + g));
    float32x4_t of_x[R];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) of_x[r] = vld1q_f32(x_scales(r) + g);
    prepare(g);
    add_group(g, [&](int r) { return vmulq_laneq_f32(by_group.first, of_x[r], 0); });
    add_group(g + 1, [&](int r) { return vmulq_laneq_f32(by_group.second, of_x[r], 1); });
    add_group(g + 2, [&](int r) { return vmulq_laneq_f32(by_group.third, of_x[r], 2); });
    add_group(g + 3, [&](int r) { return vmulq_laneq_f32(by_group.fourth, of_x[r], 3); });
  }
  for (; g < groups; ++g) {
    float32x4_t scale = vdupq_n_f32(0.0f);
    scale = vsetq_lane_f32(scales[0][g], scale, 0);
    if constexpr (N == 4) {
      scale = vsetq_lane_f32(scales[1][g], scale, 1);
      scale = vsetq_lane_f32(scales[2][g], scale, 2);
      scale = vsetq_lane_f32(scales[3][g], scale, 3);
    }
    add_group(g, [&](int r) { return vmulq_n_f32(scale, x_scales(r)[g]); });
  }
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    float out[4];
    vst1q_f32(out, sums[r]);
    float* y = args.y + r * args.y_stride + first;
    TREEATTN_UNROLL
    for (int n = 0; n < N; ++n) linear_loops::put(y + n * distance, out[n], args.add);
  }
}

}  // namespace treeattn::kernels::neon
