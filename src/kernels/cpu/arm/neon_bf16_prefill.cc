// SPDX-License-Identifier: Apache-2.0
// bfloat16 K and V with BFMMLA where many query rows share a KV head. The limbs and their errors are those of
// neon_bf16.cc; the work is laid out for the other limit, arithmetic: each tile is packed once into the blocks that
// BFMMLA takes, and then 8 rows by 8 tokens (8 columns) at a time are summed in 16 registers, with nothing but loads
// between the products.
//
// The limbs of a query row or of a weight go into one sum. That needs no more roundings than the bound has: BFMMLA adds
// its products in twos, so 64 tokens in two limbs are 64 additions, and those of all limbs but a query's first, which
// comes last, are to sums 2^-7 as large.
#include "kernels/cpu/arm/neon_bf16.h"

#include "kernels/cpu/arm/neon_loops.h"
#include "kernels/cpu/fetch_share.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::kTokens;
using neon::load8;

using Words = std::uint16_t;

constexpr int kRows = 8;     // of queries, worked on together
constexpr int kColumns = 8;  // of values
constexpr int kPairs = 4;    // of rows, tokens or columns
constexpr int kBlock = 8;    // words of a 2x4 block
constexpr int kStep = kPairs * kBlock;
constexpr int kTokenSteps = kTileTokens / 4;

static_assert(kRows == 2 * kPairs && kTokens == 2 * kPairs && kColumns == 2 * kPairs);

// Packed queries: a header with the limb count, then [8 rows][limb][dim / 4][pair][row of the pair][4]. Missing rows
// are zeros.
struct PackedHeader {
  int limbs;
  int padding[15];
};

std::size_t packed_query_bytes(int rows, int dim) {
  const std::size_t blocks = static_cast<std::size_t>((rows + kRows - 1) / kRows);
  return sizeof(PackedHeader) + blocks * kRows * 3 * static_cast<std::size_t>(dim) * sizeof(Words);
}

template <int kLimbs>
void pack_rows(const float* q, int rows, int dim, Words* out) {
  for (int block = 0; block < rows; block += kRows, out += kRows * kLimbs * dim) {
    for (int d = 0; d < dim; d += 4) {
      for (int i = 0; i < kRows; ++i) {
        float32x4_t x = block + i < rows ? vld1q_f32(q + (block + i) * dim + d) : vdupq_n_f32(0.0f);
        Words* to = out + d / 4 * kStep + i * 4;
        TREEATTN_UNROLL
        for (int limb = 0; limb < kLimbs; ++limb) vst1_u16(to + limb * kRows * dim, neon::take_limb(x));
      }
    }
  }
}

void pack_queries(const float* q, DType q_dtype, int rows, int dim, void* packed) {
  PackedHeader* header = static_cast<PackedHeader*>(packed);
  header->limbs = bfloat16_limbs_of(q_dtype);
  const auto pack = header->limbs == 1 ? pack_rows<1> : header->limbs == 2 ? pack_rows<2> : pack_rows<3>;
  pack(q, rows, dim, reinterpret_cast<Words*>(header + 1));
}

void store_block(bfloat16x8_t block, Words* out) { vst1q_u16(out, vreinterpretq_u16_bf16(block)); }

// Keys become [8 tokens][dim / 4][pair][token of the pair][4].
void pack_keys(const DotArgs& args, Words* out) {
  neon::for_each_key_block(args, [&](const std::byte* const* k, int t) {
    TREEATTN_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      Words* to = out + t * args.dim + p * kBlock;
      for (int d = 0; d < args.dim; d += 8, to += 2 * kStep) {
        const bfloat16x8_t a = load8(k[2 * p] + 2 * d), b = load8(k[2 * p + 1] + 2 * d);
        store_block(neon::zip1_64(a, b), to);
        store_block(neon::zip2_64(a, b), to + kStep);
      }
    }
  });
}

// 2x2 sums of pairs by pairs.
struct Sums {
  float32x4_t at[kPairs][kPairs];

