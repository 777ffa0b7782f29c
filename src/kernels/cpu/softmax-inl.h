// SPDX-License-Identifier: Apache-2.0
// Per target: a tile's logits become weights, and the running maximum and sum move on.
#if defined(TREEATTN_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_SOFTMAX_INL_H_
#undef TREEATTN_SOFTMAX_INL_H_
#else
#define TREEATTN_SOFTMAX_INL_H_
#endif

#include <limits>
#include <utility>

#include "kernels/cpu/row_vectors-inl.h"
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
  const V e = exp2_weight<Ops>(hn::Mul(hn::Abs(x), hn::Set(df, -2.0f * merge::kLog2E)));
  const V one = hn::Set(df, 1.0f);
  const V large = hn::CopySignToAbs(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  const V square = hn::Mul(x, x);
  V rest = hn::MulAdd(square, hn::Set(df, -17.0f / 315.0f), hn::Set(df, 2.0f / 15.0f));
  rest = hn::MulAdd(square, rest, hn::Set(df, -1.0f / 3.0f));
  const V small = hn::MulAdd(hn::Mul(x, square), rest, x);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(df, 0.125f)), small, large);
}

// The head of a row among those of all heads. Many rows have one head: no division, which can take as long as a row.
HWY_INLINE int head_of(const SoftmaxArgs& args, int row) { return args.heads == 1 ? 0 : row / args.rows; }
HWY_INLINE int row_of_head(const SoftmaxArgs& args, int row) { return row - head_of(args, row) * args.rows; }

// The scales of the keys, or of the values, for a row among those of all heads.
HWY_INLINE const float* scales_of(const SoftmaxArgs& args, const float* scales, int row) {
  return scales + head_of(args, row) * kTileTokens;
}

struct SeenTokens {
  int begin, end;
};
HWY_INLINE SeenTokens seen_tokens(const SoftmaxArgs& args, int row) {
  if (!args.begin) return {0, args.tokens};
  const int r = row_of_head(args, row);
  return {args.begin[r], args.end[r]};
}

// One vector of logits at token t, in log2 units. The scales of the keys first: of an infinite one all that counts is
// the sign of the product, which a small factor could make 0.
template <class DF>
HWY_INLINE hn::Vec<DF> shaped(DF df, const SoftmaxArgs& args, int row, const float* x, int t) {
  auto y = hn::LoadU(df, x + t);
  if (args.key_scales) y = hn::Mul(y, hn::LoadU(df, scales_of(args, args.key_scales, row) + t));
  y = hn::Mul(y, hn::Set(df, args.factor));
  if (args.cap_log2 > 0) y = hn::Mul(tanh_of(df, y), hn::Set(df, args.cap_log2));
  if (args.slopes_log2) {
    const auto distance =
        hn::Add(hn::Iota(df, static_cast<float>(t)), hn::Set(df, args.distance[row_of_head(args, row)]));
    y = hn::MulAdd(hn::Set(df, args.slopes_log2[row]), distance, y);
  }
  return y;
}

// Scales, soft-cap, ALiBi, mask: the row's logits in log2 units, -inf where hidden. Returns the maximum, lane by lane.
template <class DF>
HWY_INLINE hn::Vec<DF> shape_logits(DF df, const SoftmaxArgs& args, int row, int padded) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  float* x = args.logits + row * kTileTokens;
  for (int t = 0; t < padded; t += lanes) hn::StoreU(shaped(df, args, row, x, t), df, x + t);
  const SeenTokens seen = seen_tokens(args, row);
  for (int t = 0; t < seen.begin; ++t) x[t] = merge::kEmptyMax;
  for (int t = seen.end; t < padded; ++t) x[t] = merge::kEmptyMax;
  auto max = hn::Set(df, merge::kEmptyMax);
  for (int t = 0; t < padded; t += lanes) max = hn::Max(max, hn::LoadU(df, x + t));
  return max;
}

// x -> 2^(x - m), 0 where x = -inf; returns the sum, lane by lane. Then the scales, if any: what is hidden stays 0
// whatever its scale.
template <bool kScaled, class DF>
HWY_INLINE hn::Vec<DF> weigh(DF df, const SoftmaxArgs& args, const float* scales, float m, float* x, int padded) {
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
      p = hn::IfThenZeroElse(hn::Eq(y, hidden), scaled_weight(df, p, hn::LoadU(df, scales + t)));
    }
    hn::StoreU(p, df, x + t);
  }
  if (hn::GetLane(hn::MinOfLanes(df, lowest)) == merge::kEmptyMax) *args.any_hidden = true;
  return sum;
}

