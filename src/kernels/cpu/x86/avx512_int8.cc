// SPDX-License-Identifier: Apache-2.0
// int8 K and V of a decode as the integers they are, times fixed-point numbers of 16 bits (fixed_point.h).
//
// Keys by VPDPBUSD, which adds four products of unsigned and signed bytes to a 32-bit sum: 16 bytes of four tokens
// side by side, 128 added to each, times the upper and the lower byte of q. A quarter of a vector is then a token, and
// what is left to add up across lanes is a third of what it is where a vector is of one token.
// Values by VPDPWSSD, which adds the products of two pairs of 16-bit integers: bytes become 16 bits wide by one
// instruction for 32 of them, and two tokens' are put side by side.
// Four tokens at a time, all heads of those, are read in the order of memory; 16, head by head, take fewer
// instructions.
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

constexpr int kTokensOfHead = 16;  // where they are taken head by head
constexpr int kPart = 16;          // bytes of a key that lie beside those of three others in a vector
constexpr int kWide = 32;          // bytes of a value that become a vector

int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// body<R>(r) for rows [r, r + R), four at a time, then two, then one.
template <int R = 4, class Body>
TREEATTN_FORCE_INLINE inline void for_rows(int r, int rows, const Body& body) {
  for (; r + R <= rows; r += R) body.template operator()<R>(r);
  if constexpr (R > 1) for_rows<R / 2>(r, rows, body);
}

// In place. By the intrinsics, GCC 12 copies each sum there and back.
TREEATTN_FORCE_INLINE inline void add_products_of_words(__m512i& sums, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}
TREEATTN_FORCE_INLINE inline void add_products_of_bytes(__m512i& sums, __m512i from_0, __m512i with_sign) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(from_0), "v"(with_sign));
}

// Inlined by force, as GCC 12 drops calls of what only prefetches.
TREEATTN_FORCE_INLINE inline void fetch(const std::byte* line) { _mm_prefetch(line, _MM_HINT_T0); }

// A head's queries. Of each row: the unit of its fixed point; what is to be subtracted because 128 was added to every
// byte of a key; the upper bytes, zeros behind its end; the lower ones.
struct PackedQueries {
  int dim, rows;

  int bytes_of_limb() const { return round_up(dim, kPart); }
  std::size_t head_bytes() const {  // of what comes before the limbs
    return static_cast<std::size_t>(round_up(rows * static_cast<int>(sizeof(float)), kPart));
  }
  std::size_t bytes() const {
    return 2 * head_bytes() + static_cast<std::size_t>(rows) * 2 * static_cast<std::size_t>(bytes_of_limb());
  }
  template <class To, class From>
  To* at(From* packed, std::size_t bytes) const {
    return reinterpret_cast<To*>(packed + bytes);
  }
};

std::size_t packed_query_bytes(int rows, int dim) { return PackedQueries{dim, rows}.bytes(); }

void pack_queries(const float* q, DType, int rows, int dim, void* packed) {
  const PackedQueries layout{dim, rows};
  auto* const bytes = static_cast<std::byte*>(packed);
  __builtin_memset(packed, 0, layout.bytes());
  auto* units = layout.at<float>(bytes, 0);
  auto* offsets = layout.at<std::int32_t>(bytes, layout.head_bytes());
  auto* limbs = layout.at<std::int8_t>(bytes, 2 * layout.head_bytes());
  for (int r = 0; r < rows; ++r, limbs += 2 * layout.bytes_of_limb()) {
    std::int32_t sum = 0;
    units[r] = fix_query(q + r * dim, dim, [&](int d, int x) {
      const auto low = static_cast<std::int8_t>(x);
      limbs[d] = static_cast<std::int8_t>((x - low) / 256);
      limbs[layout.bytes_of_limb() + d] = low;
      sum += x;
    });
    offsets[r] = -128 * sum;
  }
}

// 16 bytes of each of four keys from `at` on, 128 added to each byte; of the last, 8 are left.
TREEATTN_FORCE_INLINE inline __m512i four_keys(const std::byte* const* k, int at, bool half) {
  const auto part = [&](int t) {
    const auto* from = reinterpret_cast<const __m128i*>(k[t] + at);
    return half ? _mm_loadl_epi64(from) : _mm_loadu_si128(from);
  };
  __m512i x = _mm512_castsi128_si512(part(0));
  x = _mm512_inserti32x4(x, part(1), 1);
  x = _mm512_inserti32x4(x, part(2), 2);
  x = _mm512_inserti32x4(x, part(3), 3);
  return avx512::made_unsigned(x);
}

