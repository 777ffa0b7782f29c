// SPDX-License-Identifier: Apache-2.0
// Per target: weighted sums of a tile's values, as blocks of 4 tokens by 1, 2 or 4 rows.
#if defined(TREEATTN_ACCUMULATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_ACCUMULATE_INL_H_
#undef TREEATTN_ACCUMULATE_INL_H_
#else
#define TREEATTN_ACCUMULATE_INL_H_
#endif

#include "kernels/cpu/simd_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

// R rows and 4 tokens: every sum is loaded once and stored once for four multiply-adds. w<row><token>.
template <int R, class T, class DF>
HWY_INLINE void accumulate_block(DF df, const float* w, int dim, const T* v0, const T* v1, const T* v2, const T* v3,
                                 float* o) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  const int r1 = R > 1 ? 1 : 0, r2 = R > 2 ? 2 : 0, r3 = R > 2 ? 3 : 0;
  const auto weight = [&](int row, int token) HWY_ATTR { return hn::Set(df, w[row * kTileTokens + token]); };
  const auto w00 = weight(0, 0), w01 = weight(0, 1), w02 = weight(0, 2), w03 = weight(0, 3);
  const auto w10 = weight(r1, 0), w11 = weight(r1, 1), w12 = weight(r1, 2), w13 = weight(r1, 3);
  const auto w20 = weight(r2, 0), w21 = weight(r2, 1), w22 = weight(r2, 2), w23 = weight(r2, 3);
  const auto w30 = weight(r3, 0), w31 = weight(r3, 1), w32 = weight(r3, 2), w33 = weight(r3, 3);
  for (int i = 0; i < dim; i += lanes) {
    const auto x0 = load_f32(df, v0 + i), x1 = load_f32(df, v1 + i);
    const auto x2 = load_f32(df, v2 + i), x3 = load_f32(df, v3 + i);
    const auto add = [&](float* to, auto a, auto b, auto c, auto d) HWY_ATTR {
      auto sum = hn::MulAdd(a, x0, hn::LoadU(df, to));
      sum = hn::MulAdd(b, x1, sum);
      sum = hn::MulAdd(c, x2, sum);
      hn::StoreU(hn::MulAdd(d, x3, sum), df, to);
    };
    add(o + i, w00, w01, w02, w03);
    if constexpr (R > 1) add(o + dim + i, w10, w11, w12, w13);
    if constexpr (R > 2) {
      add(o + 2 * dim + i, w20, w21, w22, w23);
      add(o + 3 * dim + i, w30, w31, w32, w33);
    }
  }
}

// One token and one row, for what is left of a tile.
template <class T, class DF>
HWY_INLINE void accumulate_token(DF df, float w, int dim, const T* v, float* o) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  const auto weight = hn::Set(df, w);
  for (int i = 0; i < dim; i += lanes) {
    hn::StoreU(hn::MulAdd(weight, load_f32(df, v + i), hn::LoadU(df, o + i)), df, o + i);
  }
}

// Once the running maximum has settled, nothing shrinks any more.
template <class DF>
HWY_INLINE void shrink_sums(DF df, float shrink, int dim, float* o) {
  if (shrink == 1.0f) return;
  const int lanes = static_cast<int>(hn::Lanes(df));
  const auto factor = hn::Set(df, shrink);
  for (int i = 0; i < dim; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(df, o + i), factor), df, o + i);
}

template <class T, class DF>
HWY_INLINE void accumulate_with(DF df, const AccumulateArgs& args) {
  const int dim = args.dim;
  for (int i = 0; i < args.heads * args.rows; ++i) shrink_sums(df, args.shrink[i], dim, args.o + i * dim);
  int t = 0;
  for (; t + kTokenBlock <= args.tokens; t += kTokenBlock) {
    for (int h = 0; h < args.heads; ++h) {
      const T* v0 = row_as<T>(args.v, t, h);
      const T* v1 = row_as<T>(args.v, t + 1, h);
      const T* v2 = row_as<T>(args.v, t + 2, h);
      const T* v3 = row_as<T>(args.v, t + 3, h);
      const float* w = args.weights + h * args.rows * kTileTokens + t;
      float* o = args.o + h * args.rows * dim;
      int r = 0;
      if constexpr (kRegisterRows >= 4) {
        for (; r + 4 <= args.rows; r += 4) {
          accumulate_block<4>(df, w + r * kTileTokens, dim, v0, v1, v2, v3, o + r * dim);
        }
      }
      for (; r + 2 <= args.rows; r += 2) {
        accumulate_block<2>(df, w + r * kTileTokens, dim, v0, v1, v2, v3, o + r * dim);
      }
      if (r < args.rows) accumulate_block<1>(df, w + r * kTileTokens, dim, v0, v1, v2, v3, o + r * dim);
    }
  }
  for (; t < args.tokens; ++t) {
    for (int i = 0; i < args.heads * args.rows; ++i) {
      accumulate_token(df, args.weights[i * kTileTokens + t], dim, row_as<T>(args.v, t, i / args.rows),
                       args.o + i * dim);
    }
  }
}

template <class T>
void accumulate(const AccumulateArgs& args) {
  const hn::ScalableTag<float> df;
  if (args.dim % static_cast<int>(hn::Lanes(df)) == 0) {
    accumulate_with<T>(df, args);
  } else {
    accumulate_with<T>(hn::CappedTag<float, 8>(), args);
  }
}

template <class T>
void promote(const TileRows& in, int tokens, int dim, float* out) {
  const hn::CappedTag<float, 8> df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  for (int t = 0; t < tokens; ++t) {
    const T* row = row_as<T>(in, t, 0);
    for (int i = 0; i < dim; i += lanes) hn::StoreU(load_f32(df, row + i), df, out + t * dim + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#endif