// Whether nothing but scales stands between the logits and the weights of rows that see the whole tile. That there are
// scales must not decide it: a cache has them where a view may have none, and scales of 1 change no bits.
HWY_INLINE bool only_scaled(const SoftmaxArgs& args) {
  return !args.slopes_log2 && args.cap_log2 <= 0 && args.factor > 0;
}

// A whole tile, not all of a short one: which tokens are in a tile depends on the other rows.
HWY_INLINE bool sees_tile(const SoftmaxArgs& args, int row) {
  const SeenTokens seen = seen_tokens(args, row);
  return seen.begin == 0 && seen.end == kTileTokens;
}

// Some rows that are worked on together: independent ones hide how long the others' maxima and sums take. What becomes
// of a row does not depend on the others.
class RowGroup {
 public:
  // Those from `first` on. Rows that are not all visible are shaped.
  HWY_INLINE void find_maxima(const SoftmaxArgs& args, int first) {
    const int rows = args.heads * args.rows - first;
    first_ = first;
    count_ = rows < kSoftmaxRows ? rows : kSoftmaxRows;
    args.key_scales ? put_extremes<true>(args) : put_extremes<false>(args);
    choose_maxima(args);
  }

  // The logits become weights, and the states of the rows move on.
  HWY_INLINE void weigh_rows(const SoftmaxArgs& args) {
    RowVectors sums;
    if (args.key_scales) {
      args.value_scales ? weigh_in_range<true, true>(args, sums) : weigh_in_range<true, false>(args, sums);
    } else {
      args.value_scales ? weigh_in_range<false, true>(args, sums) : weigh_in_range<false, false>(args, sums);
    }
    for (int i = 0; i < count_; ++i) {
      if (!in_range(i)) weigh_any(args, i, sums);
    }
    advance(args, sums);
  }

 private:
  using DF = RowTag;
  using Vec = RowVec;

  // Of the logits as they are, if a row is visible; of the shaped ones, if not.
  template <bool kKeyScales>
  HWY_INLINE void put_extremes(const SoftmaxArgs& args) {
    using Ops = VectorOps<DF>;
    RowVectors leasts, mosts;
    const bool plain = only_scaled(args);
    for (int i = 0; i < count_; ++i) {
      const int r = first_ + i;
      visible_[i] = plain && sees_tile(args, r);
      if (!visible_[i]) {
        put_shaped(args, i, leasts, mosts);
        continue;
      }
      Vec least, most;
      extremes_of<kKeyScales>(logits_of(args, i), kKeyScales ? scales_of(args, args.key_scales, r) : nullptr, least,
                              most);
      leasts.put(i, least), mosts.put(i, most);
    }
    leasts.combine(
        count_, [](Vec a, Vec b) HWY_ATTR { return Ops::min(a, b); }, least_);
    mosts.combine(
        count_, [](Vec a, Vec b) HWY_ATTR { return Ops::max(a, b); }, most_);
  }

  // m_ of the rows that visible_rows-inl.h is for, NaN for the others.
  HWY_INLINE void choose_maxima(const SoftmaxArgs& args) {
    for_each_vector([&](auto df, int i) HWY_ATTR {
      const auto factor = hn::Set(df, args.factor);
      const auto m_old = hn::LoadU(df, args.m_log2 + first_ + i);
      const auto most = hn::Mul(hn::Load(df, most_ + i), factor);
      const auto m = hn::IfThenElse(hn::Gt(most, m_old), most, m_old);
      const auto lowest = hn::Sub(hn::Mul(hn::Load(df, least_ + i), factor), m);
      const auto in_range =
          hn::And(hn::Le(hn::Abs(m), hn::Set(df, kMostVisible)), hn::Ge(lowest, hn::Set(df, kLeastArgument)));
      hn::Store(hn::IfThenElse(in_range, m, hn::NaN(df)), df, m_ + i);
    });
  }
  HWY_INLINE bool in_range(int i) const { return m_[i] <= kMostVisible; }

  template <bool kKeyScales, bool kValueScales>
  HWY_INLINE void weigh_in_range(const SoftmaxArgs& args, RowVectors& sums) {
    for (int i = 0; i < count_; ++i) {
      if (!in_range(i)) continue;
      const float* of_keys = kKeyScales ? scales_of(args, args.key_scales, first_ + i) : nullptr;
      const float* of_values = kValueScales ? scales_of(args, args.value_scales, first_ + i) : nullptr;
      sums.put(i, weigh_visible<kKeyScales, kValueScales>(args.factor, m_[i], of_keys, of_values, logits_of(args, i)));
    }
  }

