// SPDX-License-Identifier: Apache-2.0
// Per target, AVX2 and AVX-512: float32 K and V, and what was converted to float32, where many query rows share a KV
// head. Each tile is packed once, so that neighbours in a register are tokens (columns of the values) and the products
// of all rows read it in order: nothing has to be added up across lanes, and every sum stays in a register until it is
// complete. A row's bits do not depend on the rows it is worked on with: every sum is one chain, in the order of the
// dimensions or of the tokens.
#if defined(TREEATTN_PACKED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEATTN_PACKED_ROWS_INL_H_
#undef TREEATTN_PACKED_ROWS_INL_H_
#else
#define TREEATTN_PACKED_ROWS_INL_H_
#endif

#include "kernels/cpu/fetch_share.h"
#include "kernels/cpu/simd_common-inl.h"
#include "kernels/cpu/unroll.h"

#undef TREEATTN_PACKS_ROWS
#if HWY_ARCH_X86 && HWY_TARGET < HWY_SSE4
#define TREEATTN_PACKS_ROWS 1

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {
namespace packed {

using DF = hn::ScalableTag<float>;
using Vec = hn::Vec<DF>;

// Rows by vectors of sums, as many as fit beside the factors: 24 + 5 of 32 registers, or 12 + 3 of 16.
inline constexpr int kRows = 6;
inline constexpr int kVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
inline constexpr int kWidth = kVectors * kLanes;  // tokens or columns, worked on together
static_assert(kTileTokens % kWidth == 0 && kMaxHeadDim % kWidth == 0);

// sums[r] += factors[r * stride + i] * block[i] for one i after the other; block is [steps][kWidth].
template <int R, int V>
HWY_INLINE void add_products(const float* factors, std::ptrdiff_t stride, const float* block, int steps,
                             Vec (&sums)[R][V]) {
  const DF df;
  for (int i = 0; i < steps; ++i, ++factors, block += kWidth) {
    Vec x[V];
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) x[j] = hn::Load(df, block + j * kLanes);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec factor = hn::Set(df, factors[r * stride]);
      TREEATTN_UNROLL
      for (int j = 0; j < V; ++j) sums[r][j] = hn::MulAdd(factor, x[j], sums[r][j]);
    }
  }
}

template <int R, int V>
HWY_INLINE void store(const Vec (&sums)[R][V], float* to, std::ptrdiff_t stride) {
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) hn::StoreU(sums[r][j], DF(), to + r * stride + j * kLanes);
  }
}

// R rows against kWidth tokens.
template <int R>
HWY_NOINLINE void dot_block(const float* q, const float* keys, int dim, float* logits) {
  const DF df;
  Vec sums[R][kVectors];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[r][j] = hn::Zero(df);
  }
  add_products(q, dim, keys, dim, sums);
  store(sums, logits, kTileTokens);
}

// R rows by V vectors of columns over all tokens of the tile.
template <int R, int V>
HWY_NOINLINE void sum_block(const float* weights, const float* values, int tokens, const float* shrink,
                            std::ptrdiff_t stride, float* o) {
  const DF df;
  Vec sums[R][V];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    const Vec factor = hn::Set(df, shrink[r]);
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) sums[r][j] = hn::Mul(hn::LoadU(df, o + r * stride + j * kLanes), factor);
  }
  add_products(weights, kTileTokens, values, tokens, sums);
  store(sums, o, stride);
}

// body<R>(r) for rows [r, r + R), most of them at a time, then four, two and one. The last eight by fours: two rows at
// a time keep too few sums going.
template <int R, class Body>
HWY_INLINE void for_each_rows(int r, int rows, const Body& body) {
  for (; r + R <= rows && (R <= 4 || rows - r != 8); r += R) body.template operator()<R>(r);
  if constexpr (R > 1) for_each_rows<(R > 4 ? 4 : R > 2 ? 2 : 1)>(r, rows, body);
}

// body<R>(first row, first token or column), for all rows with one block of a packed tile, which stays in the nearest
// cache, before the next. What lies ahead is fetched evenly in between.
template <class Body>
HWY_INLINE void for_each_block(int rows, int width, const Ahead& ahead, const Body& body) {
  const int parts = (width + kWidth - 1) / kWidth * rows;
  for (int at = 0; at < width; at += kWidth) {
    for_each_rows<kRows>(0, rows, [&]<int R>(int r) HWY_ATTR {
      fetch_share<R>(ahead, at / kWidth * rows + r, parts);
      body.template operator()<R>(r, at);
    });
  }
}

