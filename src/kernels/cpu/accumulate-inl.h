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
                                 std::ptrdiff_t behind, float* o) {
  using V = hn::Vec<DF>;
  const int lanes = static_cast<int>(hn::Lanes(df));
  const int r1 = R > 1 ? 1 : 0, r2 = R > 2 ? 2 : 0, r3 = R > 2 ? 3 : 0;
  const auto weight = [&](int row, int token) HWY_ATTR { return hn::Set(df, w[row * kTileTokens + token]); };
  const auto w00 = weight(0, 0), w01 = weight(0, 1), w02 = weight(0, 2), w03 = weight(0, 3);
  const auto w10 = weight(r1, 0), w11 = weight(r1, 1), w12 = weight(r1, 2), w13 = weight(r1, 3);
  const auto w20 = weight(r2, 0), w21 = weight(r2, 1), w22 = weight(r2, 2), w23 = weight(r2, 3);
  const auto w30 = weight(r3, 0), w31 = weight(r3, 1), w32 = weight(r3, 2), w33 = weight(r3, 3);
  const auto add_all = [&](int i, const V& x0, const V& x1, const V& x2, const V& x3) HWY_ATTR {
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
  };
  int i = 0;
  for (; i + 2 * lanes <= dim; i += 2 * lanes) {
    fetch_with<2>(df, behind, i, v0, v1, v2, v3);
    V x0, x1, x2, x3, y0, y1, y2, y3;
    load_pair(df, v0 + i, x0, y0);
    load_pair(df, v1 + i, x1, y1);
    load_pair(df, v2 + i, x2, y2);
    load_pair(df, v3 + i, x3, y3);
    add_all(i, x0, x1, x2, x3);
    add_all(i + lanes, y0, y1, y2, y3);
  }
  if (i < dim) {
    fetch_with<1>(df, behind, i, v0, v1, v2, v3);
    add_all(i, load_f32(df, v0 + i), load_f32(df, v1 + i), load_f32(df, v2 + i), load_f32(df, v3 + i));
  }
}

// Four rows by four vectors of columns over all tokens, the sums in registers: for prefill, where the tile stays in the
// nearest cache and the sums of many rows do not. a<row><vector>.
template <class T, class DF>
HWY_INLINE void accumulate_in_registers(DF df, const AccumulateArgs& args, int r, int c) {
  const int n = static_cast<int>(hn::Lanes(df));
  const float* w0 = args.weights + r * kTileTokens;
  float* o0 = args.o + r * args.dim + c;
  float *o1 = o0 + args.dim, *o2 = o1 + args.dim, *o3 = o2 + args.dim;
  auto a00 = hn::LoadU(df, o0), a01 = hn::LoadU(df, o0 + n);
  auto a02 = hn::LoadU(df, o0 + 2 * n), a03 = hn::LoadU(df, o0 + 3 * n);
  auto a10 = hn::LoadU(df, o1), a11 = hn::LoadU(df, o1 + n);
  auto a12 = hn::LoadU(df, o1 + 2 * n), a13 = hn::LoadU(df, o1 + 3 * n);
  auto a20 = hn::LoadU(df, o2), a21 = hn::LoadU(df, o2 + n);
  auto a22 = hn::LoadU(df, o2 + 2 * n), a23 = hn::LoadU(df, o2 + 3 * n);
  auto a30 = hn::LoadU(df, o3), a31 = hn::LoadU(df, o3 + n);
  auto a32 = hn::LoadU(df, o3 + 2 * n), a33 = hn::LoadU(df, o3 + 3 * n);
  for (int t = 0; t < args.tokens; ++t) {
    const T* v = row_as<T>(args.v, t, 0) + c;
    hn::Vec<DF> x0, x1, x2, x3;
    load_pair(df, v, x0, x1);
    load_pair(df, v + 2 * n, x2, x3);
    const auto y0 = hn::Set(df, w0[t]), y1 = hn::Set(df, w0[kTileTokens + t]);
    const auto y2 = hn::Set(df, w0[2 * kTileTokens + t]), y3 = hn::Set(df, w0[3 * kTileTokens + t]);
    a00 = hn::MulAdd(y0, x0, a00), a01 = hn::MulAdd(y0, x1, a01);
    a02 = hn::MulAdd(y0, x2, a02), a03 = hn::MulAdd(y0, x3, a03);
    a10 = hn::MulAdd(y1, x0, a10), a11 = hn::MulAdd(y1, x1, a11);
    a12 = hn::MulAdd(y1, x2, a12), a13 = hn::MulAdd(y1, x3, a13);
    a20 = hn::MulAdd(y2, x0, a20), a21 = hn::MulAdd(y2, x1, a21);
    a22 = hn::MulAdd(y2, x2, a22), a23 = hn::MulAdd(y2, x3, a23);
    a30 = hn::MulAdd(y3, x0, a30), a31 = hn::MulAdd(y3, x1, a31);
    a32 = hn::MulAdd(y3, x2, a32), a33 = hn::MulAdd(y3, x3, a33);
  }
  hn::StoreU(a00, df, o0), hn::StoreU(a01, df, o0 + n);
  hn::StoreU(a02, df, o0 + 2 * n), hn::StoreU(a03, df, o0 + 3 * n);
  hn::StoreU(a10, df, o1), hn::StoreU(a11, df, o1 + n);
  hn::StoreU(a12, df, o1 + 2 * n), hn::StoreU(a13, df, o1 + 3 * n);
  hn::StoreU(a20, df, o2), hn::StoreU(a21, df, o2 + n);
  hn::StoreU(a22, df, o2 + 2 * n), hn::StoreU(a23, df, o2 + 3 * n);
  hn::StoreU(a30, df, o3), hn::StoreU(a31, df, o3 + n);
  hn::StoreU(a32, df, o3 + 2 * n), hn::StoreU(a33, df, o3 + 3 * n);
}

