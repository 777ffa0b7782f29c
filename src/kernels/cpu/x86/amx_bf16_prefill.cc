// SPDX-License-Identifier: Apache-2.0
// bfloat16 K and V by TDPBF16PS where many query rows share a KV head. A query row is cut into bfloat16 limbs whose sum
// it is, a weight into two that leave 2^-17 of it (docs/exactness.md). Each tile is packed once for all rows into what
// the instruction takes, 16 pairs of dimensions by 16 tokens, or 16 pairs of tokens by 16 columns; then 32 rows by 32
// tokens (columns) at a time are summed in four registers.
//
// The instruction rounds every addition to nearest even: of 32 products those of even and of odd numbers one after the
// other, then both sums and what there was. It takes subnormal numbers for zero.
#include "kernels/cpu/bfloat16_limbs.h"
#include "kernels/cpu/fetch_share.h"
#include "kernels/cpu/targets.h"
#include "kernels/cpu/x86/amx_tiles.h"
#include "kernels/cpu/x86/avx512_vectors.h"

namespace treeattn::kernels {
namespace {

constexpr int kSide = amx::kRows;           // rows, tokens or columns of a register
constexpr int kBlock = 2 * kSide;           // that are worked on together
constexpr int kStep = 32;                   // dimensions, or tokens, of one product
constexpr int kStepBytes = amx::kRowBytes;  // of a row
using amx::kTileBytes;
constexpr int kLimbsOfWeight = 2;
constexpr int kSteps = kTileTokens / kStep;  // of the tokens of a tile

int steps_of(int count) { return (count + kStep - 1) / kStep; }
int sides_of(int count) { return (count + kSide - 1) / kSide; }
int smaller(int a, int b) { return a < b ? a : b; }

// body.template operator()<A, B>(): one or two registers of rows by one or two of columns, as many as hold those left.
template <class Body>
TREEATTN_FORCE_INLINE inline void with_registers(int rows_left, int columns_left, const Body& body) {
  const bool two_of_rows = rows_left > kSide, two_of_columns = columns_left > kSide;
  if (two_of_rows && two_of_columns) return body.template operator()<2, 2>();
  if (two_of_rows) return body.template operator()<2, 1>();
  if (two_of_columns) return body.template operator()<1, 2>();
  body.template operator()<1, 1>();
}

template <int A, int B>
void zero_sums(amx::Tiles& tiles) {
  amx::for_each_sum<A, B>([&]<int I>(int, int) { tiles.zero<I>(); });
}

template <int A, int B>
void store_sums(amx::Tiles& tiles, float* to, int stride) {
  amx::for_each_sum<A, B>([&]<int I>(int row, int column) {
    tiles.store<I>(to + kSide * (row * stride + column), stride * static_cast<std::int64_t>(sizeof(float)));
  });
}

// Packed queries: [16 rows][limb][32 dimensions][row][dimension], zeros standing for what is missing.
struct PackedHeader {
  int limbs;
  int padding[15];
};

std::size_t packed_query_bytes(int rows, int dim) {
  return sizeof(PackedHeader) + static_cast<std::size_t>(sides_of(rows) * 3 * steps_of(dim)) * kTileBytes;
}

// The next limb of 16 numbers, of which it leaves the rest. Truncation keeps that exact and of the same sign; a NaN or
// infinity belongs to the first limb alone, and a NaN becomes quiet: the upper half of another may be an infinity.
__m256i take_limb(__m512& x) {
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  __m512i bits = _mm512_castps_si512(x);
  bits = _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x00400000));
  const __m512 limb = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  const __m512 rest = _mm512_sub_ps(x, limb);
  x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(rest, rest, _CMP_ORD_Q), rest);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

void pack_queries(const float* q, DType q_dtype, int rows, int dim, void* packed) {
  auto* header = static_cast<PackedHeader*>(packed);
  header->limbs = bfloat16_limbs_of(q_dtype);
  const int limb_bytes = steps_of(dim) * kTileBytes;
  auto* out = reinterpret_cast<std::byte*>(header + 1);
  for (int r = 0; r < sides_of(rows) * kSide; ++r) {
    std::byte* row = out + r / kSide * header->limbs * limb_bytes + r % kSide * kStepBytes;
    for (int d = 0; d < steps_of(dim) * kStep; d += 16) {
      __m512 x = r < rows && d < dim ? _mm512_maskz_loadu_ps(avx512::first_lanes(dim - d), q + r * dim + d)
                                     : _mm512_setzero_ps();
      std::byte* to = row + d / kStep * kTileBytes + d % kStep * 2;
      for (int limb = 0; limb < header->limbs; ++limb, to += limb_bytes) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), take_limb(x));
      }
    }
  }
}

