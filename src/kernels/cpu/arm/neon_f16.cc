// SPDX-License-Identifier: Apache-2.0
// float16 K and V with FMLAL, which multiplies float16 by float16 into float32: no conversion of K or V, which costs
// more than the arithmetic. The other factor must be float16 too, so
//   - a float32 or bfloat16 query row is scaled by a power of two and split into two float16 limbs (22 bits);
//   - the weights of a tile are scaled likewise. The high limb goes through FMLAL; the low one, 2^-11 of it, through
//     plain float16 multiply-adds over 8 tokens, whose rounding then is 2^-19 of the weight, or, where their sum is
//     subnormal, 2^-39 of the largest weight (product_floor).
// What overflows on the way is not finite and is computed again without limbs (CpuTarget::plain).
//
// Compiled with flags for these extensions and used only where the processor has them: no inline function of a shared
// header may be instantiated here, or the linker could give this copy to everybody.
#include <arm_neon.h>

#include "kernels/cpu/arm/neon_loops.h"
#include "kernels/cpu/arm/neon_scaling.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::ComingLines;
using neon::kTokens;

// Packed queries of a head: the limb count, the factor that undoes each row's scaling, then the limb rows [rows, limbs,
// dim] in float16.
struct PackedHeader {
  int limbs;
  int rows;
  int padding[14];
};

std::size_t scale_bytes(int rows) { return (static_cast<std::size_t>(rows) * sizeof(float) + 63) / 64 * 64; }

std::size_t packed_query_bytes(int rows, int dim) {
  return sizeof(PackedHeader) + scale_bytes(rows) + static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim) * 4;
}

const float* row_scales(const PackedHeader* header) { return reinterpret_cast<const float*>(header + 1); }
const float16_t* limb_rows(const PackedHeader* header) {
  return reinterpret_cast<const float16_t*>(reinterpret_cast<const std::byte*>(header + 1) + scale_bytes(header->rows));
}

// Where the largest number of a row is brought to, to fit float16: [2^14, 2^15).
constexpr int kLargestExponent = 14;
// The most whose inverse is a normal number. Of smaller rows limbs lose 2^-25 * 2^-126 an element, less than the bound
// allows subnormal products to (docs/exactness.md).
constexpr int kMostScaling = 126;

void pack_queries(const float* q, DType q_dtype, int rows, int dim, void* packed) {
  PackedHeader* header = static_cast<PackedHeader*>(packed);
  header->limbs = q_dtype == DType::kFloat16 ? 1 : 2;
  header->rows = rows;
  float* scales = const_cast<float*>(row_scales(header));
  float16_t* limbs = const_cast<float16_t*>(limb_rows(header));
  for (int r = 0; r < rows; ++r) {
    const float largest = neon::largest_of(q + r * dim, dim);
    const int k = header->limbs == 1 ? 0 : neon::scaling_exponent(largest, kLargestExponent, -100, kMostScaling);
    scales[r] = neon::power_of_two(-k);
    for (int d = 0; d < dim; ++d) {
      const float x = q[r * dim + d] * neon::power_of_two(k);
      const float16_t high = static_cast<float16_t>(x);
      const float rest = x - static_cast<float>(high);
      limbs[r * header->limbs * dim + d] = high;
      if (header->limbs == 2) limbs[(r * 2 + 1) * dim + d] = static_cast<float16_t>(rest == rest ? rest : 0.0f);
    }
  }
}

float16x8_t load8(const std::byte* p) {
  return vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const std::uint16_t*>(p)));
}

// R limb rows against T tokens of a block, from kFirst on. A single row has two sums per token: one chain each cannot
// keep the pipes busy.
template <int R, int T, int kFirst>
void dot_rows(const float16_t* q, int dim, const std::byte* const* k, std::ptrdiff_t offset, ComingLines coming,
              float* sums) {
  constexpr int S = R == 1 ? 2 : 1;
  float32x4_t acc[R][T][S];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int t = 0; t < T; ++t) {
      TREEATTN_UNROLL
      for (int s = 0; s < S; ++s) acc[r][t][s] = vdupq_n_f32(0.0f);
    }
  }
  for (int d = 0; d < dim; d += 8) {
    if constexpr (kFirst == 0) coming.fetch<16>();
    float16x8_t x[R];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) x[r] = vld1q_f16(q + r * dim + d);
    TREEATTN_UNROLL
    for (int t = 0; t < T; ++t) {
      const float16x8_t y = load8(k[kFirst + t] + offset + 2 * d);
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) {
        acc[r][t][0] = vfmlalq_low_f16(acc[r][t][0], x[r], y);
        acc[r][t][S - 1] = vfmlalq_high_f16(acc[r][t][S - 1], x[r], y);
      }
    }
  }
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int t = 0; t < T; t += 4) {
      float32x4_t a[4];
      TREEATTN_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = S == 2 ? vaddq_f32(acc[r][t + i][0], acc[r][t + i][S - 1]) : acc[r][t + i][0];
      vst1q_f32(sums + r * kTileTokens + kFirst + t, vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])));
    }
  }
}

