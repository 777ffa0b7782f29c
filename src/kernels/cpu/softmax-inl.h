// SPDX-License-Identifier: Apache-2.0
// Per target: a tile's logits become weights, and the running maximum and sum move on.
#if defined(TREEATTN_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_SOFTMAX_INL_H_
#undef TREEATTN_SOFTMAX_INL_H_
#else
#define TREEATTN_SOFTMAX_INL_H_
#endif

#include <limits>

#include "kernels/cpu/simd_common-inl.h"
#include "kernels/cpu/visible_rows-inl.h"
#include "merge/operator.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

// tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|): absolute error a few units of 2^-23. Below 1/8, where 1 - e
// would cancel and a cap far above the logits make the rest large, the first terms of its series instead.
template <class DF, class V>
HWY_INLINE V tanh_of(DF df, V x) {
  using Ops = VectorOps<DF>;
  const V e = exp2_weight<Ops>(hn::Mul(hn::Abs(x), hn::Set(df, -2.0f * 0x1.715476p+0f)));
  const V one = hn::Set(df, 1.0f);
  const V large = hn::CopySignToAbs(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  const V square = hn::Mul(x, x);
  V rest = hn::MulAdd(square, hn::Set(df, -17.0f / 315.0f), hn::Set(df, 2.0f / 15.0f));
  rest = hn::MulAdd(square, rest, hn::Set(df, -1.0f / 3.0f));
  const V small = hn::MulAdd(hn::Mul(x, square), rest, x);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(df, 0.125f)), small, large);
}

// The scales of the keys, or of the values, for a row among those of all heads.
HWY_INLINE const float* scales_of(const SoftmaxArgs& args, const float* scales, int row) {
  return scales + row / args.rows * kTileTokens;
}

// One vector of logits at token t, in log2 units.
template <class DF>
HWY_INLINE hn::Vec<DF> shaped(DF df, const SoftmaxArgs& args, int row, const float* x, int t) {
  auto y = hn::Mul(hn::LoadU(df, x + t), hn::Set(df, args.factor));
  if (args.key_scales) y = hn::Mul(y, hn::LoadU(df, scales_of(args, args.key_scales, row) + t));
  if (args.cap_log2 > 0) y = hn::Mul(tanh_of(df, y), hn::Set(df, args.cap_log2));
  if (args.slopes_log2) {
    const auto distance = hn::Add(hn::Iota(df, static_cast<float>(t)), hn::Set(df, args.distance[row % args.rows]));
    y = hn::MulAdd(hn::Set(df, args.slopes_log2[row]), distance, y);
  }
  return y;
}

// Scales, soft-cap, ALiBi, mask: x[0, padded) in log2 units, -inf where hidden. Returns the maximum.
template <class DF>
HWY_INLINE float shape_logits(DF df, const SoftmaxArgs& args, int row, float* x, int padded) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  auto max = hn::Set(df, merge::kEmptyMax);
  const int begin = args.begin ? args.begin[row % args.rows] : 0;
  const int end = args.end ? args.end[row % args.rows] : args.tokens;
  const bool all_visible = begin == 0 && end == padded;
  if (all_visible && !args.slopes_log2 && args.cap_log2 <= 0) {
    const auto factor = hn::Set(df, args.factor);
    const float* scales = args.key_scales ? scales_of(args, args.key_scales, row) : nullptr;
    for (int t = 0; t < padded; t += lanes) {
      auto y = hn::Mul(hn::LoadU(df, x + t), factor);
      if (scales) y = hn::Mul(y, hn::LoadU(df, scales + t));
      max = hn::Max(max, y);
      hn::StoreU(y, df, x + t);
    }
    return hn::GetLane(hn::MaxOfLanes(df, max));
  }
  for (int t = 0; t < padded; t += lanes) hn::StoreU(shaped(df, args, row, x, t), df, x + t);
  for (int t = 0; t < begin; ++t) x[t] = merge::kEmptyMax;
  for (int t = end; t < padded; ++t) x[t] = merge::kEmptyMax;
  for (int t = 0; t < padded; t += lanes) max = hn::Max(max, hn::LoadU(df, x + t));
  return hn::GetLane(hn::MaxOfLanes(df, max));
}

// x -> 2^(x - m), 0 where x = -inf; returns the sum. Then the scales, if any: what is hidden stays 0 whatever its
// scale, and what is visible and vanishes by its scale becomes -0, to be told from it.
template <bool kScaled, class DF>
HWY_INLINE float weigh(DF df, const SoftmaxArgs& args, const float* scales, float m, float* x, int padded) {
  using Ops = VectorOps<DF>;
  const int lanes = static_cast<int>(hn::Lanes(df));
  const auto vm = hn::Set(df, m);
  const auto hidden = hn::Set(df, merge::kEmptyMax);
  auto sum = hn::Zero(df);
  auto lowest = hn::Set(df, 0.0f);
  for (int t = 0; t < padded; t += lanes) {
    const auto y = hn::LoadU(df, x + t);
    lowest = hn::Min(lowest, y);
    auto p = exp2_weight<Ops>(hn::Sub(y, vm));
    p = hn::IfThenZeroElse(hn::Eq(y, hidden), p);
    sum = hn::Add(sum, p);
    if constexpr (kScaled) {
      const auto product = hn::Mul(p, hn::LoadU(df, scales + t));
      const auto seen = hn::IfThenElse(hn::Eq(product, hn::Zero(df)), hn::Set(df, -0.0f), product);
      p = hn::IfThenZeroElse(hn::Eq(y, hidden), seen);
    }
    hn::StoreU(p, df, x + t);
  }
  if (hn::GetLane(hn::MinOfLanes(df, lowest)) == merge::kEmptyMax) *args.any_hidden = true;
  return hn::GetLane(hn::SumOfLanes(df, sum));
}