// R rows against 4 * G tokens.
template <int R, int G>
TREEATTN_FORCE_INLINE inline void dot_rows(const std::int8_t* q, const float* units, const std::int32_t* offsets,
                                           int dim, const std::byte* const* k, std::ptrdiff_t behind, float* logits) {
  const int limb = round_up(dim, kPart);
  __m512i high[R][G], low[R][G];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int g = 0; g < G; ++g) {
      high[r][g] = _mm512_setzero_si512();
      low[r][g] = _mm512_maskz_set1_epi32(0x1111, offsets[r]);
    }
  }
  const auto step = [&](int d, bool half) __attribute__((always_inline)) {
    // Evenly: a line of every token in the time of 64 bytes.
    TREEATTN_UNROLL
    for (int g = 0; g < G; ++g) fetch(k[d % 64 / kPart * G + g] + behind + d / 64 * 64);
    __m512i x[G];
    TREEATTN_UNROLL
    for (int g = 0; g < G; ++g) x[g] = four_keys(k + 4 * g, d, half);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto* from = reinterpret_cast<const __m128i*>(q + 2 * r * limb + d);
      const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128(from));
      const __m512i lower = _mm512_broadcast_i32x4(_mm_loadu_si128(from + limb / kPart));
      TREEATTN_UNROLL
      for (int g = 0; g < G; ++g) {
        add_products_of_bytes(high[r][g], x[g], upper);
        add_products_of_bytes(low[r][g], x[g], lower);
      }
    }
  };
  const int whole = dim / kPart * kPart;
  for (int d = 0; d < whole; d += kPart) step(d, false);
  if (whole < dim) step(whole, true);

  // Every quarter of a vector: a token's sums of all rows.
  const __m512 unit = _mm512_broadcast_f32x4(_mm_maskz_loadu_ps((1 << R) - 1, units));
  __m512 tokens[G];
  TREEATTN_UNROLL
  for (int g = 0; g < G; ++g) {
    const auto row = [&](int r) {
      return _mm512_add_epi32(low[r < R ? r : 0][g], _mm512_slli_epi32(high[r < R ? r : 0][g], 8));
    };
    const auto both = [](__m512i a, __m512i b) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i ab = both(row(0), row(1)), cd = R > 2 ? both(row(2), row(3)) : ab;
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    tokens[g] = _mm512_mul_ps(_mm512_cvtepi32_ps(all), unit);
  }
  // Of a row's, neighbours.
  if constexpr (G == 2) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512 first = _mm512_permutex2var_ps(tokens[0], order, tokens[1]);
    _mm256_storeu_ps(logits, _mm512_castps512_ps256(first));
    if constexpr (R > 1) _mm256_storeu_ps(logits + kTileTokens, _mm512_extractf32x8_ps(first, 1));
    if constexpr (R > 2) {
      const __m512i later = _mm512_add_epi32(order, _mm512_set1_epi32(2));
      const __m512 second = _mm512_permutex2var_ps(tokens[0], later, tokens[1]);
      _mm256_storeu_ps(logits + 2 * kTileTokens, _mm512_castps512_ps256(second));
      _mm256_storeu_ps(logits + 3 * kTileTokens, _mm512_extractf32x8_ps(second, 1));
    }
  } else {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 all = _mm512_permutexvar_ps(order, tokens[0]);
    _mm_storeu_ps(logits, _mm512_castps512_ps128(all));
    if constexpr (R > 1) _mm_storeu_ps(logits + kTileTokens, _mm512_extractf32x4_ps(all, 1));
    if constexpr (R > 2) {
      _mm_storeu_ps(logits + 2 * kTileTokens, _mm512_extractf32x4_ps(all, 2));
      _mm_storeu_ps(logits + 3 * kTileTokens, _mm512_extractf32x4_ps(all, 3));
    }
  }
}