  TREEATTN_FORCE_INLINE Sums() {
    TREEATTN_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      TREEATTN_UNROLL
      for (int j = 0; j < kPairs; ++j) at[p][j] = vdupq_n_f32(0.0f);
    }
  }

  // Four blocks of rows, as they follow each other, times four blocks of tokens or columns.
  TREEATTN_FORCE_INLINE void add(const Words* rows, const bfloat16x8_t (&blocks)[kPairs]) {
    TREEATTN_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      const bfloat16x8_t row_pair = load8(rows + p * kBlock);
      TREEATTN_UNROLL
      for (int j = 0; j < kPairs; ++j) at[p][j] = vbfmmlaq_f32(at[p][j], row_pair, blocks[j]);
    }
  }

  // body(row, first of four elements, these) for the first `rows` rows.
  template <class Body>
  TREEATTN_FORCE_INLINE void for_each_row(int rows, const Body& body) const {
    TREEATTN_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      if (2 * p < rows) {
        body(2 * p, 0, neon::first_row(at[p][0], at[p][1]));
        body(2 * p, 4, neon::first_row(at[p][2], at[p][3]));
      }
      if (2 * p + 1 < rows) {
        body(2 * p + 1, 0, neon::second_row(at[p][0], at[p][1]));
        body(2 * p + 1, 4, neon::second_row(at[p][2], at[p][3]));
      }
    }
  }
};

TREEATTN_FORCE_INLINE inline void load_step(const Words* from, bfloat16x8_t (&blocks)[kPairs]) {
  TREEATTN_UNROLL
  for (int j = 0; j < kPairs; ++j) blocks[j] = load8(from + j * kBlock);
}

// 8 rows against 8 tokens; the limb that counts most comes last.
void dot_block(const Words* q, int limbs, const Words* keys, int dim, int rows, float* logits) {
  Sums sums;
  for (int limb = limbs - 1; limb >= 0; --limb) {
    const Words* x = q + limb * kRows * dim;
    const Words* k = keys;
    for (int d = 0; d < dim; d += 4, x += kStep, k += kStep) {
      bfloat16x8_t blocks[kPairs];
      load_step(k, blocks);
      sums.add(x, blocks);
    }
  }
  sums.for_each_row(rows, [&](int row, int t, float32x4_t x) { vst1q_f32(logits + row * kTileTokens + t, x); });
}

void dot(const DotArgs& args) {
  alignas(64) Words keys[kTileTokens * kMaxHeadDim];
  pack_keys(args, keys);
  const PackedHeader* header = reinterpret_cast<const PackedHeader*>(args.q);
  const Words* q = reinterpret_cast<const Words*>(header + 1) + args.first_row * header->limbs * args.dim;
  for (int r = 0; r < args.rows; r += kRows, q += kRows * header->limbs * args.dim) {
    fetch_share<kRows>(args.ahead, r, args.rows);
    for (int t = 0; t < args.tokens; t += kTokens) {
      dot_block(q, header->limbs, keys + t * args.dim, args.dim, args.rows - r, args.logits + r * kTileTokens + t);
    }
  }
}

// Values become [8 columns][token / 4][pair][column of the pair][4 tokens].
void pack_values(const AccumulateArgs& args, Words* out) {
  for (int t = 0; t < args.tokens; t += kTokens) {
    const std::byte* v[kTokens];
    neon::value_rows(args, t, 0, v);
    for (int c = 0; c < args.dim; c += kColumns) {
      Words* to = out + (c / kColumns * kTokenSteps + t / 4) * kStep;
      TREEATTN_UNROLL
      for (int j = 0; j < kTokens; j += 4, to += kStep) {
        const neon::Transposed x = neon::transposed(neon::load_rows(v + j, 2 * c));
        store_block(x.dims[0], to), store_block(x.dims[1], to + kBlock);
        store_block(x.dims[2], to + 2 * kBlock), store_block(x.dims[3], to + 3 * kBlock);
      }
    }
  }
}

// Weights of rows [r, r + 8) become [token / 4][limb][pair][row of the pair][4 tokens].
void pack_weights(const AccumulateArgs& args, int r, Words* out) {
  static constexpr float kZeros[kTokens] = {};
  for (int t = 0; t < args.tokens; t += kTokens) {
    for (int p = 0; p < kPairs; ++p) {
      float filled[2][kTokens];
      const auto weights = [&](int row, float(&to)[kTokens]) {
        return row < args.rows ? neon::row_weights(args, t, row, to) : kZeros;
      };
      const float *a = weights(r + 2 * p, filled[0]), *b = weights(r + 2 * p + 1, filled[1]);
      TREEATTN_UNROLL
      for (int j = 0; j < kTokens; j += 4) {
        Words* to = out + (t + j) / 4 * 2 * kStep + p * kBlock;
        const neon::WeightLimbs limbs = neon::split_weights(vld1q_f32(a + j), vld1q_f32(b + j));
        store_block(limbs.high, to);
        store_block(limbs.low, to + kStep);
      }
    }
  }
}