// Moves one row's state on to the maximum m, and adds the sum of its weights.
HWY_INLINE void advance(const SoftmaxArgs& args, int r, float m, float sum) {
  const float m_old = args.m_log2[r];
  args.shrink[r] = m_old != merge::kEmptyMax && m_old != m ? merge::state_weight(m_old, m) : 1.0f;
  args.l[r] = merge::merge_component<merge::ScalarOps>(args.l[r], args.shrink[r], sum, 1.0f);
  args.m_log2[r] = m;
}

// A row whose logits have been shaped.
template <class DF>
HWY_INLINE void weigh_row(DF df, const SoftmaxArgs& args, int r, float tile_max, int padded) {
  float* x = args.logits + r * kTileTokens;
  const float m_old = args.m_log2[r];
  float m = tile_max > m_old ? tile_max : m_old;
  if (!(m > std::numeric_limits<float>::lowest())) {
    // Nothing visible, it seems. Slowly and surely: targets differ in what the maximum of -inf and NaN is.
    m = m_old;
    for (int t = 0; t < padded; ++t) m = x[t] > m || x[t] != x[t] ? x[t] : m;
  }
  if (m == merge::kEmptyMax) {
    for (int t = 0; t < padded; ++t) x[t] = 0.0f;
    args.shrink[r] = 1.0f;
    *args.any_hidden = true;
    return;
  }
  const float* scales = args.value_scales ? scales_of(args, args.value_scales, r) : nullptr;
  const float sum =
      scales ? weigh<true>(df, args, scales, m, x, padded) : weigh<false>(df, args, nullptr, m, x, padded);
  advance(args, r, m, sum);
}

// Whether nothing but scales stands between the logits of a row and its weights. That there are scales must not decide
// it: a cache has them where a view may have none, and scales of 1 change no bits.
HWY_INLINE bool all_visible(const SoftmaxArgs& args, int row, int padded) {
  if (!kHasVisibleRows || args.slopes_log2) return false;
  const int begin = args.begin ? args.begin[row % args.rows] : 0;
  const int end = args.end ? args.end[row % args.rows] : args.tokens;
  return begin == 0 && end == padded && args.cap_log2 <= 0 && args.factor > 0;
}

HWY_INLINE Extremes extremes_of_row(const SoftmaxArgs& args, int r, int padded) {
  const float* x = args.logits + r * kTileTokens;
  return args.key_scales ? extremes_of<true>(x, scales_of(args, args.key_scales, r), padded)
                         : extremes_of<false>(x, nullptr, padded);
}

// False: the row is another one after all, and as it was.
HWY_INLINE bool weigh_visible_row(const SoftmaxArgs& args, int r, const Extremes& logits, int padded) {
  const float most = logits.most * args.factor;
  const float m = most > args.m_log2[r] ? most : args.m_log2[r];
  if (!in_range(logits, args.factor, m)) return false;
  float* x = args.logits + r * kTileTokens;
  const float* of_keys = args.key_scales ? scales_of(args, args.key_scales, r) : nullptr;
  const float* of_values = args.value_scales ? scales_of(args, args.value_scales, r) : nullptr;
  const auto weigh = of_keys ? (of_values ? weigh_visible<true, true> : weigh_visible<true, false>)
                             : (of_values ? weigh_visible<false, true> : weigh_visible<false, false>);
  advance(args, r, m, weigh(args.factor, m, of_keys, of_values, x, padded));
  return true;
}

// Rows in two passes over a few of them at a time: the second needs the first's maximum, and several rows in between
// hide how long that takes.
void softmax(const SoftmaxArgs& args) {
  const hn::ScalableTag<float> df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  const int padded = (args.tokens + lanes - 1) / lanes * lanes;
  constexpr int kRows = 8;
  const int rows = args.heads * args.rows;
  const auto shape = [&](int r) HWY_ATTR { return shape_logits(df, args, r, args.logits + r * kTileTokens, padded); };
  for (int r0 = 0; r0 < rows; r0 += kRows) {
    const int r1 = r0 + kRows < rows ? r0 + kRows : rows;
    bool visible[kRows];
    Extremes extremes[kRows];
    for (int r = r0; r < r1; ++r) {
      visible[r - r0] = all_visible(args, r, padded);
      if (visible[r - r0]) {
        extremes[r - r0] = extremes_of_row(args, r, padded);
      } else {
        extremes[r - r0].most = shape(r);
      }
    }
    for (int r = r0; r < r1; ++r) {
      if (visible[r - r0] && weigh_visible_row(args, r, extremes[r - r0], padded)) continue;
      weigh_row(df, args, r, visible[r - r0] ? shape(r) : extremes[r - r0].most, padded);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
