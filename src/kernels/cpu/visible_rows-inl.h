// SPDX-License-Identifier: Apache-2.0
// Per target: weights of a row whose logits are all visible and finite and none of which is so far below the maximum
// that it has to be clamped. That is nearly every row of a decode and of a prefill. Nothing has to be looked for in it,
// and the product with the softmax's scale and the difference from the maximum are one instruction, with one rounding
// where the target has it: 15 vector instructions for a vector of logits instead of 26 on NEON, 11 instead of 17 on
// AVX-512.
#if defined(TREEATTN_VISIBLE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_VISIBLE_ROWS_INL_H_
#undef TREEATTN_VISIBLE_ROWS_INL_H_
#else
#define TREEATTN_VISIBLE_ROWS_INL_H_
#endif

#include "kernels/cpu/simd_common-inl.h"
#include "kernels/cpu/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

// Logits in log2 units may be this large: what the product and the difference lose is then below 2^-8 together.
inline constexpr float kMostVisible = 65536.0f;
// The exponent of a weight must not leave the range of normal numbers.
inline constexpr float kLeastArgument = -124.0f;

using RowTag = hn::ScalableTag<float>;
using RowVec = hn::Vec<RowTag>;

// What is visible and vanishes by its value's scale becomes -0, to be told from what is hidden.
template <class DF, class V>
HWY_INLINE V scaled_weight(DF df, V weight, V scale) {
  const V product = hn::Mul(weight, scale);
  return hn::IfThenElse(hn::Eq(product, hn::Zero(df)), hn::Set(df, -0.0f), product);
}

// Lane by lane, of a row's logits, each times its key's scale where there are scales.
template <bool kKeyScales>
HWY_INLINE void extremes_of(const float* x, const float* key_scales, RowVec& least, RowVec& most) {
  const RowTag df;
  using Ops = VectorOps<RowTag>;
  const int lanes = static_cast<int>(hn::Lanes(df));
  const auto logits = [&](int t) HWY_ATTR {
    const RowVec y = hn::LoadU(df, x + t);
    return kKeyScales ? hn::Mul(y, hn::LoadU(df, key_scales + t)) : y;
  };
  least = most = logits(0);
  for (int t = lanes; t < kTileTokens; t += lanes) {
    const RowVec y = logits(t);
    least = Ops::min(least, y), most = Ops::max(most, y);
  }
}

#if HWY_TARGET == HWY_NEON
// A constant that an FMLA may overwrite, from memory: a load takes no vector pipe, a copy of a register takes one.
HWY_INLINE float32x4_t fresh(const float32x4_t& constant) {
  float32x4_t out;
  asm volatile("ldr %q0, %1" : "=w"(out) : "m"(constant));
  return out;
}