template <int R>
void dot_tokens(const float16_t* q, int dim, const std::byte* const* k, std::ptrdiff_t offset, ComingLines coming,
                float* sums) {
  if constexpr (R == 1) {
    dot_rows<R, kTokens, 0>(q, dim, k, offset, coming, sums);
  } else {
    dot_rows<R, 4, 0>(q, dim, k, offset, coming, sums);
    dot_rows<R, 4, 4>(q, dim, k, offset, coming, sums);
  }
}

void dot_head(const PackedHeader* header, int dim, const std::byte* const* k, std::ptrdiff_t offset, ComingLines coming,
              float* logits) {
  const float16_t* q = limb_rows(header);
  if (header->limbs == 1) {
    return neon::for_each_rows(header->rows, [&]<int R>(int r) {
      dot_tokens<R>(q + r * dim, dim, k, offset, coming, logits + r * kTileTokens);
    });
  }
  alignas(16) float sums[4 * kTileTokens];
  for (int r = 0; r < header->rows; r += 2) {
    const int rows = r + 1 < header->rows ? 2 : 1;
    if (rows == 2) {
      dot_tokens<4>(q + 2 * r * dim, dim, k, offset, coming, sums);
    } else {
      dot_tokens<2>(q + 2 * r * dim, dim, k, offset, coming, sums);
    }
    for (int i = 0; i < rows; ++i) {
      TREEATTN_UNROLL
      for (int t = 0; t < kTokens; t += 4) {
        const float* limb = sums + 2 * i * kTileTokens + t;
        const float32x4_t sum = vaddq_f32(vld1q_f32(limb + kTileTokens), vld1q_f32(limb));
        vst1q_f32(logits + (r + i) * kTileTokens + t, vmulq_n_f32(sum, row_scales(header)[r + i]));
      }
    }
  }
}

void dot(const DotArgs& args) {
  neon::for_each_key_head(args, 2, [&](const std::byte* const* k, int h, int t, ComingLines coming) {
    const std::byte* q = args.q + static_cast<std::size_t>(h) * args.q_head_bytes;
    dot_head(reinterpret_cast<const PackedHeader*>(q), args.dim, k, h * args.k.head_bytes, coming,
             args.logits + h * args.rows * kTileTokens + t);
  });
}

// acc += {low half, high half} of v * w[lane].
#define TREEATTN_FMLAL(lane)                                      \
  low[i] = vfmlalq_laneq_low_f16(low[i], v[lane], w[i], lane);    \
  high[i] = vfmlalq_laneq_high_f16(high[i], v[lane], w[i], lane); \
  rest[i] = vfmaq_laneq_f16(rest[i], v[lane], w_rest[i], lane)

// 8 tokens for R rows of one head: weights as limbs, sums scaled like the weights.
template <int R>
void accumulate_tokens(const float16x8_t (&w)[R], const float16x8_t (&w_rest)[R], const std::byte* const* rows, int dim,
                       ComingLines coming, float* sums) {
  const float16x8_t one = vdupq_n_f16(1.0f);
  for (int d = 0; d < dim; d += 8) {
    coming.fetch<16>();
    float16x8_t v[kTokens];
    TREEATTN_UNROLL
    for (int t = 0; t < kTokens; ++t) v[t] = load8(rows[t] + 2 * d);
    float32x4_t low[R], high[R];
    float16x8_t rest[R];
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      float* o = sums + i * dim + d;
      low[i] = vld1q_f32(o);
      high[i] = vld1q_f32(o + 4);
      rest[i] = vdupq_n_f16(0.0f);
      TREEATTN_FMLAL(0);
      TREEATTN_FMLAL(1);
      TREEATTN_FMLAL(2);
      TREEATTN_FMLAL(3);
      TREEATTN_FMLAL(4);
      TREEATTN_FMLAL(5);
      TREEATTN_FMLAL(6);
      TREEATTN_FMLAL(7);
      vst1q_f32(o, vfmlalq_low_f16(low[i], rest[i], one));
      vst1q_f32(o + 4, vfmlalq_high_f16(high[i], rest[i], one));
    }
  }
}
#undef TREEATTN_FMLAL

// Shared by four rows, converting the values costs less than a second limb for every row. A row of such four that is
// given alone is computed in the same way: it must have the same bits.
bool is_one_of_four(int row, int head_rows) { return row / 4 < head_rows / 4; }