// 8 rows by 8 columns over all tokens of the tile.
void sum_block(const Words* weights, const Words* values, int tokens, int rows, const float* shrink, int dim,
               float* o) {
  Sums sums;
  for (int t = 0; t < tokens; t += 4, weights += 2 * kStep, values += kStep) {
    bfloat16x8_t blocks[kPairs];
    load_step(values, blocks);
    sums.add(weights, blocks);
    sums.add(weights + kStep, blocks);
  }
  sums.for_each_row(rows, [&](int row, int c, float32x4_t x) {
    float* to = o + row * dim + c;
    vst1q_f32(to, vfmaq_n_f32(x, vld1q_f32(to), shrink[row]));
  });
}

void accumulate(const AccumulateArgs& args) {
  alignas(64) Words values[kTileTokens * kMaxHeadDim];
  alignas(64) Words weights[2 * kTileTokens * kRows];
  pack_values(args, values);
  for (int r = 0; r < args.rows; r += kRows) {
    fetch_share<kRows>(args.ahead, r, args.rows);
    pack_weights(args, r, weights);
    for (int c = 0; c < args.dim; c += kColumns) {
      sum_block(weights, values + c / kColumns * kTokenSteps * kStep, args.tokens, args.rows - r, args.shrink + r,
                args.dim, args.o + r * args.dim + c);
    }
  }
}

// Of three products two count: a weight has two limbs, a bfloat16 query one. 24 sums, where the products above have
// sixteen: this instruction takes five to six cycles. All differ, or the compiler would compute equal ones once. The
// factors are loaded in every round, as above: in registers that keep them the rate was lower.
double product_burst(long iterations) {
  constexpr int kTurns = 3, kSums = 8;
  alignas(64) Words factors[2][8];
  for (int i = 0; i < 8; ++i) factors[0][i] = 0x3F00, factors[1][i] = 0x3580;  // 0.5, 2^-20
  float32x4_t sums[kTurns][kSums];
  const auto for_each_sum = [&](const auto& body) {
    TREEATTN_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      TREEATTN_UNROLL
      for (int j = 0; j < kSums; ++j) body(i * kSums + j, sums[i][j]);
    }
  };
  for_each_sum([](int index, float32x4_t& sum) { sum = vdupq_n_f32(static_cast<float>(index)); });
  for (long i = 0; i < iterations; ++i) {
    const Words* loaded = factors[0];
    asm volatile("" : "+r"(loaded) : : "memory");  // somewhere the compiler does not know
    const bfloat16x8_t row = vreinterpretq_bf16_u16(vld1q_u16(loaded));
    const bfloat16x8_t block = vreinterpretq_bf16_u16(vld1q_u16(loaded + 8));
    for_each_sum([&](int, float32x4_t& sum) { sum = vbfmmlaq_f32(sum, row, block); });
  }
  float32x4_t total = vdupq_n_f32(0.0f);
  for_each_sum([&](int, const float32x4_t& sum) { total = vaddq_f32(total, sum); });
  // The sum is positive: adding nothing, but the compiler cannot know and must keep the loop.
  const double nothing = vaddvq_f32(total) >= 0.0f ? 0.0 : 1.0;
  return kTurns * kSums * 32.0 * 2.0 / 3.0 * static_cast<double>(iterations) + nothing;
}

}  // namespace

void use_neon_bf16_prefill(CpuTarget& target) {
  const TileOps& plain_sums = target.ops[static_cast<int>(DType::kFloat32)];
  static TileOps ops = target.ops[static_cast<int>(DType::kBFloat16)];
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries;
  ops.dot = dot;
  ops.accumulate = accumulate;
  ops.sum_floats = plain_sums.sum_floats;
  ops.unpack_sums = plain_sums.unpack_sums;
  ops.product_burst = product_burst;
  target.many_rows[static_cast<int>(DType::kBFloat16)] = &ops;
}

}  // namespace treeattn::kernels
