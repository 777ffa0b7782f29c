// SPDX-License-Identifier: Apache-2.0
// int8 K and V of a decode by VPDPWSSD, which adds the products of two pairs of 16-bit integers to a 32-bit one. Bytes
// become 16 bits wide by one instruction for 32 of them; as float32 they took two for 16, and twice the products.
//
// Compiled with flags for these extensions and used only where the processor has them: no inline function of a shared
// header may be instantiated here, or the linker could give this copy to everybody.
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/fixed_point.h"
#include "kernels/cpu/rows_ahead.h"
#include "kernels/cpu/targets.h"
#include "kernels/cpu/unroll.h"
#include "kernels/cpu/x86/avx512_vectors.h"

namespace treeattn::kernels {
namespace {

constexpr int kWide = 32;  // 16-bit integers of a vector

int padded(int dim) { return (dim + kWide - 1) / kWide * kWide; }

// body<R>(r) for rows [r, r + R), four at a time, then two, then one.
template <int R = 4, class Body>
TREEATTN_FORCE_INLINE inline void for_rows(int r, int rows, const Body& body) {
  for (; r + R <= rows; r += R) body.template operator()<R>(r);
  if constexpr (R > 1) for_rows<R / 2>(r, rows, body);
}

// 32 bytes of a row from `at` on, zeros behind its end.
__m512i widen(const std::byte* row, int at, int dim) {
  const void* from = row + at;
  return _mm512_cvtepi8_epi16(at + kWide <= dim ? _mm256_loadu_si256(static_cast<const __m256i*>(from))
                                                : _mm256_maskz_loadu_epi8((1u << (dim - at)) - 1, from));
}

// Inlined by force, as GCC 12 drops calls of what only prefetches.
TREEATTN_FORCE_INLINE inline void fetch(const std::byte* const (&rows)[kTokenBlock], int at, std::ptrdiff_t behind) {
  if (at % 64 != 0) return;  // lines
  TREEATTN_UNROLL
  for (int t = 0; t < kTokenBlock; ++t) _mm_prefetch(rows[t] + at + behind, _MM_HINT_T0);
}

// Packed queries of a head: the unit of each row's fixed point, then the rows, zeros behind their ends.
std::size_t unit_bytes(int rows) { return (static_cast<std::size_t>(rows) * sizeof(float) + 63) / 64 * 64; }

std::size_t packed_query_bytes(int rows, int dim) {
  return unit_bytes(rows) + static_cast<std::size_t>(rows) * static_cast<std::size_t>(padded(dim)) * 2;
}

void pack_queries(const float* q, DType, int rows, int dim, void* packed) {
  float* units = static_cast<float*>(packed);
  auto* steps = reinterpret_cast<std::int16_t*>(static_cast<std::byte*>(packed) + unit_bytes(rows));
  __builtin_memset(steps, 0, static_cast<std::size_t>(rows) * static_cast<std::size_t>(padded(dim)) * 2);
  for (int r = 0; r < rows; ++r, steps += padded(dim)) {
    units[r] = fix_query(q + r * dim, dim, [&](int d, int x) { steps[d] = static_cast<std::int16_t>(x); });
  }
}

// The sums of the lanes of four vectors.
__m128i sums_of_lanes(const __m512i (&v)[kTokenBlock]) {
  const auto both = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i ab = both(v[0], v[1]), cd = both(v[2], v[3]);
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// R rows against four tokens.
template <int R>
void dot_rows(const std::int16_t* q, const float* units, int dim, const std::byte* const (&k)[kTokenBlock],
              std::ptrdiff_t behind, float* logits) {
  __m512i sums[R][kTokenBlock];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int t = 0; t < kTokenBlock; ++t) sums[r][t] = _mm512_setzero_si512();
  }
  for (int d = 0; d < dim; d += kWide) {
    fetch(k, d, behind);
    __m512i x[kTokenBlock];
    TREEATTN_UNROLL
    for (int t = 0; t < kTokenBlock; ++t) x[t] = widen(k[t], d, dim);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i row = _mm512_loadu_si512(q + r * padded(dim) + d);
      TREEATTN_UNROLL
      for (int t = 0; t < kTokenBlock; ++t) sums[r][t] = _mm512_dpwssd_epi32(sums[r][t], row, x[t]);
    }
  }
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    _mm_storeu_ps(logits + r * kTileTokens, _mm_mul_ps(_mm_cvtepi32_ps(sums_of_lanes(sums[r])), _mm_set1_ps(units[r])));
  }
}

void dot(const DotArgs& args) {
  const int dim = args.dim, rows = args.rows;
  RowsAhead ahead(args.k, args.tokens, args.ahead, args.heads, dim);
  for (int t = 0; t < args.tokens; t += kTokenBlock) {
    ahead.begin(t);
    for (int h = 0; h < args.heads; ++h) {
      const std::byte* k[kTokenBlock];
      TREEATTN_UNROLL
      for (int i = 0; i < kTokenBlock; ++i) k[i] = args.k.rows[t + i] + h * args.k.head_bytes;
      const std::byte* packed = args.q + static_cast<std::size_t>(h) * args.q_head_bytes;
      const float* units = reinterpret_cast<const float*>(packed);
      const auto* q = reinterpret_cast<const std::int16_t*>(packed + unit_bytes(rows));
      float* logits = args.logits + h * rows * kTileTokens + t;
      for_rows(0, rows, [&]<int R>(int r) {
        dot_rows<R>(q + r * padded(dim), units + r, dim, k, ahead.with_head(h), logits + r * kTileTokens);
      });
    }
  }
}

