// SPDX-License-Identifier: Apache-2.0
// bfloat16 K and V with the BF16 matrix instruction of Armv8.6: BFMMLA multiplies a 2x4 by a 4x2 block into 2x2 floats,
// 16 multiply-adds in the place of 4. It wants both factors in bfloat16, so
//   - a query row that was float16 or float32 is split into 2 or 3 bfloat16 limbs whose sum is exact;
//   - a weight is split into 2 limbs, high and low, which leaves a relative error of 2^-17 (weight_error below).
// The instruction rounds to odd, hence a unit roundoff of 2^-23. Both are part of the error bound (docs/exactness.md).
//
// Compiled with flags for these extensions and used only where the processor has them: no inline function of a shared
// header may be instantiated here, or the linker could give this copy to everybody.
#include "kernels/cpu/arm/neon_bf16.h"

#include "kernels/cpu/arm/neon_loops.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::ComingLines;
using neon::kTokens;
using neon::load8;
using neon::Transposed;
using neon::WeightLimbs;
using neon::zip1_64;
using neon::zip2_64;

// Packed queries: a header word with the limb count, then for every pair of limb rows and every 4 dims the 2x4 block
// that BFMMLA takes: [pair][dim / 4][row of the pair][4]. A single limb row without a partner lies as it is.
struct PackedHeader {
  int limbs;
  int pairs;
  int padding[14];
};

std::size_t packed_query_bytes(int rows, int dim) {
  return sizeof(PackedHeader) + static_cast<std::size_t>((rows * 3 + 1) / 2) * static_cast<std::size_t>(dim) * 4;
}

// Rows that are bfloat16 already: their upper halves.
void pack_narrow(const float* q, int rows, int dim, std::uint16_t* out) {
  for (int row = 0; row < rows; ++row) {
    const bool single = rows % 2 == 1 && row == rows - 1;  // no partner: see dot_single
    std::uint16_t* to = single ? out + row * dim : out + row / 2 * dim * 2 + row % 2 * 4;
    const int step = single ? 4 : 8;
    for (int d = 0; d < dim; d += 4, to += step) {
      vst1_u16(to, vshrn_n_u32(vreinterpretq_u32_f32(vld1q_f32(q + row * dim + d)), 16));
    }
  }
}

// Limb row i belongs to query row i / limbs.
void pack_queries(const float* q, DType q_dtype, int rows, int dim, void* packed) {
  PackedHeader* header = static_cast<PackedHeader*>(packed);
  header->limbs = bfloat16_limbs_of(q_dtype);
  header->pairs = (rows * header->limbs + 1) / 2;
  std::uint16_t* out = reinterpret_cast<std::uint16_t*>(header + 1);
  if (header->limbs == 1) return pack_narrow(q, rows, dim, out);
  for (int pair = 0; pair < header->pairs; ++pair) {
    TREEATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int limb_row = 2 * pair + half;
      for (int d = 0; d < dim; d += 4) {
        uint16x4_t bits = vdup_n_u16(0);
        if (limb_row < rows * header->limbs) {
          float32x4_t x = vld1q_f32(q + limb_row / header->limbs * dim + d);
          for (int limb = 0; limb <= limb_row % header->limbs; ++limb) bits = neon::take_limb(x);
        }
        vst1_u16(out + (pair * dim + d) * 2 + half * 4, bits);
      }
    }
  }
}

