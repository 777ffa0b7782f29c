// SPDX-License-Identifier: Apache-2.0
// Per target: logits of a tile, as blocks of 4 tokens by 1, 2 or 4 query rows held in registers.
#if defined(TREEATTN_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_DOT_INL_H_
#undef TREEATTN_DOT_INL_H_
#else
#define TREEATTN_DOT_INL_H_
#endif

#include "kernels/cpu/simd_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

#if !TREEATTN_SCALABLE && HWY_TARGET != HWY_SCALAR
// out[i] = sum of the i-th lanes of all 128 bits.
template <class DF, class V>
HWY_INLINE void store_blocks(DF df, V x, float* out) {
  if constexpr (hn::MaxLanes(df) > 4) {
    const hn::Half<DF> dh;
    store_blocks(dh, hn::Add(hn::LowerHalf(dh, x), hn::UpperHalf(dh, x)), out);
  } else {
    hn::StoreU(x, df, out);
  }
}
#endif

// out[i] = sum of the lanes of the i-th vector.
template <class DF, class V>
HWY_INLINE void store_sums4(DF df, V a, V b, V c, V d, float* out) {
#if TREEATTN_SCALABLE || HWY_TARGET == HWY_SCALAR
  out[0] = hn::GetLane(hn::SumOfLanes(df, a));
  out[1] = hn::GetLane(hn::SumOfLanes(df, b));
  out[2] = hn::GetLane(hn::SumOfLanes(df, c));
  out[3] = hn::GetLane(hn::SumOfLanes(df, d));
#else
  if constexpr (hn::MaxLanes(df) > 4) {
    // The four are brought together in every 128 bits first, so that the rest is done for all of them at once.
    const auto both = [&](V x, V y)
                          HWY_ATTR { return hn::Add(hn::InterleaveLower(df, x, y), hn::InterleaveUpper(df, x, y)); };
    const hn::RepartitionToWide<DF> dw;
    const auto ab = hn::BitCast(dw, both(a, b)), cd = hn::BitCast(dw, both(c, d));
    store_blocks(
        df, hn::Add(hn::BitCast(df, hn::InterleaveLower(dw, ab, cd)), hn::BitCast(df, hn::InterleaveUpper(dw, ab, cd))),
        out);
  } else if constexpr (hn::MaxLanes(df) == 4) {
#if HWY_TARGET == HWY_NEON
    const auto ab = vpaddq_f32(a.raw, b.raw);
    const auto cd = vpaddq_f32(c.raw, d.raw);
    vst1q_f32(out, vpaddq_f32(ab, cd));
#else
    const auto ab = hn::Add(hn::ConcatEven(df, b, a), hn::ConcatOdd(df, b, a));
    const auto cd = hn::Add(hn::ConcatEven(df, d, c), hn::ConcatOdd(df, d, c));
    hn::StoreU(hn::Add(hn::ConcatEven(df, cd, ab), hn::ConcatOdd(df, cd, ab)), df, out);
#endif
  } else {
    out[0] = hn::GetLane(hn::SumOfLanes(df, a));
    out[1] = hn::GetLane(hn::SumOfLanes(df, b));
    out[2] = hn::GetLane(hn::SumOfLanes(df, c));
    out[3] = hn::GetLane(hn::SumOfLanes(df, d));
  }
#endif
}

// R rows of q (row stride = dim, in_pairs) against 4 tokens; logits row stride kTileTokens. Vectors of unknown size
// cannot sit in arrays, hence the names: a<row><token>.
template <int R, class T, class DF>
HWY_INLINE void dot_block(DF df, const float* q, int dim, const T* k0, const T* k1, const T* k2, const T* k3,
                          std::ptrdiff_t behind, float* logits) {
  using V = hn::Vec<DF>;
  const int lanes = static_cast<int>(hn::Lanes(df));
  auto a00 = hn::Zero(df), a01 = a00, a02 = a00, a03 = a00;
  auto a10 = a00, a11 = a00, a12 = a00, a13 = a00;
  auto a20 = a00, a21 = a00, a22 = a00, a23 = a00;
  auto a30 = a00, a31 = a00, a32 = a00, a33 = a00;
  const auto add = [&](int i, const V& x0, const V& x1, const V& x2, const V& x3) HWY_ATTR {
    const auto q0 = hn::LoadU(df, q + i);
    a00 = hn::MulAdd(q0, x0, a00);
    a01 = hn::MulAdd(q0, x1, a01);
    a02 = hn::MulAdd(q0, x2, a02);
    a03 = hn::MulAdd(q0, x3, a03);
    if constexpr (R > 1) {
      const auto q1 = hn::LoadU(df, q + dim + i);
      a10 = hn::MulAdd(q1, x0, a10);
      a11 = hn::MulAdd(q1, x1, a11);
      a12 = hn::MulAdd(q1, x2, a12);
      a13 = hn::MulAdd(q1, x3, a13);
    }
    if constexpr (R > 2) {
      const auto q2 = hn::LoadU(df, q + 2 * dim + i);
      a20 = hn::MulAdd(q2, x0, a20);
      a21 = hn::MulAdd(q2, x1, a21);
      a22 = hn::MulAdd(q2, x2, a22);
      a23 = hn::MulAdd(q2, x3, a23);
      const auto q3 = hn::LoadU(df, q + 3 * dim + i);
      a30 = hn::MulAdd(q3, x0, a30);
      a31 = hn::MulAdd(q3, x1, a31);
      a32 = hn::MulAdd(q3, x2, a32);
      a33 = hn::MulAdd(q3, x3, a33);
    }
  };
  int i = 0;
  for (; i + 2 * lanes <= dim; i += 2 * lanes) {
    fetch_with<2>(df, behind, i, k0, k1, k2, k3);
    V x0, x1, x2, x3, y0, y1, y2, y3;
    load_pair(df, k0 + i, x0, y0);
    load_pair(df, k1 + i, x1, y1);
    load_pair(df, k2 + i, x2, y2);
    load_pair(df, k3 + i, x3, y3);
    add(i, x0, x1, x2, x3);
    add(i + lanes, y0, y1, y2, y3);
  }
  if (i < dim) {
    fetch_with<1>(df, behind, i, k0, k1, k2, k3);
    add(i, load_f32(df, k0 + i), load_f32(df, k1 + i), load_f32(df, k2 + i), load_f32(df, k3 + i));
  }
  store_sums4(df, a00, a01, a02, a03, logits);
  if constexpr (R > 1) store_sums4(df, a10, a11, a12, a13, logits + kTileTokens);
  if constexpr (R > 2) {
    store_sums4(df, a20, a21, a22, a23, logits + 2 * kTileTokens);
    store_sums4(df, a30, a31, a32, a33, logits + 3 * kTileTokens);
  }
}