// Keys become [16 tokens][32 dimensions][pair of dimensions][token][2]. The last tokens are copies of the last key, of
// which nothing may come.
void pack_keys(const DotArgs& args, std::byte* out) {
  for (int t = 0; t < args.tokens; t += kSide) {
    for (int step = 0; step < steps_of(args.dim); ++step, out += kTileBytes) {
      const int at = step * kStepBytes;
      __m512i v[kSide];
      for (int i = 0; i < kSide; ++i) {
        v[i] = avx512::load_bytes(args.k.rows[smaller(t + i, args.tokens - 1)] + at, 2 * args.dim - at);
      }
      avx512::transpose(v);
      TREEATTN_UNROLL
      for (int i = 0; i < kSide; ++i) _mm512_store_si512(out + i * kStepBytes, v[i]);
    }
  }
}

void dot(const DotArgs& args) {
  alignas(64) std::byte keys[kTileTokens * kMaxHeadDim * 2];
  alignas(64) float last[kBlock * kTileTokens];  // rows of which some are missing
  pack_keys(args, keys);
  const auto* header = reinterpret_cast<const PackedHeader*>(args.q);
  const int steps = steps_of(args.dim), side_bytes = steps * kTileBytes, limbs = header->limbs;
  const auto* q = reinterpret_cast<const std::byte*>(header + 1) + args.first_row / kSide * limbs * side_bytes;
  amx::Tiles tiles{amx::TileShapes::whole()};
  for (int r = 0; r < args.rows; r += kBlock) {
    fetch_share<kBlock>(args.ahead, r, args.rows);
    const int rows = smaller(kBlock, args.rows - r);
    const bool whole = rows % kSide == 0;
    float* logits = args.logits + r * kTileTokens;
    for (int t = 0; t < args.tokens; t += kBlock) {
      with_registers(rows, args.tokens - t, [&]<int A, int B>() {
        zero_sums<A, B>(tiles);
        for (int limb = limbs - 1; limb >= 0; --limb) {  // what counts most comes last
          amx::add_bfloat16_products<A, B>(tiles, q + (r / kSide * limbs + limb) * side_bytes, limbs * side_bytes,
                                           keys + t / kSide * side_bytes, side_bytes, steps);
        }
        store_sums<A, B>(tiles, (whole ? logits : last) + t, kTileTokens);
      });
    }
    if (whole) continue;
    const auto bytes = static_cast<std::size_t>(sides_of(args.tokens) * kSide) * sizeof(float);
    for (int i = 0; i < rows; ++i) __builtin_memcpy(logits + i * kTileTokens, last + i * kTileTokens, bytes);
  }
}

// Values become [16 columns][32 tokens][pair of tokens][column][2], zeros standing for missing ones: 0 * inf would be
// NaN.
void pack_values(const AccumulateArgs& args, std::byte* out) {
  const auto load = [&](int t, int c) {
    if (t >= args.tokens) return _mm512_setzero_si512();
    const std::byte* at = args.v.rows[t] + 2 * c;
    return _mm512_cvtepu16_epi32(args.dim - c >= kSide ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))
                                                       : _mm256_maskz_loadu_epi16(0xff, at));
  };
  for (int t = 0; t < steps_of(args.tokens) * kStep; t += 2) {
    for (int c = 0; c < args.dim; c += kSide) {
      const __m512i pairs = _mm512_or_si512(load(t, c), _mm512_slli_epi32(load(t + 1, c), 16));
      _mm512_store_si512(out + (c / kSide * kSteps + t / kStep) * kTileBytes + t % kStep / 2 * kStepBytes, pairs);
    }
  }
}

