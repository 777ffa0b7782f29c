// SPDX-License-Identifier: Apache-2.0
// The loops the NEON files share: blocks of tokens, the heads of a block, rows in fours, twos and ones.
//
// Everything is static: these files are compiled with flags of their own, and a shared inline function could end up in
// code that must run without them. For the same reason no header of the standard library's containers may come in here.
#pragma once

#include "kernels/cpu/arm/row_stream.h"
#include "kernels/cpu/tile_ops.h"
#include "kernels/cpu/unroll.h"

namespace treeattn::kernels::neon {

inline constexpr int kTokens = 8;  // worked on together

// Rows are fetched into the second level, at an even rate. How far ahead hardly matters: 16 KiB to a whole tile are
// within 2 % of each other.
using BlockStream = RowStream<FetchDistance{.bytes = 64 << 10, .most_tokens = kTileTokens / 2, .locality = 2}, kTokens>;
using ComingLines = BlockStream::Lines;

// body(rows of 8 tokens for head 0, first token): the last block is filled with copies of the last row.
template <class Body>
static inline void for_each_key_block(const DotArgs& args, const Body& body) {
  for (int t = 0; t < args.tokens; t += kTokens) {
    const std::byte* rows[kTokens];
    TREEATTN_UNROLL
    for (int i = 0; i < kTokens; ++i) rows[i] = args.k.rows[t + i < args.tokens ? t + i : args.tokens - 1];
    body(rows, t);
  }
}

// body(rows of 8 tokens for head 0, head, first token, what comes).
template <class Body>
static inline void for_each_key_head(const DotArgs& args, int element_bytes, const Body& body) {
  BlockStream stream(args.k, args.tokens, args.ahead, args.heads, args.dim * element_bytes);
  for_each_key_block(args, [&](const std::byte* const* rows, int t) {
    stream.begin(t);
    for (int h = 0; h < args.heads; ++h) body(rows, h, t, stream.with_head(h));
  });
}

// body.template operator()<R>(first row), R being 4, 2 or 1 rows of those of a head.
template <class Body>
TREEATTN_FORCE_INLINE static inline void for_each_rows(int rows, const Body& body) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) body.template operator()<4>(r);
  for (; r + 2 <= rows; r += 2) body.template operator()<2>(r);
  if (r < rows) body.template operator()<1>(r);
}

// body.template operator()<R>(first token, head, first row, what comes) for 8 tokens.
template <class Body>
static inline void for_each_value_block(const AccumulateArgs& args, int element_bytes, const Body& body) {
  BlockStream stream(args.v, args.tokens, args.ahead, args.heads, args.dim * element_bytes);
  for (int t = 0; t < args.tokens; t += kTokens) {
    stream.begin(t);
    for (int h = 0; h < args.heads; ++h) {
      const ComingLines coming = stream.with_head(h);
      for_each_rows(args.rows, [&]<int R>(int r) { body.template operator()<R>(t, h, r, coming); });
    }
  }
}

// Rows of tokens [t, t + 8) for a head; rows of zeros, not copies, stand for missing tokens: 0 * inf would be NaN.
static inline void value_rows(const AccumulateArgs& args, int t, int h, const std::byte* (&rows)[kTokens]) {
  alignas(16) static constexpr std::byte kZeros[4 * kMaxHeadDim] = {};
  TREEATTN_UNROLL
  for (int i = 0; i < kTokens; ++i) {
    rows[i] = t + i < args.tokens ? args.v.rows[t + i] + h * args.v.head_bytes : kZeros;
  }
}

// Weights of tokens [t, t + 8) for a row; `filled` holds them, with zeros for missing tokens, where there are any.
static inline const float* row_weights(const AccumulateArgs& args, int t, int row, float (&filled)[kTokens]) {
  const float* weights = args.weights + row * kTileTokens + t;
  if (t + kTokens <= args.tokens) return weights;
  for (int i = 0; i < kTokens; ++i) filled[i] = t + i < args.tokens ? weights[i] : 0.0f;
  return filled;
}

}  // namespace treeattn::kernels::neon