// One row against 4 tokens with two accumulators a token: four chains cannot keep four multiply-add pipes busy.
template <class T, class DF>
HWY_INLINE void dot_block_single(DF df, const float* q, int dim, const T* k0, const T* k1, const T* k2, const T* k3,
                                 std::ptrdiff_t behind, float* logits) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  auto a0 = hn::Zero(df), a1 = a0, a2 = a0, a3 = a0;
  auto b0 = a0, b1 = a0, b2 = a0, b3 = a0;
  for (int i = 0; i < dim; i += 2 * lanes) {
    fetch_with<2>(df, behind, i, k0, k1, k2, k3);
    const auto q0 = hn::LoadU(df, q + i);
    const auto q1 = hn::LoadU(df, q + i + lanes);
    hn::Vec<DF> x, y;
    load_pair(df, k0 + i, x, y);
    a0 = hn::MulAdd(q0, x, a0);
    b0 = hn::MulAdd(q1, y, b0);
    load_pair(df, k1 + i, x, y);
    a1 = hn::MulAdd(q0, x, a1);
    b1 = hn::MulAdd(q1, y, b1);
    load_pair(df, k2 + i, x, y);
    a2 = hn::MulAdd(q0, x, a2);
    b2 = hn::MulAdd(q1, y, b2);
    load_pair(df, k3 + i, x, y);
    a3 = hn::MulAdd(q0, x, a3);
    b3 = hn::MulAdd(q1, y, b3);
  }
  store_sums4(df, hn::Add(a0, b0), hn::Add(a1, b1), hn::Add(a2, b2), hn::Add(a3, b3), logits);
}

template <class T, class DF>
HWY_INLINE void dot_with(DF df, const DotArgs& args) {
  // Copies of what the loops use: it is not written to, which stores of logits do not tell the compiler.
  const int dim = args.dim, heads = args.heads, rows = args.rows, tokens = args.tokens;
  const std::ptrdiff_t head_bytes = args.k.head_bytes;
  const std::size_t q_head_bytes = args.q_head_bytes;
  const bool paired = dim % (2 * static_cast<int>(hn::Lanes(df))) == 0;
  ComingRows coming(args.k, tokens, args.ahead, heads, dim * static_cast<int>(sizeof(T)));
  for (int t = 0; t < tokens; t += kTokenBlock) {
    coming.begin(t);
    FourRows<T> k(args.k, t);
    const std::byte* packed = args.q;
    float* logits = args.logits + t;
    for (int h = 0; h < heads; ++h) {
      const std::ptrdiff_t behind = coming.with_head(h);
      const float* q = reinterpret_cast<const float*>(packed);
      int r = 0;
      if constexpr (kRegisterRows >= 4) {
        for (; r + 4 <= rows; r += 4) {
          dot_block<4>(df, q + r * dim, dim, k.a, k.b, k.c, k.d, behind, logits + r * kTileTokens);
        }
      }
      for (; r + 2 <= rows; r += 2) {
        dot_block<2>(df, q + r * dim, dim, k.a, k.b, k.c, k.d, behind, logits + r * kTileTokens);
      }
      if (r < rows && paired) {
        dot_block_single(df, q + r * dim, dim, k.a, k.b, k.c, k.d, behind, logits + r * kTileTokens);
      } else if (r < rows) {
        dot_block<1>(df, q + r * dim, dim, k.a, k.b, k.c, k.d, behind, logits + r * kTileTokens);
      }
      k.next_head(head_bytes);
      packed += q_head_bytes;
      logits += rows * kTileTokens;
    }
  }
}

template <class T>
void dot(const DotArgs& args) {
  with_lanes_for(args.dim, [&](auto df) HWY_ATTR { dot_with<T>(df, args); });
}

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
