// SPDX-License-Identifier: Apache-2.0
// int8 K and V with the I8MM matrix instruction: SMMLA multiplies a 2x8 by an 8x2 block of bytes into 2x2 integers, and
// converts nothing. The other factor must be int8 too, so it is cut into limbs (neon_int8.h).
//
// Compiled with flags for these extensions and used only where the processor has them: no inline function of a shared
// header may be instantiated here, or the linker could give this copy to everybody.
#include <arm_neon.h>

#include "kernels/cpu/arm/neon_int8.h"
#include "kernels/cpu/arm/neon_loops.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::ComingLines;
using neon::kTokens;
using neon::load16;
using neon::PackedHeader;

constexpr int kDims = 8;  // of a query in one block

int8x16_t pair_of(const std::byte* a, const std::byte* b) {
  return vcombine_s8(vld1_s8(reinterpret_cast<const std::int8_t*>(a)),
                     vld1_s8(reinterpret_cast<const std::int8_t*>(b)));
}
int8x16_t zip1_64(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
int8x16_t zip2_64(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

// P rows, two limbs each, against 8 tokens: integers [2 P][8].
template <int P>
void dot_limbs(const std::int8_t* q, int dim, const std::byte* const* k, std::ptrdiff_t offset, ComingLines coming,
               std::int32_t* sums) {
  int32x4_t acc[P][4];
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int t = 0; t < 4; ++t) acc[p][t] = vdupq_n_s32(0);
  }
  const std::byte* row[kTokens];
  TREEATTN_UNROLL
  for (int t = 0; t < kTokens; ++t) row[t] = k[t] + offset;
  int d = 0;
  for (; d + 16 <= dim; d += 16) {
    coming.fetch<16>();
    int8x16_t low[4], high[4];
    TREEATTN_UNROLL
    for (int t = 0; t < 4; ++t) {
      const int8x16_t a = load16(row[2 * t] + d), b = load16(row[2 * t + 1] + d);
      low[t] = zip1_64(a, b);
      high[t] = zip2_64(a, b);
    }
    TREEATTN_UNROLL
    for (int p = 0; p < P; ++p) {
      const std::int8_t* block = q + (p * dim + d) * 2;
      const int8x16_t q_low = vld1q_s8(block), q_high = vld1q_s8(block + 16);
      TREEATTN_UNROLL
      for (int t = 0; t < 4; ++t) acc[p][t] = vmmlaq_s32(acc[p][t], q_low, low[t]);
      TREEATTN_UNROLL
      for (int t = 0; t < 4; ++t) acc[p][t] = vmmlaq_s32(acc[p][t], q_high, high[t]);
    }
  }
  if (d < dim) {  // the last 8 dims
    TREEATTN_UNROLL
    for (int p = 0; p < P; ++p) {
      const int8x16_t x = vld1q_s8(q + (p * dim + d) * 2);
      TREEATTN_UNROLL
      for (int t = 0; t < 4; ++t) acc[p][t] = vmmlaq_s32(acc[p][t], x, pair_of(row[2 * t] + d, row[2 * t + 1] + d));
    }
  }
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int t = 0; t < 4; t += 2) {
      const int64x2_t a = vreinterpretq_s64_s32(acc[p][t]), b = vreinterpretq_s64_s32(acc[p][t + 1]);
      vst1q_s32(sums + 2 * p * kTokens + 2 * t, vreinterpretq_s32_s64(vzip1q_s64(a, b)));
      vst1q_s32(sums + (2 * p + 1) * kTokens + 2 * t, vreinterpretq_s32_s64(vzip2q_s64(a, b)));
    }
  }
}

void join_limbs(const std::int32_t* sums, float unit, float* logits) {
  TREEATTN_UNROLL
  for (int t = 0; t < kTokens; t += 4) {
    vst1q_f32(logits + t, vmulq_n_f32(neon::joined(vld1q_s32(sums + kTokens + t), vld1q_s32(sums + t)), unit));
  }
}

template <int R>
void dot_rows(const PackedHeader* header, int r, int dim, const std::byte* const* k, std::ptrdiff_t offset,
              ComingLines coming, float* logits) {
  alignas(16) std::int32_t sums[2 * R * kTokens];
  dot_limbs<R>(neon::row_limbs<kDims>(header, r, dim), dim, k, offset, coming, sums);
  TREEATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    join_limbs(sums + 2 * i * kTokens, neon::row_units(header)[r + i], logits + (r + i) * kTileTokens);
  }
}