// Four floats of every fourth row, as many rows as that fills a vector with.
template <class D>
HWY_INLINE hn::Vec<D> load_fourths(D d, const float* const* rows, int at) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return hn::LoadU(d, rows[0] + at);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_fourths(half, rows + hn::MaxLanes(half), at), load_fourths(half, rows, at));
  }
}

// Keys become [kWidth tokens][dim][token]. The last tokens are copies of the last key, of which nothing may come.
HWY_INLINE void pack_keys(const DotArgs& args, float* out) {
  const DF df;
  const hn::RepartitionToWide<DF> pairs;
  const auto both = [&](Vec a, Vec b, bool upper) HWY_ATTR {
    const auto x = hn::BitCast(pairs, a), y = hn::BitCast(pairs, b);
    return hn::BitCast(df, upper ? hn::InterleaveUpper(pairs, x, y) : hn::InterleaveLower(pairs, x, y));
  };
  const int end = (args.tokens + kWidth - 1) / kWidth * kWidth;
  for (int t = 0; t < end; t += kLanes) {
    const float* k[kLanes];
    for (int i = 0; i < kLanes; ++i) k[i] = row_as<float>(args.k, t + i < args.tokens ? t + i : args.tokens - 1, 0);
    float* to = out + t / kWidth * kWidth * args.dim + t % kWidth;
    for (int d = 0; d < args.dim; d += 4, to += 4 * kWidth) {
      // Block b of x<j>: four dimensions of token 4 b + j.
      const Vec x0 = load_fourths(df, k, d), x1 = load_fourths(df, k + 1, d);
      const Vec x2 = load_fourths(df, k + 2, d), x3 = load_fourths(df, k + 3, d);
      const Vec low01 = hn::InterleaveLower(df, x0, x1), low23 = hn::InterleaveLower(df, x2, x3);
      const Vec high01 = hn::InterleaveUpper(df, x0, x1), high23 = hn::InterleaveUpper(df, x2, x3);
      hn::Store(both(low01, low23, false), df, to), hn::Store(both(low01, low23, true), df, to + kWidth);
      hn::Store(both(high01, high23, false), df, to + 2 * kWidth);
      hn::Store(both(high01, high23, true), df, to + 3 * kWidth);
    }
  }
}

void dot(const DotArgs& args) {
  HWY_ALIGN float keys[kTileTokens * kMaxHeadDim];
  pack_keys(args, keys);
  const float* q = reinterpret_cast<const float*>(args.q) + args.first_row * args.dim;
  for_each_block(args.rows, args.tokens, args.ahead, [&]<int R>(int r, int t) HWY_ATTR {
    dot_block<R>(q + r * args.dim, keys + t * args.dim, args.dim, args.logits + r * kTileTokens + t);
  });
}

// The sums of a row fill blocks, the last one perhaps by half.
int sum_floats(int dim) { return (dim + kWidth / 2 - 1) / (kWidth / 2) * (kWidth / 2); }

// Values become [kWidth columns][token][column]; columns past the last are 0.
HWY_INLINE void pack_values(const AccumulateArgs& args, float* out) {
  const hn::CappedTag<float, 8> d8;  // divides every head dim
  for (int t = 0; t < args.tokens; ++t) {
    const float* v = row_as<float>(args.v, t, 0);
    for (int c = 0; c < sum_floats(args.dim); c += 8) {
      float* to = out + c / kWidth * kWidth * kTileTokens + t * kWidth + c % kWidth;
      hn::Store(c < args.dim ? hn::LoadU(d8, v + c) : hn::Zero(d8), d8, to);
    }
  }
}

void accumulate(const AccumulateArgs& args) {
  HWY_ALIGN float values[kTileTokens * kMaxHeadDim];
  pack_values(args, values);
  const int stride = sum_floats(args.dim);
  for_each_block(args.rows, stride, args.ahead, [&]<int R>(int r, int c) HWY_ATTR {
    const auto block = c + kWidth <= stride ? sum_block<R, kVectors> : sum_block<R, kVectors / 2>;
    block(args.weights + r * kTileTokens, values + c * kTileTokens, args.tokens, args.shrink + r, stride,
          args.o + r * stride + c);
  });
}

}  // namespace packed

constexpr TileOps packed_rows(TileOps ops) {
  ops.dot = packed::dot;
  ops.accumulate = packed::accumulate;
  ops.sum_floats = packed::sum_floats;
  return ops;
}

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#else
#define TREEATTN_PACKS_ROWS 0
#endif

#endif