template <int R>
void accumulate_converted(const float32x4_t (&w)[R][2], const std::byte* const* rows, int dim, ComingLines coming,
                          float* sums) {
  for (int d = 0; d < dim; d += 8) {
    coming.fetch<16>();
    float32x4_t low[R], high[R];
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      low[i] = vld1q_f32(sums + i * dim + d);
      high[i] = vld1q_f32(sums + i * dim + d + 4);
    }
#define TREEATTN_TOKEN(t)                                                 \
  {                                                                       \
    const float16x8_t v = load8(rows[t] + 2 * d);                         \
    const float32x4_t v_low = vcvt_f32_f16(vget_low_f16(v));              \
    const float32x4_t v_high = vcvt_high_f32_f16(v);                      \
    TREEATTN_UNROLL                                                       \
    for (int i = 0; i < R; ++i) {                                         \
      low[i] = vfmaq_laneq_f32(low[i], v_low, w[i][(t) / 4], (t) % 4);    \
      high[i] = vfmaq_laneq_f32(high[i], v_high, w[i][(t) / 4], (t) % 4); \
    }                                                                     \
  }
    TREEATTN_TOKEN(0)
    TREEATTN_TOKEN(1)
    TREEATTN_TOKEN(2)
    TREEATTN_TOKEN(3)
    TREEATTN_TOKEN(4)
    TREEATTN_TOKEN(5)
    TREEATTN_TOKEN(6)
    TREEATTN_TOKEN(7)
#undef TREEATTN_TOKEN
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      vst1q_f32(sums + i * dim + d, low[i]);
      vst1q_f32(sums + i * dim + d + 4, high[i]);
    }
  }
}

// Tokens [t, t + 8) of R rows; scale_up of the head's rows.
template <int R>
void accumulate_rows(const AccumulateArgs& args, const float* scale_up, int t, int h, int r, ComingLines coming) {
  const std::byte* rows[kTokens];
  neon::value_rows(args, t, h, rows);
  float32x4_t w[R][2];
  TREEATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    float filled[kTokens];
    const float* from = neon::row_weights(args, t, h * args.rows + r + i, filled);
    w[i][0] = vmulq_n_f32(vld1q_f32(from), scale_up[r + i]);
    w[i][1] = vmulq_n_f32(vld1q_f32(from + 4), scale_up[r + i]);
  }
  float* sums = args.o + (h * args.rows + r) * args.dim;
  if (R == 4 || (R == 1 && is_one_of_four(args.row + r, args.head_rows))) {
    return accumulate_converted<R>(w, rows, args.dim, coming, sums);
  }
  if constexpr (R != 4) {
    float16x8_t high[R], rest[R];
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const float16x4_t a = vcvt_f16_f32(w[i][0]), b = vcvt_f16_f32(w[i][1]);
      high[i] = vcombine_f16(a, b);
      rest[i] = vcombine_f16(vcvt_f16_f32(vsubq_f32(w[i][0], vcvt_f32_f16(a))),
                             vcvt_f16_f32(vsubq_f32(w[i][1], vcvt_f32_f16(b))));
    }
    accumulate_tokens<R>(high, rest, rows, args.dim, coming, sums);
  }
}

void multiply(float factor, int dim, float* sums) {
  if (factor == 1.0f) return;
  for (int d = 0; d < dim; d += 4) vst1q_f32(sums + d, vmulq_n_f32(vld1q_f32(sums + d), factor));
}

// The power of two that brings the row's weights to where float16 is finest. Bounded so that the sums, too, fit: below
// 2^-26 of the largest weight so far there is nothing left to lose.
float scale_of(const float* weights, int tokens) {
  float32x4_t largest = vdupq_n_f32(0.0f);
  int t = 0;
  for (; t + 4 <= tokens; t += 4) largest = vmaxq_f32(largest, vabsq_f32(vld1q_f32(weights + t)));
  float m = vmaxvq_f32(largest);
  for (; t < tokens; ++t) m = __builtin_fabsf(weights[t]) > m ? __builtin_fabsf(weights[t]) : m;
  return neon::power_of_two(neon::scaling_exponent(m, kLargestExponent, -40, 40));
}

void accumulate(const AccumulateArgs& args) {
  const int all = args.heads * args.rows;
  float scale_up[kMaxRowsPerCall];
  for (int i = 0; i < all; ++i) {
    scale_up[i] = scale_of(args.weights + i * kTileTokens, args.tokens);
    multiply(args.shrink[i] * scale_up[i], args.dim, args.o + i * args.dim);
  }
  neon::for_each_value_block(args, 2, [&]<int R>(int t, int h, int r, ComingLines coming) {
    accumulate_rows<R>(args, scale_up + h * args.rows, t, h, r, coming);
  });
  for (int i = 0; i < all; ++i) multiply(1.0f / scale_up[i], args.dim, args.o + i * args.dim);
}

}  // namespace

void use_neon_f16(CpuTarget& target) {
  TileOps& ops = target.ops[static_cast<int>(DType::kFloat16)];
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries;
  ops.dot = dot;
  ops.accumulate = accumulate;
  ops.weight_error = 0x1p-18;
  ops.query_error = 0x1p-22;
  ops.weight_floor = 0x1p-37;
  ops.product_floor = 0x1p-39;
  ops.additions_per_key = 9.0 / 8;
  ops.streams = 1;
}

}  // namespace treeattn::kernels