// P pairs of limb rows against 8 tokens: 4 token pairs, each 2x2 results per pair of rows.
template <int P>
void dot_pairs(const std::uint16_t* q, int dim, const std::byte* const* k, std::ptrdiff_t offset, ComingLines coming,
               float* sums) {
  float32x4_t acc[P][4];
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int t = 0; t < 4; ++t) acc[p][t] = vdupq_n_f32(0.0f);
  }
  const std::byte* row[8];
  TREEATTN_UNROLL
  for (int t = 0; t < 8; ++t) row[t] = k[t] + offset;
  for (int d = 0; d < dim; d += 8) {
    coming.fetch<16>();
    bfloat16x8_t low[4], high[4];
    TREEATTN_UNROLL
    for (int t = 0; t < 4; ++t) {
      const bfloat16x8_t a = load8(row[2 * t] + 2 * d);
      const bfloat16x8_t b = load8(row[2 * t + 1] + 2 * d);
      low[t] = zip1_64(a, b);
      high[t] = zip2_64(a, b);
    }
    TREEATTN_UNROLL
    for (int p = 0; p < P; ++p) {
      const std::uint16_t* block = q + (p * dim + d) * 2;
      const bfloat16x8_t q_low = vreinterpretq_bf16_u16(vld1q_u16(block));
      const bfloat16x8_t q_high = vreinterpretq_bf16_u16(vld1q_u16(block + 8));
      TREEATTN_UNROLL
      for (int t = 0; t < 4; ++t) acc[p][t] = vbfmmlaq_f32(acc[p][t], q_low, low[t]);
      TREEATTN_UNROLL
      for (int t = 0; t < 4; ++t) acc[p][t] = vbfmmlaq_f32(acc[p][t], q_high, high[t]);
    }
  }
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    float* out = sums + 2 * p * kTileTokens;
    TREEATTN_UNROLL
    for (int t = 0; t < 4; t += 2) {
      vst1q_f32(out + 2 * t, neon::first_row(acc[p][t], acc[p][t + 1]));
      vst1q_f32(out + kTileTokens + 2 * t, neon::second_row(acc[p][t], acc[p][t + 1]));
    }
  }
}

// One row, packed as it is, against 8 tokens by BFDOT: no partner row, so the pairing of BFMMLA would waste half of it.
// Four tokens at a time, each with two sums, as four chains cannot keep the pipes busy.
void dot_single(const std::uint16_t* q, int dim, const std::byte* const* k, std::ptrdiff_t offset, ComingLines coming,
                float* sums) {
  constexpr int T = 4;
  const std::byte* x = reinterpret_cast<const std::byte*>(q);
  TREEATTN_UNROLL
  for (int first = 0; first < kTokens; first += T) {
    float32x4_t acc[T][2];
    const std::byte* row[T];
    TREEATTN_UNROLL
    for (int t = 0; t < T; ++t) {
      acc[t][0] = acc[t][1] = vdupq_n_f32(0.0f);
      row[t] = k[first + t] + offset;
    }
    int d = 0;
    for (; d + 16 <= dim; d += 16) {
      coming.fetch<16>();
      const bfloat16x8_t x0 = load8(x + 2 * d), x1 = load8(x + 2 * d + 16);
      TREEATTN_UNROLL
      for (int t = 0; t < T; ++t) {
        acc[t][0] = vbfdotq_f32(acc[t][0], x0, load8(row[t] + 2 * d));
        acc[t][1] = vbfdotq_f32(acc[t][1], x1, load8(row[t] + 2 * d + 16));
      }
    }
    if (d < dim) {
      TREEATTN_UNROLL
      for (int t = 0; t < T; ++t) acc[t][0] = vbfdotq_f32(acc[t][0], load8(x + 2 * d), load8(row[t] + 2 * d));
    }
    const auto sum = [&](int t) { return vaddq_f32(acc[t][0], acc[t][1]); };
    vst1q_f32(sums + first, vpaddq_f32(vpaddq_f32(sum(0), sum(1)), vpaddq_f32(sum(2), sum(3))));
  }
}