  HWY_NOINLINE void put_shaped(const SoftmaxArgs& args, int i, RowVectors& leasts, RowVectors& mosts) const {
    leasts.put(i, hn::NaN(DF()));  // in no range, whatever the sign of the factor
    mosts.put(i, shape_logits(DF(), args, first_ + i, padded(args)));
  }

  // Any row: finds m_ and puts the sum, lane by lane.
  HWY_NOINLINE void weigh_any(const SoftmaxArgs& args, int i, RowVectors& sums) {
    const DF df;
    const int r = first_ + i;
    float* x = logits_of(args, i);
    const float most =
        visible_[i] ? hn::GetLane(hn::MaxOfLanes(df, shape_logits(df, args, r, padded(args)))) : most_[i];
    const float m_old = args.m_log2[r];
    float m = most > m_old ? most : m_old;
    if (!(m > std::numeric_limits<float>::lowest())) {
      // Nothing visible, it seems. Slowly and surely: targets differ in what the maximum of -inf and NaN is.
      m = m_old;
      for (int t = 0; t < padded(args); ++t) m = x[t] > m || x[t] != x[t] ? x[t] : m;
    }
    m_[i] = m;
    if (m == merge::kEmptyMax) {
      for (int t = 0; t < padded(args); ++t) x[t] = 0.0f;
      *args.any_hidden = true;
      sums.put(i, hn::Zero(df));
    } else if (args.value_scales) {
      sums.put(i, weigh<true>(df, args, scales_of(args, args.value_scales, r), m, x, padded(args)));
    } else {
      sums.put(i, weigh<false>(df, args, nullptr, m, x, padded(args)));
    }
  }

  // The states move on to the maxima m_, and the sums of the weights are added.
  HWY_INLINE void advance(const SoftmaxArgs& args, const RowVectors& sums) {
    HWY_ALIGN float sum[kNumbers];
    sums.combine(
        count_, [](Vec a, Vec b) HWY_ATTR { return hn::Add(a, b); }, sum);
    for_each_vector([&](auto df, int i) HWY_ATTR {
      using Ops = VectorOps<decltype(df)>;
      const int r = first_ + i;
      const auto m = hn::Load(df, m_ + i), m_old = hn::LoadU(df, args.m_log2 + r);
      const auto one = hn::Set(df, 1.0f);
      const auto same = hn::Or(hn::Eq(m_old, hn::Set(df, merge::kEmptyMax)), hn::Eq(m_old, m));
      const auto shrink = hn::IfThenElse(same, one, exp2_weight<Ops>(hn::Sub(m_old, m)));
      const auto l = hn::LoadU(df, args.l + r);
      hn::StoreU(merge_component<Ops>(l, shrink, hn::Load(df, sum + i), one), df, args.l + r);
      hn::StoreU(shrink, df, args.shrink + r);
      hn::StoreU(m, df, args.m_log2 + r);
    });
  }

  // body(tag, i) for the numbers of rows i and after, in one vector.
  template <class Body>
  HWY_INLINE void for_each_vector(const Body& body) const {
    const hn::CappedTag<float, kSoftmaxRows> df;
    for (int i = 0; i < count_; i += static_cast<int>(hn::Lanes(df))) body(df, i);
  }
  HWY_INLINE float* logits_of(const SoftmaxArgs& args, int i) const { return args.logits + (first_ + i) * kTileTokens; }
  static HWY_INLINE int padded(const SoftmaxArgs& args) {
    const int lanes = static_cast<int>(hn::Lanes(DF()));
    return (args.tokens + lanes - 1) / lanes * lanes;
  }

  static constexpr int kNumbers = kSoftmaxRows + static_cast<int>(hn::MaxLanes(DF()));  // RowVectors::combine

  int first_ = 0, count_ = 0;
  bool visible_[kSoftmaxRows] = {};
  HWY_ALIGN float least_[kNumbers] = {}, most_[kNumbers] = {};
  HWY_ALIGN float m_[kSoftmaxRows] = {};
};

void softmax(const SoftmaxArgs& args) {
  // The next rows' maxima are looked for first, so that nothing waits for them.
  RowGroup groups[2];
  RowGroup *now = &groups[0], *next = &groups[1];
  const int rows = args.heads * args.rows;
  now->find_maxima(args, 0);
  for (int r = 0; r < rows; r += kSoftmaxRows) {
    if (r + kSoftmaxRows < rows) next->find_maxima(args, r + kSoftmaxRows);
    now->weigh_rows(args);
    std::swap(now, next);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