// Weights of rows [r, r + 32) become [16 rows][limb][32 tokens][row][token], zeros standing for what is missing.
void pack_weights(const AccumulateArgs& args, int r, std::byte* out) {
  const auto widened = [](__m512i words, bool upper) {
    const __m256i half = upper ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  };
  for (int i = 0; i < sides_of(smaller(kBlock, args.rows - r)) * kSide; ++i) {
    std::byte* to = out + i / kSide * kLimbsOfWeight * kSteps * kTileBytes + i % kSide * kStepBytes;
    for (int t = 0; t < args.tokens; t += kStep, to += kTileBytes) {
      const float* from = args.weights + (r + i) * kTileTokens + t;
      const int tokens = r + i < args.rows ? args.tokens - t : 0;
      const __m512 a = tokens > 0 ? _mm512_maskz_loadu_ps(avx512::first_lanes(tokens), from) : _mm512_setzero_ps();
      const __m512 b =
          tokens > 16 ? _mm512_maskz_loadu_ps(avx512::first_lanes(tokens - 16), from + 16) : _mm512_setzero_ps();
      const __m512i high = avx512::to_bfloat16(a, b);
      const __m512i low =
          avx512::to_bfloat16(_mm512_sub_ps(a, widened(high, false)), _mm512_sub_ps(b, widened(high, true)));
      _mm512_store_si512(to, high);
      _mm512_store_si512(to + kSteps * kTileBytes, low);
    }
  }
}

void accumulate(const AccumulateArgs& args) {
  alignas(64) std::byte values[kTileTokens * kMaxHeadDim * 2];
  alignas(64) std::byte weights[kBlock * kTileTokens * 2 * kLimbsOfWeight];
  alignas(64) float sums[kBlock * kBlock];
  constexpr int kLimbBytes = kSteps * kTileBytes, kSideBytes = kLimbsOfWeight * kLimbBytes;
  const int dim = args.dim, steps = steps_of(args.tokens);
  pack_values(args, values);
  amx::Tiles tiles{amx::TileShapes::whole()};
  for (int r = 0; r < args.rows; r += kBlock) {
    fetch_share<kBlock>(args.ahead, r, args.rows);
    pack_weights(args, r, weights);
    const int rows = smaller(kBlock, args.rows - r);
    for (int c = 0; c < dim; c += kBlock) {
      with_registers(rows, dim - c, [&]<int A, int B>() {
        zero_sums<A, B>(tiles);
        for (int limb = kLimbsOfWeight - 1; limb >= 0; --limb) {
          amx::add_bfloat16_products<A, B>(tiles, weights + limb * kLimbBytes, kSideBytes,
                                           values + c / kSide * kLimbBytes, kLimbBytes, steps);
        }
        store_sums<A, B>(tiles, sums, kBlock);
      });
      for (int i = 0; i < rows; ++i) {
        const __m512 shrink = _mm512_set1_ps(args.shrink[r + i]);
        for (int j = 0; j < kBlock && c + j < dim; j += 16) {
          float* o = args.o + (r + i) * dim + c + j;
          const __mmask16 lanes = avx512::first_lanes(dim - c - j);
          const __m512 sum = _mm512_load_ps(sums + i * kBlock + j);
          _mm512_mask_storeu_ps(o, lanes, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, o), shrink, sum));
        }
      }
    }
  }
}

// Of three products two count: a weight has two limbs, a bfloat16 query one. The factors are loaded as above; no
// compiler leaves out an instruction that was written out (amx_tiles.h).
double product_burst(long iterations) {
  alignas(64) std::byte factors[2 * kTileBytes];
  for (int i = 0; i < kSide; ++i) {
    _mm512_store_si512(factors + i * kStepBytes, _mm512_set1_epi16(0x3f00));               // 0.5
    _mm512_store_si512(factors + kTileBytes + i * kStepBytes, _mm512_set1_epi16(0x3580));  // 2^-20
  }
  amx::Tiles tiles{amx::TileShapes::whole()};
  zero_sums<2, 2>(tiles);
  for (long i = 0; i < iterations; ++i) {
    amx::add_bfloat16_products<2, 2>(tiles, factors, 0, factors + kTileBytes, 0, 1);
  }
  return 4.0 * kSide * kSide * kStep * 2.0 * 2.0 / 3.0 * static_cast<double>(iterations);
}

}  // namespace

void use_amx_bf16_prefill(CpuTarget& target) {
  TileOps& decode = target.ops[static_cast<int>(DType::kBFloat16)];
  // For both, as what a call's bound is must not depend on its rows.
  decode.weight_error = 0x1p-17;
  decode.logit_floor = 0x1p-39;
  decode.product_floor = 0x1p-126;
  static TileOps ops = decode;
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries;
  ops.dot = dot;
  ops.accumulate = accumulate;
  ops.unpack_sums = target.ops[static_cast<int>(DType::kFloat32)].unpack_sums;  // columns are in order
  ops.product_burst = product_burst;
  target.many_rows[static_cast<int>(DType::kBFloat16)] = &ops;
}

}  // namespace treeattn::kernels