void dot_head(const PackedHeader* header, int dim, const std::byte* const* k, std::ptrdiff_t offset, ComingLines coming,
              float* logits) {
  neon::for_each_rows(header->rows, [&]<int R>(int r) { dot_rows<R>(header, r, dim, k, offset, coming, logits); });
}

void dot(const DotArgs& args) {
  neon::for_each_key_head(args, 1, [&](const std::byte* const* k, int h, int t, ComingLines coming) {
    const std::byte* q = args.q + static_cast<std::size_t>(h) * args.q_head_bytes;
    dot_head(reinterpret_cast<const PackedHeader*>(q), args.dim, k, h * args.k.head_bytes, coming,
             args.logits + h * args.rows * kTileTokens + t);
  });
}

// Sums of a row: dim floats, then the integers of the tile at work, for every pair of dims {high d, high d + 1, low d,
// low d + 1}, zero between tiles.
int sum_floats(int dim) { return 3 * dim; }
std::int32_t* integers_of(float* sums, int dim) { return reinterpret_cast<std::int32_t*>(sums + dim); }

// The lower or upper 8 of 16 dims of 8 tokens, transposed into blocks of {dim, dim + 1} x 8 tokens.
template <class Load>
TREEATTN_FORCE_INLINE inline void transpose(const Load& load, bool upper, int8x16_t* pairs) {
  const auto zip16 = [](int8x16_t a, int8x16_t b, bool second) {
    const int16x8_t x = vreinterpretq_s16_s8(a), y = vreinterpretq_s16_s8(b);
    return vreinterpretq_s32_s16(second ? vzip2q_s16(x, y) : vzip1q_s16(x, y));
  };
  int8x16_t two[4];  // tokens {0,1} {2,3} {4,5} {6,7}
  TREEATTN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int8x16_t a = load(2 * i), b = load(2 * i + 1);
    two[i] = upper ? vzip2q_s8(a, b) : vzip1q_s8(a, b);
  }
  TREEATTN_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int32x4_t a = zip16(two[0], two[1], i == 1), b = zip16(two[2], two[3], i == 1);
    pairs[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    pairs[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}

// 8 tokens for R rows: weights as 2x8 blocks {high limbs; low limbs}.
template <int R>
void accumulate_tokens(const int8x16_t (&w)[R], const std::byte* const* rows, int dim, ComingLines coming,
                       float* sums) {
  const int stride = 3 * dim;
  for (int d = 0; d < dim; d += 16) {
    coming.fetch<16>();
    const int pairs = d + 16 <= dim ? 8 : 4;
    int8x16_t v[8];
    TREEATTN_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      v[t] = pairs == 8 ? load16(rows[t] + d) : pair_of(rows[t] + d, rows[t] + d);
    }
    int8x16_t x[8];
    const auto loaded = [&](int i) { return v[i]; };
    transpose(loaded, false, x);
    transpose(loaded, true, x + 4);
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      std::int32_t* o = integers_of(sums + i * stride, dim) + 2 * d;
      TREEATTN_UNROLL
      for (int p = 0; p < 8; ++p) {
        if (p < pairs) vst1q_s32(o + 4 * p, vmmlaq_s32(vld1q_s32(o + 4 * p), w[i], x[p]));
      }
    }
  }
}

// Weights of 8 tokens as the 2x8 block {high limbs; low limbs}.
TREEATTN_FORCE_INLINE inline int8x16_t limbs_of(const float* weights, const FixedPoint& fixed) {
  const int16x8_t steps = neon::steps_of(weights, fixed);
  return zip1_64(neon::high_limbs(steps, steps), neon::low_limbs(steps, steps));
}

template <int R>
void accumulate_rows(const AccumulateArgs& args, const FixedPoint* fixed, int t, int h, int r, ComingLines coming) {
  const std::byte* rows[kTokens];
  neon::value_rows(args, t, h, rows);
  int8x16_t w[R];
  TREEATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    float filled[kTokens];
    w[i] = limbs_of(neon::row_weights(args, t, h * args.rows + r + i, filled), fixed[r + i]);
  }
  accumulate_tokens<R>(w, rows, args.dim, coming, args.o + (h * args.rows + r) * 3 * args.dim);
}

// Four rows take 16 tokens at a time: the integers are loaded and stored half as often, which is a third of the work.
constexpr int kManyTokens = 2 * kTokens;
bool takes_many_tokens(const AccumulateArgs& args) {
  return args.rows % 4 == 0 && args.tokens % kManyTokens == 0 && args.dim % 16 == 0;
}