// x -> 2^(factor x - m) for a tile; returns the sum, lane by lane. The polynomial is exp2_weight's. With scales, x is
// first multiplied by the key's, and what is left in its place by the value's: a scale of 1 changes no bits. The
// exponent is added to bits, as no NaN comes here: a maximum or minimum is NaN if one of the logits is. Eight vectors
// at a time: a processor that holds back few instructions does not overlap one with the next.
template <bool kKeyScales, bool kValueScales>
HWY_INLINE RowVec weigh_visible(float factor, float m, const float* key_scales, const float* value_scales, float* x) {
  const float32x4_t a1 = vdupq_n_f32(merge::kExp2A1), a2 = vdupq_n_f32(merge::kExp2A2);
  const float32x4_t a3 = vdupq_n_f32(merge::kExp2A3), a4 = vdupq_n_f32(merge::kExp2A4);
  const float32x4_t one = vdupq_n_f32(1.0f), minus_m = vdupq_n_f32(-m);
  const float32x4_t a5 = vdupq_n_f32(merge::kExp2A5), shifter = vdupq_n_f32(merge::kExp2Shifter);
  const float32x4_t factors = vdupq_n_f32(factor);
  float32x4_t sum = vdupq_n_f32(0.0f);
  // Inlined by force, or GCC 12 makes it a function that keeps its vectors in memory.
  const auto weigh = [&](int t) HWY_ATTR __attribute__((always_inline)) {
    float32x4_t f[8], shifted[8], p[8];
    uint32x4_t exponent[8];
    const auto each = [](const auto& body) HWY_ATTR __attribute__((always_inline)) {
      body(0), body(1), body(2), body(3), body(4), body(5), body(6), body(7);
    };
    each([&](int i) HWY_ATTR {
      float32x4_t logits = vld1q_f32(x + t + 4 * i);
      if (kKeyScales) logits = vmulq_f32(logits, vld1q_f32(key_scales + t + 4 * i));
      f[i] = vfmaq_f32(fresh(minus_m), logits, factors);
    });
    each([&](int i) HWY_ATTR { shifted[i] = vaddq_f32(f[i], shifter); });
    each([&](int i) HWY_ATTR {
      f[i] = vsubq_f32(f[i], vsubq_f32(shifted[i], shifter));
      exponent[i] = vshlq_n_u32(vreinterpretq_u32_f32(shifted[i]), 23);
    });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a4), a5, f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a3), p[i], f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a2), p[i], f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(a1), p[i], f[i]); });
    each([&](int i) HWY_ATTR { p[i] = vfmaq_f32(fresh(one), p[i], f[i]); });
    each([&](int i) HWY_ATTR {
      p[i] = vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p[i]), exponent[i]));
      sum = vaddq_f32(sum, p[i]);
      if (kValueScales) {
        p[i] = scaled_weight(RowTag(), RowVec(p[i]), RowVec(vld1q_f32(value_scales + t + 4 * i))).raw;
      }
      vst1q_f32(x + t + 4 * i, p[i]);
    });
  };
  for (int t = 0; t < kTileTokens; t += 32) weigh(t);
  return RowVec(sum);
}
#else
#if TREEATTN_SCALABLE
// One vector: those of unknown length cannot be put into arrays.
struct SideBySide : VectorOps<RowTag> {
  static constexpr int kVectors = 1;
  static HWY_INLINE V load(const float* x) { return hn::LoadU(RowTag(), x); }
  static HWY_INLINE void store(V a, float* x) { hn::StoreU(a, RowTag(), x); }
  static HWY_INLINE V scaled(V p, V scales) { return scaled_weight(RowTag(), p, scales); }
  static HWY_INLINE V sum(V a) { return a; }
};
#else
// The arithmetic of merge/operator-inl.h on several vectors side by side, so that their chains overlap: as many as
// there are registers for.
struct SideBySide {
  static constexpr int kVectors = kRegisterRows;
  static constexpr int kLanes = static_cast<int>(hn::MaxLanes(RowTag()));
  using Ops = VectorOps<RowTag>;
  struct V {
    RowVec of[kVectors];
  };
  // body(i) for each of them.
  template <class Body>
  static HWY_INLINE V each(const Body& body) {
    V out;
    TREEATTN_UNROLL
    for (int i = 0; i < kVectors; ++i) out.of[i] = body(i);
    return out;
  }
  static HWY_INLINE V set(float x) {
    return each([&](int) HWY_ATTR { return Ops::set(x); });
  }
  static HWY_INLINE V load(const float* x) {
    return each([&](int i) HWY_ATTR { return hn::LoadU(RowTag(), x + i * kLanes); });
  }
  static HWY_INLINE V add(const V& a, const V& b) {
    return each([&](int i) HWY_ATTR { return Ops::add(a.of[i], b.of[i]); });
  }
  static HWY_INLINE V sub(const V& a, const V& b) {
    return each([&](int i) HWY_ATTR { return Ops::sub(a.of[i], b.of[i]); });
  }
  static HWY_INLINE V mul(const V& a, const V& b) {
    return each([&](int i) HWY_ATTR { return Ops::mul(a.of[i], b.of[i]); });
  }
  static HWY_INLINE V fma(const V& a, const V& b, const V& c) {
    return each([&](int i) HWY_ATTR { return Ops::fma(a.of[i], b.of[i], c.of[i]); });
  }
  static HWY_INLINE V times_power_of_two(const V& p, const V& shifted) {
    return each([&](int i) HWY_ATTR { return Ops::times_power_of_two(p.of[i], shifted.of[i]); });
  }
  static HWY_INLINE V scaled(const V& p, const V& scales) {
    return each([&](int i) HWY_ATTR { return scaled_weight(RowTag(), p.of[i], scales.of[i]); });
  }
  static HWY_INLINE void store(const V& a, float* x) {
    TREEATTN_UNROLL
    for (int i = 0; i < kVectors; ++i) hn::StoreU(a.of[i], RowTag(), x + i * kLanes);
  }
  static HWY_INLINE RowVec sum(const V& a) {
    RowVec sum = a.of[0];
    TREEATTN_UNROLL
    for (int i = 1; i < kVectors; ++i) sum = Ops::add(sum, a.of[i]);
    return sum;
  }
};
#endif

// x -> 2^(factor x - m) for a tile; returns the sum, lane by lane. With scales, x is first multiplied by the key's, and
// what is left in its place by the value's: a scale of 1 changes no bits.
template <bool kKeyScales, bool kValueScales>
HWY_INLINE RowVec weigh_visible(float factor, float m, const float* key_scales, const float* value_scales, float* x) {
  using Ops = SideBySide;
  const Ops::V factors = Ops::set(factor), minus_m = Ops::set(-m);
  const int step = Ops::kVectors * static_cast<int>(hn::Lanes(RowTag()));
  RowVec sum = hn::Zero(RowTag());
  for (int t = 0; t < kTileTokens; t += step) {
    Ops::V logits = Ops::load(x + t);
    if (kKeyScales) logits = Ops::mul(logits, Ops::load(key_scales + t));
    Ops::V p = exp2_in_range<Ops>(Ops::fma(logits, factors, minus_m));
    sum = hn::Add(sum, Ops::sum(p));
    if (kValueScales) p = Ops::scaled(p, Ops::load(value_scales + t));
    Ops::store(p, x + t);
  }
  return sum;
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
