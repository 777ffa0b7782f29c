// SPDX-License-Identifier: Apache-2.0
// Per target: the lanes of several rows' vectors become one number a row. All rows at once, as the lanes of one vector
// take a chain of shuffles to combine and leave most lanes idle.
#if defined(TREEATTN_ROW_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_ROW_VECTORS_INL_H_
#undef TREEATTN_ROW_VECTORS_INL_H_
#else
#define TREEATTN_ROW_VECTORS_INL_H_
#endif

#include "kernels/cpu/simd_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

// A vector for each of kSoftmaxRows rows.
class RowVectors {
 public:
  using DF = hn::ScalableTag<float>;
  using Vec = hn::Vec<DF>;

  HWY_INLINE void put(int row, Vec v) { hn::Store(v, DF(), lanes_ + row * lanes()); }

  // out[row] = its lanes, neighbours first: the same order whatever the number of rows. Requires room for kSoftmaxRows
  // numbers and a vector; what is written past the rows means nothing.
  template <class Op>
  HWY_INLINE void combine(int rows, const Op& op, float* out) const {
    for (int r = 0; r < rows; r += kTogether) {
      Vec v = combined<kTogether>(r, rows - r, op);
      for (int left = lanes(); left > kTogether; left /= 2) v = neighbours(v, v, op);
      hn::StoreU(v, DF(), out + r);
    }
  }

 private:
  static HWY_INLINE int lanes() { return static_cast<int>(hn::Lanes(DF())); }
  static constexpr int kMaxLanes = static_cast<int>(hn::MaxLanes(DF()));
  // Rows whose numbers fill a vector, or a part of one of unknown length.
  static constexpr int kTogether = TREEATTN_SCALABLE ? 4 : kMaxLanes;

  // Half the lanes of a, then half of b.
  template <class Op>
  static HWY_INLINE Vec neighbours(Vec a, Vec b, const Op& op) {
#if HWY_TARGET == HWY_SCALAR
    return op(a, b);  // never: there is one lane
#else
    return op(hn::ConcatEven(DF(), b, a), hn::ConcatOdd(DF(), b, a));
#endif
  }

  // The rows from `row` on, N of them in one vector; those past the last are copies.
  template <int N, class Op>
  HWY_INLINE Vec combined(int row, int rows, const Op& op) const {
    if constexpr (N == 1) {
      return hn::Load(DF(), lanes_ + row * lanes());
    } else {
      const Vec a = combined<N / 2>(row, rows, op);
      if (rows <= N / 2) return neighbours(a, a, op);
      return neighbours(a, combined<N / 2>(row + N / 2, rows - N / 2, op), op);
    }
  }

  HWY_ALIGN float lanes_[kSoftmaxRows * kMaxLanes];
};

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