template <int kBlock>
void dot(const DotArgs& args) {
  const int dim = args.dim, rows = args.rows;
  const PackedQueries layout{dim, rows};
  RowsAhead ahead(args.k, args.tokens, args.ahead, args.heads, dim, kBlock);
  for (int block = 0; block < args.tokens; block += kBlock) {
    ahead.begin(block);
    const int left = round_up(args.tokens - block, kTokenBlock), tokens = left < kBlock ? left : kBlock;
    for (int h = 0; h < args.heads; ++h) {
      const std::byte* k[kBlock];
      const std::ptrdiff_t behind = ahead.with_head(h);
      for (int t = 0; t < tokens; ++t) {
        k[t] = args.k.rows[block + t] + h * args.k.head_bytes;
      }
      const std::byte* packed = args.q + static_cast<std::size_t>(h) * args.q_head_bytes;
      const auto* units = layout.at<const float>(packed, 0);
      const auto* offsets = layout.at<const std::int32_t>(packed, layout.head_bytes());
      const auto* q = layout.at<const std::int8_t>(packed, 2 * layout.head_bytes());
      float* logits = args.logits + h * rows * kTileTokens + block;
      for_rows(0, rows, [&]<int R>(int r) {
        int t = 0;
        for (; kBlock > kTokenBlock && t + 2 * kTokenBlock <= tokens; t += 2 * kTokenBlock) {
          dot_rows<R, 2>(q + 2 * r * layout.bytes_of_limb(), units + r, offsets + r, dim, k + t, behind,
                         logits + r * kTileTokens + t);
        }
        if (t < tokens) {
          dot_rows<R, 1>(q + 2 * r * layout.bytes_of_limb(), units + r, offsets + r, dim, k + t, behind,
                         logits + r * kTileTokens + t);
        }
      });
    }
  }
}

// 32 bytes of a value from `at` on; of the last, `left` are left.
TREEATTN_FORCE_INLINE inline __m512i widen(const std::byte* row, int at, int left) {
  return _mm512_cvtepi8_epi16(left >= kWide
                                  ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + at))
                                  : _mm256_maskz_loadu_epi8(static_cast<__mmask32>((1ull << left) - 1), row + at));
}

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

// Columns [d, d + 32), or as many as are left, of up to kBlock tokens, in fours, for R rows, whose steps are
// kTileTokens apart and sums `stride`. Of every 32 columns the sums lie as VPUNPCKLWD and VPUNPCKHWD leave them. They
// stay in registers over all the tokens; GCC 12 leaves them on the stack if they are an array.
template <int R, int kBlock>
TREEATTN_FORCE_INLINE inline void add_columns(const std::int16_t* steps, int d, int left,
                                              const std::byte* const (&v)[kBlock], int tokens, std::ptrdiff_t behind,
                                              std::int32_t* integers, int stride) {
  constexpr int kSecond = R > 1 ? 1 : 0, kThird = R > 2 ? 2 : 0, kFourth = R > 2 ? 3 : 0;
  const auto load = [&](int r, int at) { return _mm512_loadu_si512(integers + r * stride + at); };
  __m512i low0 = load(0, 0), low1 = load(kSecond, 0), low2 = load(kThird, 0), low3 = load(kFourth, 0);
  __m512i high0 = load(0, 16), high1 = load(kSecond, 16), high2 = load(kThird, 16), high3 = load(kFourth, 16);
  const std::byte* const* to_fetch = v + d % 64 / kWide * (kBlock / 2);
  const std::ptrdiff_t line = behind + d / 64 * 64;
  const int end = kBlock == kTokenBlock ? kTokenBlock : tokens;  // for a loop as short as this, unroll
  for (int t = 0; t < end; t += 2) {
    fetch(*to_fetch++ + line);
    const __m512i a = widen(v[t], d, left), b = widen(v[t + 1], d, left);
    const __m512i lows = _mm512_unpacklo_epi16(a, b), highs = _mm512_unpackhi_epi16(a, b);
    const auto add = [&](int r, __m512i& low, __m512i& high) __attribute__((always_inline)) {
      int pair;
      __builtin_memcpy(&pair, steps + r * kTileTokens + t, sizeof(pair));
      const __m512i w = _mm512_set1_epi32(pair);
      add_products_of_words(low, lows, w);
      add_products_of_words(high, highs, w);
    };
    add(0, low0, high0);
    if constexpr (R > 1) add(1, low1, high1);
    if constexpr (R > 2) add(2, low2, high2), add(3, low3, high3);
  }
  const auto store = [&](int r, __m512i low, __m512i high) {
    _mm512_storeu_si512(integers + r * stride, low), _mm512_storeu_si512(integers + r * stride + 16, high);
  };
  store(0, low0, high0);
  if constexpr (R > 1) store(1, low1, high1);
  if constexpr (R > 2) store(2, low2, high2), store(3, low3, high3);
}