// All limb rows of one head against 8 tokens. logits row stride kTileTokens.
void dot_head(const PackedHeader* header, int rows, int dim, const std::byte* const* k, std::ptrdiff_t offset,
              ComingLines coming, float* logits) {
  const std::uint16_t* q = reinterpret_cast<const std::uint16_t*>(header + 1);
  const auto pair = [&](int p) { return q + p * dim * 2; };
  if (header->limbs == 1) {
    const int whole = rows / 2;
    int p = 0;
    for (; p + 4 <= whole; p += 4) dot_pairs<4>(pair(p), dim, k, offset, coming, logits + 2 * p * kTileTokens);
    for (; p + 2 <= whole; p += 2) dot_pairs<2>(pair(p), dim, k, offset, coming, logits + 2 * p * kTileTokens);
    for (; p < whole; ++p) dot_pairs<1>(pair(p), dim, k, offset, coming, logits + 2 * p * kTileTokens);
    if (p < header->pairs) dot_single(pair(p), dim, k, offset, coming, logits + 2 * p * kTileTokens);
    return;
  }
  // Two query rows have a whole number of limb pairs: 2 or 3.
  alignas(16) float sums[6 * kTileTokens];
  const int limbs = header->limbs;
  for (int r = 0; r < rows; r += 2) {
    const int first = r * limbs / 2;
    const int pairs = (r + 1 < rows ? 2 * limbs : limbs + 1) / 2;
    if (pairs == 3) {
      dot_pairs<3>(pair(first), dim, k, offset, coming, sums);
    } else if (pairs == 2) {
      dot_pairs<2>(pair(first), dim, k, offset, coming, sums);
    } else {
      dot_pairs<1>(pair(first), dim, k, offset, coming, sums);
    }
    for (int i = r; i < r + 2 && i < rows; ++i) {
      const float* limb = sums + (i - r) * limbs * kTileTokens;
      for (int t = 0; t < 8; t += 4) {
        float32x4_t sum = vld1q_f32(limb + (limbs - 1) * kTileTokens + t);  // smallest first
        for (int j = limbs - 2; j >= 0; --j) sum = vaddq_f32(sum, vld1q_f32(limb + j * kTileTokens + t));
        vst1q_f32(logits + i * kTileTokens + t, sum);
      }
    }
  }
}

void dot(const DotArgs& args) {
  neon::for_each_key_head(args, 2, [&](const std::byte* const* k, int h, int t, ComingLines coming) {
    const std::byte* q = args.q + static_cast<std::size_t>(h) * args.q_head_bytes;
    dot_head(reinterpret_cast<const PackedHeader*>(q), args.rows, args.dim, k, h * args.k.head_bytes, coming,
             args.logits + h * args.rows * kTileTokens + t);
  });
}

// Weights of 4 tokens as the 2x4 block {high limbs; low limbs}.
bfloat16x8_t in_one_block(float32x4_t w) {
  const bfloat16x4_t high = vcvt_bf16_f32(w);
  const float32x4_t rest = vsubq_f32(w, vcvt_f32_bf16(high));
  return vcvtq_high_bf16_f32(vcombine_bf16(high, high), rest);
}

// Two rows of a head share their sums: for every pair of dims {row d, row d + 1, next row d, next row d + 1}, as BFMMLA
// leaves them, in the first one's place. Both limbs of a weight go into one sum. A last row without a partner has its
// limbs for the two rows, so that no product is wasted: {high d, high d + 1, low d, low d + 1}.
int sum_floats(int dim) { return 2 * dim; }
bool has_partner(int row, int head_rows) { return row / 2 < head_rows / 2; }
// From a row's own place to its first sum among those of a pair.
std::ptrdiff_t to_first_sum(int row, int dim) { return row % 2 * (2 - 2 * dim); }

void unpack_sums(const float* sums, int row, int head_rows, int dim, float* out) {
  if (has_partner(row, head_rows)) {
    const float* own = sums + to_first_sum(row, dim);
    for (int d = 0; d < dim; d += 2) vst1_f32(out + d, vld1_f32(own + 2 * d));
    return;
  }
  for (int d = 0; d < dim; d += 2) {
    const float32x4_t both = vld1q_f32(sums + 2 * d);
    vst1_f32(out + d, vadd_f32(vget_low_f32(both), vget_high_f32(both)));
  }
}

// The weights of 8 tokens for P pairs of rows, four tokens at a time, a block for every limb; or those of one row
// alone, whose limbs share a block.
template <int P, int kLimbs>
struct Weights {
  bfloat16x8_t blocks[P][2][kLimbs];
};

