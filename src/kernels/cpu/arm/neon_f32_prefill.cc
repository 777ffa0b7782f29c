// SPDX-License-Identifier: Apache-2.0
// float32 K and V, and what was converted to float32, where many query rows share a KV head. Each tile is packed once,
// so that four neighbours in a register are tokens (columns of the values): then a product takes its other factor, of a
// query or of a weight, from a lane, nothing has to be added up across lanes or copied into all of them, and 4 rows by
// 16 tokens (columns) in 16 registers need one load for three multiply-adds. A row's bits do not depend on the rows it
// is worked on with: every sum is one chain, in the order of the dimensions or of the tokens.
#include "kernels/cpu/arm/neon_loops.h"
#include "kernels/cpu/arm/neon_vectors.h"
#include "kernels/cpu/fetch_share.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::kTokens;

constexpr int kStep = 4;     // dimensions or tokens, the lanes of a factor
constexpr int kVectors = 4;  // of tokens or columns, worked on together, or half of them at the end
constexpr int kWidth = 4 * kVectors;
constexpr int kRows = 4;  // of queries, worked on together

static_assert(kTokens == kWidth / 2 && kTileTokens % kWidth == 0 && kMaxHeadDim % kWidth == 0);

// Rows of factors; those past the last are copies of it, of which nothing may come.
struct Rows {
  const float* at[kRows];

  TREEATTN_FORCE_INLINE Rows(const float* first, std::ptrdiff_t stride, int count) {
    TREEATTN_UNROLL
    for (int r = 0; r < kRows; ++r) at[r] = first + (r < count ? r : count - 1) * stride;
  }
};

// Four rows by V vectors.
template <int V>
struct Sums {
  float32x4_t at[kRows][V];

  // at += factors[row][i] * block[i] for four i; block is [i][kWidth].
  TREEATTN_FORCE_INLINE void add_step(const Rows& factors, int i, const float* block) {
    float32x4_t four[kRows];
    TREEATTN_UNROLL
    for (int r = 0; r < kRows; ++r) four[r] = vld1q_f32(factors.at[r] + i);
    add_lane<0>(four, block);
    add_lane<1>(four, block);
    add_lane<2>(four, block);
    add_lane<3>(four, block);
  }

  TREEATTN_FORCE_INLINE void add_one(const Rows& factors, int i, const float* block) {
    float32x4_t one[kRows];
    TREEATTN_UNROLL
    for (int r = 0; r < kRows; ++r) one[r] = vdupq_n_f32(factors.at[r][i]);
    add_lane<0>(one, block);
  }

 private:
  template <int kLane>
  TREEATTN_FORCE_INLINE void add_lane(const float32x4_t (&factors)[kRows], const float*& block) {
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) {
      const float32x4_t x = vld1q_f32(block + (kLane * kWidth + 4 * j));
      TREEATTN_UNROLL
      for (int r = 0; r < kRows; ++r) at[r][j] = vfmaq_laneq_f32(at[r][j], x, factors[r], kLane);
      // The next vector is loaded after these, with which it has nothing to do: GCC 12 loads and multiplies in another
      // order, in which the same instructions take a third longer.
      asm("" : "+r"(block), "+w"(at[0][j]), "+w"(at[1][j]), "+w"(at[2][j]), "+w"(at[3][j]));
    }
  }
};

// Keys become [16 tokens][dim][token].
void pack_keys(const DotArgs& args, float* out) {
  neon::for_each_key_block(args, [&](const std::byte* const* k, int t) {
    TREEATTN_UNROLL
    for (int half = 0; half < kTokens; half += 4) {
      const auto row = [&](int i) { return reinterpret_cast<const float*>(k[half + i]); };
      float* to = out + t / kWidth * kWidth * args.dim + t % kWidth + half;
      for (int d = 0; d < args.dim; d += kStep, to += kStep * kWidth) {
        const neon::Turned4 turned(vld1q_f32(row(0) + d), vld1q_f32(row(1) + d), vld1q_f32(row(2) + d),
                                   vld1q_f32(row(3) + d));
        vst1q_f32(to, turned.first), vst1q_f32(to + kWidth, turned.second);
        vst1q_f32(to + 2 * kWidth, turned.third), vst1q_f32(to + 3 * kWidth, turned.fourth);
      }
    }
  });
}