// The tile's integers into a row's sums.
void fold_integers(const FixedPoint& fixed, float shrink, int dim, const std::int32_t* integers, float* sums) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 shrinks = _mm512_set1_ps(shrink), unit = _mm512_set1_ps(fixed.unit);
  for (int d = 0; d < dim; d += kWide) {
    const __m512i a = _mm512_load_si512(integers + d), b = _mm512_load_si512(integers + d + 16);
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

template <int kBlock>
void accumulate(const AccumulateArgs& args) {
  const int dim = args.dim, rows = args.rows, all = args.heads * rows, stride = round_up(dim, kWide);
  alignas(64) std::int16_t steps[kMaxRowsPerCall * kTileTokens];
  // Of the tile. Beside the sums, where they are longer, they would be in half of the sets of the first level.
  alignas(64) std::int32_t integers[kMaxRowsPerCall * kMaxHeadDim];
  __builtin_memset(integers, 0, sizeof(integers[0]) * static_cast<std::size_t>(all * stride));
  FixedPoint fixed[kMaxRowsPerCall];
  for (int i = 0; i < all; ++i) {
    fixed[i] = fix_weights(args.weights + i * kTileTokens, args.tokens, steps + i * kTileTokens);
  }
  RowsAhead ahead(args.v, args.tokens, args.ahead, args.heads, dim, kBlock);
  for (int t = 0; t < args.tokens; t += kBlock) {
    ahead.begin(t);
    const int tokens = t + kBlock < args.tokens ? kBlock : args.tokens - t;
    for (int h = 0; h < args.heads; ++h) {
      const std::byte* v[kBlock];  // behind the last token, that one: its steps are 0 there
      const std::ptrdiff_t behind = ahead.with_head(h);
      for (int i = 0; i < kBlock; ++i) {
        v[i] = args.v.rows[i < tokens ? t + i : args.tokens - 1] + h * args.v.head_bytes;
      }
      for_rows(0, rows, [&]<int R>(int r) {
        const int row = h * rows + r;
        std::int32_t* of_integers = integers + row * stride;
        const std::int16_t* of_rows = steps + row * kTileTokens + t;
        const int whole = dim / kWide * kWide;
        for (int d = 0; d < whole; d += kWide)
          add_columns<R, kBlock>(of_rows, d, kWide, v, tokens, behind, of_integers + d, stride);
        if (whole < dim)
          add_columns<R, kBlock>(of_rows, whole, dim - whole, v, tokens, behind, of_integers + whole, stride);
      });
    }
  }
  for (int i = 0; i < all; ++i) {
    fold_integers(fixed[i], args.shrink[i], dim, integers + i * stride, args.o + i * dim);
  }
}

// With fewer rows to a head the order of memory counts for more than the instructions.
template <int kHeadByHeadFromRows>
void use_int8(CpuTarget& target) {
  TileOps& ops = target.ops[static_cast<int>(DType::kInt8)];
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries;
  ops.dot = [](const DotArgs& args) {
    args.rows < kHeadByHeadFromRows ? dot<kTokenBlock>(args) : dot<kTokensOfHead>(args);
  };
  ops.accumulate = [](const AccumulateArgs& args) {
    args.rows < kHeadByHeadFromRows ? accumulate<kTokenBlock>(args) : accumulate<kTokensOfHead>(args);
  };
  ops.query_error = kFixedQueryError;
  ops.weight_floor = kFixedWeightFloor;
}

}  // namespace

void use_avx512_int8(CpuTarget& target) { use_int8<1>(target); }
void use_amx_int8(CpuTarget& target) { use_int8<8>(target); }

}  // namespace treeattn::kernels
