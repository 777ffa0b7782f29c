// SPDX-License-Identifier: Apache-2.0
// The loops the NEON files share: blocks of tokens, the heads of a block, rows in fours, twos and ones.
//
// Everything is static: these files are compiled with flags of their own, and a shared inline function could end up in
// code that must run without them. For the same reason no header of the standard library's containers may come in here.
#pragma once

#include "kernels/cpu/tile_ops.h"
#include "kernels/cpu/unroll.h"

namespace treeattn::kernels::neon {

inline constexpr int kTokens = 8;  // worked on together

// What the work on a block of tokens brings of the rows ahead: 4 * N of them, taken to be as long as the block's own
// rows, line after line, N lines for every 16 bytes of an own row.
template <int N>
struct Soon {
  const std::byte* rows[4 * N];
  int row_bits;  // of the next power of two

  TREEATTN_FORCE_INLINE explicit Soon(std::ptrdiff_t own_bytes)
      : row_bits(64 - __builtin_clzl(static_cast<unsigned long>(own_bytes - 1))) {}

  // rows[first, first + count): those to come, or else a row of the block itself, which is at hand.
  TREEATTN_FORCE_INLINE void set(int first, int count, const Ahead& ahead, int t, int h, const std::byte* own) {
    const std::byte* const* from = ahead.rows + t / kTokenBlock * ahead.rows_per_four;
    for (int i = 0; i < count; ++i) rows[first + i] = ahead.rows ? from[i] + h * ahead.head_bytes : own;
  }

  TREEATTN_FORCE_INLINE void fetch(std::ptrdiff_t own_offset) const {
    const std::ptrdiff_t at = 4 * own_offset;
    const std::byte* const* from = rows + (at >> row_bits) * N;
    TREEATTN_UNROLL
    for (int i = 0; i < N; ++i) __builtin_prefetch(from[i] + (at & ((std::ptrdiff_t{1} << row_bits) - 1)), 0, 2);
  }
};
using SoonByKeys = Soon<1>;
using SoonByValues = Soon<3>;

// body(rows of 8 tokens for head 0, head, first token, what to fetch): the last block is filled with copies of the last
// row.
template <class Body>
static inline void for_each_key_block(const DotArgs& args, int element_bytes, const Body& body) {
  for (int t = 0; t < args.tokens; t += kTokens) {
    const std::byte* rows[kTokens];
    TREEATTN_UNROLL
    for (int i = 0; i < kTokens; ++i) rows[i] = args.k.rows[t + i < args.tokens ? t + i : args.tokens - 1];
    for (int h = 0; h < args.heads; ++h) {
      SoonByKeys soon(args.dim * element_bytes);
      soon.set(0, 4, args.ahead, t, h, rows[0]);
      body(rows, h, t, soon);
    }
  }
}

// What to fetch while the values of tokens [t, t + 8) of a head are summed.
TREEATTN_FORCE_INLINE static inline SoonByValues soon_by_values(const AccumulateArgs& args, int element_bytes, int t,
                                                                int h) {
  SoonByValues soon(args.dim * element_bytes);
  soon.set(0, 4, args.ahead[0], t, h, args.v.rows[t]);
  soon.set(4, 8, args.ahead[1], t, h, args.v.rows[t]);
  return soon;
}

// body.template operator()<R>(first token, head, first row, what to fetch), R being kMost, 4, 2 or 1 rows of the head.
template <int kMost = 4, class Body>
static inline void for_each_value_block(const AccumulateArgs& args, int element_bytes, const Body& body) {
  for (int t = 0; t < args.tokens; t += kTokens) {
    for (int h = 0; h < args.heads; ++h) {
      const SoonByValues soon = soon_by_values(args, element_bytes, t, h);
      int r = 0;
      for (; r + kMost <= args.rows; r += kMost) body.template operator()<kMost>(t, h, r, soon);
      for (; r + 4 <= args.rows; r += 4) body.template operator()<4>(t, h, r, soon);
      for (; r + 2 <= args.rows; r += 2) body.template operator()<2>(t, h, r, soon);
      if (r < args.rows) body.template operator()<1>(t, h, r, soon);
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