// One token and one row, for what is left of a tile.
template <class T, class DF>
HWY_INLINE void accumulate_token(DF df, float w, int dim, const T* v, float* o) {
  const int lanes = static_cast<int>(hn::Lanes(df));
  const auto weight = hn::Set(df, w);
  const auto add = [&](int i, const hn::Vec<DF>& x)
                       HWY_ATTR { hn::StoreU(hn::MulAdd(weight, x, hn::LoadU(df, o + i)), df, o + i); };
  int i = 0;
  for (; i + 2 * lanes <= dim; i += 2 * lanes) {
    hn::Vec<DF> x, y;
    load_pair(df, v + i, x, y);
    add(i, x);
    add(i + lanes, y);
  }
  if (i < dim) add(i, load_f32(df, v + i));
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
  if constexpr (kRegisterRows >= 4) {
    const int columns = 4 * static_cast<int>(hn::Lanes(df));
    if (args.heads == 1 && args.rows >= 16 && args.rows % 4 == 0 && dim % columns == 0) {
      for (int c = 0; c < dim; c += columns) {
        for (int r = 0; r < args.rows; r += 4) accumulate_in_registers<T>(df, args, r, c);
      }
      return;
    }
  }
  const int heads = args.heads, rows = args.rows, tokens = args.tokens;
  const std::ptrdiff_t head_bytes = args.v.head_bytes;
  ComingRows coming(args.v, tokens, args.ahead, heads, dim * static_cast<int>(sizeof(T)));
  int t = 0;
  for (; t + kTokenBlock <= tokens; t += kTokenBlock) {
    coming.begin(t);
    FourRows<T> v(args.v, t);
    const float* w = args.weights + t;
    float* o = args.o;
    for (int h = 0; h < heads; ++h) {
      const std::ptrdiff_t behind = coming.with_head(h);
      int r = 0;
      if constexpr (kRegisterRows >= 4) {
        for (; r + 4 <= rows; r += 4) {
          accumulate_block<4>(df, w + r * kTileTokens, dim, v.a, v.b, v.c, v.d, behind, o + r * dim);
        }
      }
      for (; r + 2 <= rows; r += 2) {
        accumulate_block<2>(df, w + r * kTileTokens, dim, v.a, v.b, v.c, v.d, behind, o + r * dim);
      }
      if (r < rows) accumulate_block<1>(df, w + r * kTileTokens, dim, v.a, v.b, v.c, v.d, behind, o + r * dim);
      v.next_head(head_bytes);
      w += rows * kTileTokens;
      o += rows * dim;
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
  with_lanes_for(args.dim, [&](auto df) HWY_ATTR { accumulate_with<T>(df, args); });
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