void accumulate_four_rows(const AccumulateArgs& args, const FixedPoint* fixed, int t, int h, int r, ComingLines first,
                          ComingLines second) {
  const std::byte* rows[2][kTokens];
  int8x16_t w[4][2];
  TREEATTN_UNROLL
  for (int j = 0; j < 2; ++j) {
    // Not by value_rows and row_weights: no token is missing here, and looking for one took 1 to 2 % of a decode.
    TREEATTN_UNROLL
    for (int i = 0; i < kTokens; ++i) rows[j][i] = args.v.rows[t + j * kTokens + i] + h * args.v.head_bytes;
    TREEATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      w[i][j] = limbs_of(args.weights + (h * args.rows + r + i) * kTileTokens + t + j * kTokens, fixed[r + i]);
    }
  }
  const int dim = args.dim;  // the integers' stores could be to args, for all the compiler knows
  float* sums = args.o + (h * args.rows + r) * 3 * dim;
  for (int d = 0; d < dim; d += 16) {
    TREEATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      (half == 0 ? first : second).fetch<16>();
      int8x16_t x[2][4];
      TREEATTN_UNROLL
      for (int j = 0; j < 2; ++j) {
        transpose([&](int i) { return load16(rows[j][i] + d); }, half == 1, x[j]);
      }
      TREEATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        std::int32_t* o = integers_of(sums + i * 3 * dim, dim) + 2 * d + 16 * half;
        TREEATTN_UNROLL
        for (int p = 0; p < 4; ++p) {
          const int32x4_t sum = vmmlaq_s32(vld1q_s32(o + 4 * p), w[i][0], x[0][p]);
          vst1q_s32(o + 4 * p, vmmlaq_s32(sum, w[i][1], x[1][p]));
        }
      }
    }
  }
}

void accumulate_fours(const AccumulateArgs& args, const FixedPoint* fixed) {
  neon::BlockStream stream(args.v, args.tokens, args.ahead, args.heads, args.dim), second = stream;
  for (int t = 0; t < args.tokens; t += kManyTokens) {
    stream.begin(t), second.begin(t + kTokens);
    for (int h = 0; h < args.heads; ++h) {
      const ComingLines coming = stream.with_head(h), then = second.with_head(h);
      for (int r = 0; r < args.rows; r += 4) accumulate_four_rows(args, fixed + h * args.rows, t, h, r, coming, then);
    }
  }
}

// The tile's integers into the floats, and zero again.
void fold_integers(const FixedPoint& fixed, float shrink, int dim, float* sums) {
  std::int32_t* integers = integers_of(sums, dim);
  const int32x4_t zero = vdupq_n_s32(0);
  for (int d = 0; d < dim; d += 4) {
    const int64x2_t a = vreinterpretq_s64_s32(vld1q_s32(integers + 2 * d));
    const int64x2_t b = vreinterpretq_s64_s32(vld1q_s32(integers + 2 * d + 4));
    const int32x4_t high = vreinterpretq_s32_s64(vzip1q_s64(a, b)), low = vreinterpretq_s32_s64(vzip2q_s64(a, b));
    neon::add_tile(high, low, fixed, &shrink, sums + d);
    vst1q_s32(integers + 2 * d, zero);
    vst1q_s32(integers + 2 * d + 4, zero);
  }
}

void accumulate(const AccumulateArgs& args) {
  const int all = args.heads * args.rows;
  FixedPoint fixed[kMaxRowsPerCall];
  for (int i = 0; i < all; ++i) fixed[i] = neon::fixed_point_of(args.weights + i * kTileTokens, args.tokens);
  if (takes_many_tokens(args)) {
    accumulate_fours(args, fixed);
  } else {
    neon::for_each_value_block(args, 1, [&]<int R>(int t, int h, int r, ComingLines coming) {
      accumulate_rows<R>(args, fixed + h * args.rows, t, h, r, coming);
    });
  }
  for (int i = 0; i < all; ++i) fold_integers(fixed[i], args.shrink[i], args.dim, args.o + i * 3 * args.dim);
}

}  // namespace

void use_neon_int8(CpuTarget& target) {
  TileOps& ops = target.ops[static_cast<int>(DType::kInt8)];
  neon::use_limbs<kDims>(ops);
  ops.dot = dot;
  ops.accumulate = accumulate;
  ops.sum_floats = sum_floats;
}

}  // namespace treeattn::kernels