template <int P>
TREEATTN_FORCE_INLINE inline Weights<P, 2> pair_weights(const float* const (&rows)[2 * P]) {
  Weights<P, 2> out;
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int j = 0; j < 2; ++j) {
      const WeightLimbs limbs = neon::split_weights(vld1q_f32(rows[2 * p] + 4 * j), vld1q_f32(rows[2 * p + 1] + 4 * j));
      out.blocks[p][j][0] = limbs.high, out.blocks[p][j][1] = limbs.low;
    }
  }
  return out;
}

// Keeps the compiler from moving what gave x to where x is used.
TREEATTN_FORCE_INLINE inline void pin(bfloat16x8_t& x) { asm volatile("" : "+w"(x)); }

// 8 tokens of `heads` heads, of each P pairs of rows, or one row alone (kLimbs is 1). Values are loaded while those
// loaded before are turned, and turned while those turned before are multiplied, from one head to the next without a
// pause: instructions that wait for a load soon fill the queue before the pipes, and nothing else is taken in.
// weights_of(head) are in the head's order; v [8] rows of the first head, sums of a pair are 4 * dim apart.
template <int P, int kLimbs, class WeightsOf>
TREEATTN_FORCE_INLINE inline void accumulate_heads(const AccumulateArgs& args, int first_head, int heads,
                                                   const std::byte* (&v)[kTokens], const neon::BlockStream& stream,
                                                   const WeightsOf& weights_of, float* sums) {
  const int dim = args.dim;
  Transposed now = neon::transposed(neon::load_rows(v, 0));
  neon::Rows4 loaded = neon::load_rows(v + 4, 0);
  for (int h = 0; h < heads; ++h) {
    ComingLines coming = stream.with_head(first_head + h);
    const Weights<P, kLimbs> weights = weights_of(first_head + h);
    const auto step = [&](std::ptrdiff_t d, std::ptrdiff_t then) TREEATTN_FORCE_INLINE {
      coming.fetch<16>();
      float32x4_t a[P][4];
      TREEATTN_UNROLL
      for (int p = 0; p < P; ++p) {
        TREEATTN_UNROLL
        for (int i = 0; i < 4; ++i) a[p][i] = vld1q_f32(sums + p * 4 * dim + 2 * d + 4 * i);
      }
      TREEATTN_UNROLL
      for (int j = 0; j < 2; ++j) {
        Transposed next;
        TREEATTN_UNROLL
        for (int n = 0; n < P * kLimbs; ++n) {
          const int p = n % P;
          TREEATTN_UNROLL
          for (int i = 0; i < 4; ++i) a[p][i] = vbfmmlaq_f32(a[p][i], weights.blocks[p][j][n / P], now.dims[i]);
          TREEATTN_UNROLL
          for (int i = 0; i < 4; ++i) neon::settle(a[p][i]);
          if (n == 0) {
            next = neon::transposed(loaded);
            TREEATTN_UNROLL
            for (int i = 0; i < 4; ++i) pin(next.dims[i]);
            loaded = neon::load_rows(v + 4 * j, then);
          }
        }
        now = next;
      }
      TREEATTN_UNROLL
      for (int p = 0; p < P; ++p) {
        TREEATTN_UNROLL
        for (int i = 0; i < 4; ++i) vst1q_f32(sums + p * 4 * dim + 2 * d + 4 * i, a[p][i]);
      }
    };
    std::ptrdiff_t d = 0;
    for (; d + 8 < dim; d += 8) step(d, 2 * (d + 8));
    const std::ptrdiff_t to_next_head = h + 1 < heads ? args.v.head_bytes : 0;
    step(d, to_next_head);
    TREEATTN_UNROLL
    for (int i = 0; i < kTokens; ++i) v[i] += to_next_head;
    sums += args.rows * 2 * dim;
  }
}

