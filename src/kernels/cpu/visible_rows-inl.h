// SPDX-License-Identifier: Apache-2.0
// Per target: weights of a row whose logits are all visible and finite and none of which is so far below the maximum
// that it has to be clamped. That is nearly every row of a decode, and it needs 15 vector instructions for four logits
// instead of 26: nothing has to be looked for, and the product with the softmax's scale and the difference from the
// maximum are one instruction, with one rounding. Only for NEON; elsewhere no row is taken for such a one.
#if defined(TREEATTN_VISIBLE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_VISIBLE_ROWS_INL_H_
#undef TREEATTN_VISIBLE_ROWS_INL_H_
#else
#define TREEATTN_VISIBLE_ROWS_INL_H_
#endif

#include "kernels/cpu/simd_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

struct Extremes {
  float least = 0.0f, most = 0.0f;
};

// Logits in log2 units may be this large: what the product and the difference lose is then below 2^-8 together.
inline constexpr float kMostVisible = 65536.0f;
// The exponent of a weight is added to bits and must not leave the range of normal numbers.
inline constexpr float kLeastArgument = -124.0f;

// Whether the row with these logits, times factor > 0, is such a row at maximum m. No for NaN and infinity.
HWY_INLINE bool in_range(const Extremes& logits, float factor, float m) {
  return m <= kMostVisible && m >= -kMostVisible && logits.least * factor - m >= kLeastArgument;
}

#if HWY_TARGET == HWY_NEON
inline constexpr bool kHasVisibleRows = true;

// Of a row's logits, each times its key's scale where there are scales. NaN in both if one is NaN.
template <bool kKeyScales>
HWY_INLINE Extremes extremes_of(const float* x, const float* key_scales, int tokens) {
  const auto logits = [&](int t) HWY_ATTR {
    const float32x4_t y = vld1q_f32(x + t);
    return kKeyScales ? vmulq_f32(y, vld1q_f32(key_scales + t)) : y;
  };
  float32x4_t least = logits(0), most = least;
  for (int t = 4; t < tokens; t += 4) {
    const float32x4_t y = logits(t);
    least = vminq_f32(least, y), most = vmaxq_f32(most, y);
  }
  return {vminvq_f32(least), vmaxvq_f32(most)};
}

// A constant that an FMLA may overwrite, from memory: a load takes no vector pipe, a copy of a register takes one.
HWY_INLINE float32x4_t fresh(const float32x4_t& constant) {
  float32x4_t out;
  asm volatile("ldr %q0, %1" : "=w"(out) : "m"(constant));
  return out;
}

// x -> 2^(factor x - m), tokens of them, a multiple of four; returns the sum. The polynomial is exp2_weight's. With
// scales, x is first multiplied by the key's, and what is left in its place by the value's: a scale of 1 changes no
// bits. Four vectors at a time: a processor that holds back few instructions does not overlap one with the next.
template <bool kKeyScales, bool kValueScales>
float weigh_visible(float factor, float m, const float* key_scales, const float* value_scales, float* x, int tokens) {
  const float32x4_t a1 = vdupq_n_f32(merge::kExp2A1), a2 = vdupq_n_f32(merge::kExp2A2);
  const float32x4_t a3 = vdupq_n_f32(merge::kExp2A3), a4 = vdupq_n_f32(merge::kExp2A4);
  const float32x4_t one = vdupq_n_f32(1.0f), minus_m = vdupq_n_f32(-m);
  const float32x4_t a5 = vdupq_n_f32(merge::kExp2A5), shifter = vdupq_n_f32(merge::kExp2Shifter);
  const float32x4_t factors = vdupq_n_f32(factor);
  float32x4_t sum = vdupq_n_f32(0.0f);
  const auto weigh = [&]<int N>(int t) HWY_ATTR {
    float32x4_t f[N], shifted[N], p[N];
    const auto each = [](const auto& body) HWY_ATTR {
      body(0);
      if constexpr (N == 4) body(1), body(2), body(3);
    };
    each([&](int i) HWY_ATTR {
      float32x4_t logits = vld1q_f32(x + t + 4 * i);
      if (kKeyScales) logits = vmulq_f32(logits, vld1q_f32(key_scales + t + 4 * i));
      const float32x4_t y = vfmaq_f32(fresh(minus_m), logits, factors);
      shifted[i] = vaddq_f32(y, shifter);
      f[i] = vsubq_f32(y, vsubq_f32(shifted[i], shifter));
    });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a4), a5, f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a3), p[i], f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a2), p[i], f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a1), p[i], f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(one), p[i], f[i]); });
    each([&](int i) HWY_ATTR {
      const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(shifted[i]), 23);
      p[i] = vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p[i]), exponent));
      sum = vaddq_f32(sum, p[i]);
      if (kValueScales) {  // what vanishes becomes -0, as in weigh
        p[i] = vmulq_f32(p[i], vld1q_f32(value_scales + t + 4 * i));
        p[i] = vbslq_f32(vceqzq_f32(p[i]), vdupq_n_f32(-0.0f), p[i]);
      }
      vst1q_f32(x + t + 4 * i, p[i]);
    });
  };
  int t = 0;
  for (; t + 16 <= tokens; t += 16) weigh.template operator()<4>(t);
  for (; t < tokens; t += 4) weigh.template operator()<1>(t);
  return vaddvq_f32(sum);
}
#else
inline constexpr bool kHasVisibleRows = false;

template <bool kKeyScales>
HWY_INLINE Extremes extremes_of(const float*, const float*, int) {
  return {};
}
template <bool kKeyScales, bool kValueScales>
float weigh_visible(float, float, const float*, const float*, float*, int) {
  return 0.0f;
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