// Four rows against V vectors of tokens.
template <int V>
void dot_block(const Rows& q, const float* keys, int dim, int rows, float* logits) {
  Sums<V> sums;
  TREEATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) sums.at[r][j] = vdupq_n_f32(0.0f);
  }
  for (int d = 0; d < dim; d += kStep, keys += kStep * kWidth) sums.add_step(q, d, keys);
  TREEATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) vst1q_f32(logits + r * kTileTokens + 4 * j, sums.at[r][j]);
  }
}

void dot(const DotArgs& args) {
  alignas(64) float keys[kTileTokens * kMaxHeadDim];
  pack_keys(args, keys);
  for (int r = 0; r < args.rows; r += kRows) {
    fetch_share<kRows>(args.ahead, r, args.rows);
    const Rows q(reinterpret_cast<const float*>(args.q) + (args.first_row + r) * args.dim, args.dim, args.rows - r);
    for (int t = 0; t < args.tokens; t += kWidth) {
      const auto block = t + kTokens < args.tokens ? dot_block<kVectors> : dot_block<kVectors / 2>;
      block(q, keys + t * args.dim, args.dim, args.rows - r, args.logits + r * kTileTokens + t);
    }
  }
}

// Values become [16 columns][token][column].
void pack_values(const AccumulateArgs& args, float* out) {
  for (int t = 0; t < args.tokens; ++t) {
    const float* v = reinterpret_cast<const float*>(args.v.rows[t]);
    for (int c = 0; c < args.dim; c += 8) {
      float* to = out + c / kWidth * kWidth * kTileTokens + t * kWidth + c % kWidth;
      vst1q_f32(to, vld1q_f32(v + c)), vst1q_f32(to + 4, vld1q_f32(v + c + 4));
    }
  }
}

// Four rows by V vectors of columns over all tokens of the tile.
template <int V>
void sum_block(const Rows& weights, const float* values, int tokens, int rows, const float* shrink, int dim, float* o) {
  Sums<V> sums;
  TREEATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int row = r < rows ? r : rows - 1;
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) sums.at[r][j] = vmulq_n_f32(vld1q_f32(o + row * dim + 4 * j), shrink[row]);
  }
  int t = 0;
  for (; t + kStep <= tokens; t += kStep, values += kStep * kWidth) sums.add_step(weights, t, values);
  for (; t < tokens; ++t, values += kWidth) sums.add_one(weights, t, values);
  TREEATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    TREEATTN_UNROLL
    for (int j = 0; j < V; ++j) vst1q_f32(o + r * dim + 4 * j, sums.at[r][j]);
  }
}

void accumulate(const AccumulateArgs& args) {
  alignas(64) float values[kTileTokens * kMaxHeadDim];
  pack_values(args, values);
  for (int r = 0; r < args.rows; r += kRows) {
    fetch_share<kRows>(args.ahead, r, args.rows);
    const Rows weights(args.weights + r * kTileTokens, kTileTokens, args.rows - r);
    for (int c = 0; c < args.dim; c += kWidth) {
      const auto block = c + kWidth <= args.dim ? sum_block<kVectors> : sum_block<kVectors / 2>;
      block(weights, values + c * kTileTokens, args.tokens, args.rows - r, args.shrink + r, args.dim,
            args.o + r * args.dim + c);
    }
  }
}

}  // namespace

void use_neon_f32_prefill(CpuTarget& target) {
  static TileOps ops = target.ops[static_cast<int>(DType::kFloat32)];
  ops.dot = dot;
  ops.accumulate = accumulate;
  target.many_rows[static_cast<int>(DType::kFloat32)] = &ops;
}

}  // namespace treeattn::kernels