// R rows of every head, in pairs if there are more than one. A row whose partner is not given has weights of 0 beside
// its own: 0 * inf shows there, but then inf shows here, and the leaf is computed again anyway.
template <int R>
void accumulate_rows(const AccumulateArgs& args, int t, int first_head, int heads, int r,
                     const neon::BlockStream& stream) {
  const std::byte* v[kTokens];
  neon::value_rows(args, t, first_head, v);
  float* sums = args.o + (first_head * args.rows + r) * 2 * args.dim;
  if constexpr (R == 1) {
    const int row = args.row + r;
    if (!has_partner(row, args.head_rows)) {
      const auto alone = [&](int h) TREEATTN_FORCE_INLINE {
        float filled[kTokens];
        const float* w = neon::row_weights(args, t, h * args.rows + r, filled);
        return Weights<1, 1>{{{{in_one_block(vld1q_f32(w))}, {in_one_block(vld1q_f32(w + 4))}}}};
      };
      return accumulate_heads<1, 1>(args, first_head, heads, v, stream, alone, sums);
    }
    const auto beside_none = [&](int h) TREEATTN_FORCE_INLINE {
      static constexpr float kNone[kTokens] = {};
      float filled[kTokens];
      const float* w = neon::row_weights(args, t, h * args.rows + r, filled);
      return row % 2 == 0 ? pair_weights<1>({w, kNone}) : pair_weights<1>({kNone, w});
    };
    accumulate_heads<1, 2>(args, first_head, heads, v, stream, beside_none, sums - row % 2 * 2 * args.dim);
  } else {
    const auto pairs = [&](int h) TREEATTN_FORCE_INLINE {
      float filled[R][kTokens];
      const float* w[R];
      TREEATTN_UNROLL
      for (int i = 0; i < R; ++i) w[i] = neon::row_weights(args, t, h * args.rows + r + i, filled[i]);
      return pair_weights<R / 2>(w);
    };
    accumulate_heads<R / 2, 2>(args, first_head, heads, v, stream, pairs, sums);
  }
}

// Row i of those given, of all heads.
void shrink_sums(const AccumulateArgs& args, int i) {
  const float shrink = args.shrink[i];
  if (shrink == 1.0f) return;
  const int row = args.row + i % args.rows;
  float* sums = args.o + i * 2 * args.dim;
  if (has_partner(row, args.head_rows)) {
    float* own = sums + to_first_sum(row, args.dim);
    for (int d = 0; d < 2 * args.dim; d += 4) vst1_f32(own + d, vmul_n_f32(vld1_f32(own + d), shrink));
    return;
  }
  for (int d = 0; d < 2 * args.dim; d += 4) vst1q_f32(sums + d, vmulq_n_f32(vld1q_f32(sums + d), shrink));
}

void accumulate(const AccumulateArgs& args) {
  for (int i = 0; i < args.heads * args.rows; ++i) shrink_sums(args, i);
  neon::BlockStream stream(args.v, args.tokens, args.ahead, args.heads, 2 * args.dim);
  for (int t = 0; t < args.tokens; t += kTokens) {
    stream.begin(t);
    // The rows that stand for missing tokens do not go on from head to head.
    const int at_once = t + kTokens <= args.tokens ? args.heads : 1;
    for (int h = 0; h < args.heads; h += at_once) {
      neon::for_each_rows(args.rows, [&]<int R>(int r) { accumulate_rows<R>(args, t, h, at_once, r, stream); });
    }
  }
}

}  // namespace

void use_neon_bf16(CpuTarget& target) {
  TileOps& ops = target.ops[static_cast<int>(DType::kBFloat16)];
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries;
  ops.dot = dot;
  ops.accumulate = accumulate;
  ops.sum_floats = sum_floats;
  ops.unpack_sums = unpack_sums;
  ops.unit_roundoff = 0x1p-23;
  ops.weight_error = 0x1p-17;
  ops.logit_floor = 0x1p-40;
  ops.streams = 1;
}

}  // namespace treeattn::kernels