// Sums of a row: dim floats, then the integers of the tile at work, zero between tiles. Of every 32 columns the
// integers lie as VPUNPCKLWD and VPUNPCKHWD leave them.
int sum_floats(int dim) { return dim + padded(dim); }
std::int32_t* integers_of(float* sums, int dim) { return reinterpret_cast<std::int32_t*>(sums + dim); }

// A row's weights in steps, zeros behind the tile's end.
FixedPoint fix_weights(const float* weights, int tokens, std::int16_t* steps) {
  constexpr int kVectors = kTileTokens / 16;
  __m512 w[kVectors];
  __m512i most = _mm512_setzero_si512();
  TREEATTN_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    w[i] = tokens > 16 * i ? _mm512_maskz_loadu_ps(avx512::first_lanes(tokens - 16 * i), weights + 16 * i)
                           : _mm512_setzero_ps();
    most = _mm512_max_epu32(most, avx512::magnitude_bits(w[i]));
  }
  const unsigned bits = _mm512_reduce_max_epu32(most);
  float largest = 0.0f;
  __builtin_memcpy(&largest, &bits, sizeof(largest));
  const FixedPoint fixed = fixed_point_up_to(largest);
  const __m512 first = _mm512_set1_ps(fixed.first), second = _mm512_set1_ps(fixed.second);
  TREEATTN_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(w[i], first), second));
    _mm256_store_si256(reinterpret_cast<__m256i*>(steps + 16 * i), _mm512_cvtsepi32_epi16(x));
  }
  return fixed;
}

// Four tokens for R rows, whose steps are kTileTokens apart and sums `stride`.
template <int R>
void add_tokens(const std::int16_t* steps, int dim, const std::byte* const (&v)[kTokenBlock], std::ptrdiff_t behind,
                float* sums, int stride) {
  __m512i w[R][2];  // of tokens 0 and 1, and of 2 and 3
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int i = 0; i < 2; ++i) {
      int pair;
      __builtin_memcpy(&pair, steps + r * kTileTokens + 2 * i, sizeof(pair));
      w[r][i] = _mm512_set1_epi32(pair);
    }
  }
  for (int d = 0; d < dim; d += kWide) {
    fetch(v, d, behind);
    const __m512i a = widen(v[0], d, dim), b = widen(v[1], d, dim), c = widen(v[2], d, dim), e = widen(v[3], d, dim);
    const __m512i pairs[2][2] = {{_mm512_unpacklo_epi16(a, b), _mm512_unpacklo_epi16(c, e)},
                                 {_mm512_unpackhi_epi16(a, b), _mm512_unpackhi_epi16(c, e)}};
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      std::int32_t* to = integers_of(sums + r * stride, dim) + d;
      TREEATTN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const __m512i sum = _mm512_dpwssd_epi32(_mm512_loadu_si512(to + 16 * i), pairs[i][0], w[r][0]);
        _mm512_storeu_si512(to + 16 * i, _mm512_dpwssd_epi32(sum, pairs[i][1], w[r][1]));
      }
    }
  }
}

// The tile's integers into the floats, and zero again.
void fold_integers(const FixedPoint& fixed, float shrink, int dim, float* sums) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 shrinks = _mm512_set1_ps(shrink), unit = _mm512_set1_ps(fixed.unit);
  for (int d = 0; d < dim; d += kWide) {
    std::int32_t* integers = integers_of(sums, dim) + d;
    const __m512i a = _mm512_loadu_si512(integers), b = _mm512_loadu_si512(integers + 16);
    _mm512_storeu_si512(integers, _mm512_setzero_si512());
    _mm512_storeu_si512(integers + 16, _mm512_setzero_si512());
    const auto fold = [&](__m512i order, int at) {
      if (at >= dim) return;
      const __mmask16 lanes = avx512::first_lanes(dim - at);
      const __m512 before = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, sums + at), shrinks);
      const __m512 steps = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(a, order, b));
      _mm512_mask_storeu_ps(sums + at, lanes, _mm512_fmadd_ps(steps, unit, before));
    };
    fold(low, d), fold(high, d + 16);
  }
}

void accumulate(const AccumulateArgs& args) {
  const int dim = args.dim, rows = args.rows, all = args.heads * rows, stride = sum_floats(dim);
  alignas(64) std::int16_t steps[kMaxRowsPerCall * kTileTokens];
  FixedPoint fixed[kMaxRowsPerCall];
  for (int i = 0; i < all; ++i) {
    fixed[i] = fix_weights(args.weights + i * kTileTokens, args.tokens, steps + i * kTileTokens);
  }
  RowsAhead ahead(args.v, args.tokens, args.ahead, args.heads, dim);
  for (int t = 0; t < args.tokens; t += kTokenBlock) {
    ahead.begin(t);
    for (int h = 0; h < args.heads; ++h) {
      const std::byte* v[kTokenBlock];
      TREEATTN_UNROLL
      for (int i = 0; i < kTokenBlock; ++i) {
        v[i] = args.v.rows[t + i < args.tokens ? t + i : args.tokens - 1] + h * args.v.head_bytes;
      }
      for_rows(0, rows, [&]<int R>(int r) {
        const int row = h * rows + r;
        add_tokens<R>(steps + row * kTileTokens + t, dim, v, ahead.with_head(h), args.o + row * stride, stride);
      });
    }
  }
  for (int i = 0; i < all; ++i) fold_integers(fixed[i], args.shrink[i], dim, args.o + i * stride);
}

}  // namespace

void use_avx512_int8(CpuTarget& target) {
  TileOps& ops = target.ops[static_cast<int>(DType::kInt8)];
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries;
  ops.dot = dot;
  ops.accumulate = accumulate;
  ops.sum_floats = sum_floats;
  ops.query_error = kFixedQueryError;
  ops.weight_floor = kFixedWeightFloor;
}

}  // namespace treeattn::kernels
