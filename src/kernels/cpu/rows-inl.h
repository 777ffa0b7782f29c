// SPDX-License-Identifier: Apache-2.0
// Per target: the operations of a decoder layer on one row of activations.
#if defined(TREEATTN_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_ROWS_INL_H_
#undef TREEATTN_ROWS_INL_H_
#else
#define TREEATTN_ROWS_INL_H_
#endif

#include <cmath>
#include <cstring>
#include <limits>

#include "base/half.h"
#include "kernels/cpu/simd_common-inl.h"
#include "kernels/model_ops.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

// Whole vectors of a row, then single elements: body(tag, index).
template <class Body>
HWY_INLINE void for_each_vector(std::int64_t dim, const Body& body) {
  const hn::ScalableTag<float> df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(df));
  std::int64_t i = 0;
  for (; i + lanes <= dim; i += lanes) body(df, i);
  for (; i < dim; ++i) body(hn::CappedTag<float, 1>(), i);
}

// In double, which has room for the squares of all float32.
inline void rms_norm_in_double(const float* x, const float* weight, float eps, std::int64_t dim, float* y) {
  double squares = 0.0;
  for (std::int64_t i = 0; i < dim; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(dim) + eps);
  for (std::int64_t i = 0; i < dim; ++i) y[i] = static_cast<float>(x[i] * scale * weight[i]);
}

inline void rms_norm(const float* x, const float* weight, float eps, std::int64_t dim, float* y) {
  const hn::ScalableTag<float> df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(df));
  // Two chains, the even and the odd vectors, so that additions overlap.
  auto even = hn::Zero(df), odd = hn::Zero(df);
  std::int64_t i = 0;
  for (; i + 2 * lanes <= dim; i += 2 * lanes) {
    const auto a = hn::LoadU(df, x + i), b = hn::LoadU(df, x + i + lanes);
    even = hn::MulAdd(a, a, even), odd = hn::MulAdd(b, b, odd);
  }
  float rest = 0.0f;
  for (; i < dim; ++i) rest += x[i] * x[i];
  const float squares = hn::GetLane(hn::SumOfLanes(df, hn::Add(even, odd))) + rest;
  const float mean = squares / static_cast<float>(dim) + eps;
  // Squares have overflowed, or so many have lost bits that it counts.
  if (!(mean >= std::numeric_limits<float>::min() && mean <= std::numeric_limits<float>::max())) {
    return rms_norm_in_double(x, weight, eps, dim, y);
  }
  const float scale = 1.0f / std::sqrt(mean);
  for_each_vector(dim, [&](auto d, std::int64_t at) HWY_ATTR {
    const auto scaled = hn::Mul(hn::LoadU(d, x + at), hn::Set(d, scale));
    hn::StoreU(hn::Mul(scaled, hn::LoadU(d, weight + at)), d, y + at);
  });
}

// With e = exp(-|gate|), which cannot overflow: 1 / (1 + exp(-gate)) is 1 / (1 + e), or e / (1 + e) below zero.
// exp2_weight stops at 2^-126, and a gate of -1e38 times that would be no small number. So -2^-126 stands for all that
// is left below -87.5: not 0, as 0 * inf would be NaN. Of an infinite gate it is NaN, as -inf / inf is.
inline void swiglu(const float* gate, const float* up, std::int64_t dim, float* y) {
  for_each_vector(dim, [&](auto d, std::int64_t at) HWY_ATTR {
    using D = decltype(d);
    const auto g = hn::LoadU(d, gate + at), one = hn::Set(d, 1.0f);
    const auto e = exp2_weight<VectorOps<D>>(hn::Mul(hn::Abs(g), hn::Set(d, -merge::kLog2E)));
    const auto above = hn::IfThenElse(hn::Lt(g, hn::Zero(d)), e, one);
    const auto gated = hn::Mul(g, hn::Div(above, hn::Add(one, e)));
    const auto left = hn::Sub(hn::Sub(g, g), hn::Set(d, 0x1p-126f));
    const auto silu = hn::IfThenElse(hn::Lt(g, hn::Set(d, -87.5f)), left, gated);
    hn::StoreU(hn::Mul(silu, hn::LoadU(d, up + at)), d, y + at);
  });
}

// As base::quantize_row_int8 does it, group by group: values [groups, kWeightGroup], scales [groups].
template <class T>
void quantize(const std::byte* from, std::int64_t groups, std::int8_t* values, float* scales) {
  const hn::CappedTag<float, kWeightGroup> df;
  const hn::Rebind<std::int8_t, decltype(df)> d8;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(df));
  const T* x = reinterpret_cast<const T*>(from);
  for (std::int64_t g = 0; g < groups; ++g, x += kWeightGroup, values += kWeightGroup) {
    auto largest = hn::Zero(df), not_finite = hn::Zero(df);
    for (std::int64_t i = 0; i < kWeightGroup; i += lanes) {
      const auto v = load_f32(df, x + i);
      largest = hn::Max(largest, hn::Abs(v));
      not_finite = hn::Add(not_finite, hn::Sub(v, v));  // 0, or NaN
    }
    const float most = hn::GetLane(hn::MaxOfLanes(df, largest));
    if (hn::GetLane(hn::SumOfLanes(df, not_finite)) != 0.0f) {
      scales[g] = std::numeric_limits<float>::quiet_NaN();
      std::memset(values, 0, kWeightGroup);
      continue;
    }
    const float scale = scales[g] = base::scale_to_fit(most, 127.0f);
    for (std::int64_t i = 0; i < kWeightGroup; i += lanes) {
      const auto quotient = hn::Div(load_f32(df, x + i), hn::Set(df, scale));
      const auto clamped = hn::Min(hn::Max(quotient, hn::Set(df, -127.0f)), hn::Set(df, 127.0f));
      hn::StoreU(hn::DemoteTo(d8, hn::NearestInt(clamped)), d8, values + i);
    }
  }
}

inline void rotate(float* x, const float* cosine, const float* sine, std::int64_t half) {
  for_each_vector(half, [&](auto d, std::int64_t at) HWY_ATTR {
    const auto a = hn::LoadU(d, x + at), b = hn::LoadU(d, x + half + at);
    const auto c = hn::LoadU(d, cosine + at), s = hn::LoadU(d, sine + at);
    hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, x + at);
    hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, x + half + at);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
