// SPDX-License-Identifier: Apache-2.0
// int8 K and V where there is SDOT but no I8MM: SDOT adds the products of four bytes to each of four integers. Keys are
// multiplied as they lie; values are turned so that four bytes are four tokens of one column. Limbs and sums are those
// of neon_int8.h, and so the bits are those of neon_int8.cc.
//
// Such processors wait for what comes late: it looks as if few vector instructions can be held back before nothing is
// taken in any more, loads included. So what is multiplied is loaded (and turned) one step ahead, in an order that is
// pinned, and rows are brought from memory long before they are wanted.
//
// Compiled with flags for these extensions and used only where the processor has them: no inline function of a shared
// header may be instantiated here, or the linker could give this copy to everybody.
#include "kernels/cpu/arm/neon_fetcher.h"
#include "kernels/cpu/arm/neon_int8.h"
#include "kernels/cpu/arm/neon_loops.h"
#include "kernels/cpu/arm/neon_vectors.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::fresh_zero;
using neon::load16;
using neon::PackedHeader;

constexpr int kDims = 16;        // of a key or a query in one register
constexpr int kWholeRows = 4;    // from so many rows a head on, values are summed over a whole tile head by head
constexpr int kPartTokens = 16;  // else so many tokens at a time, with all heads of those

// Keeps the compiler from moving what gave x to where x is used.
int8x16_t pinned(int8x16_t x) {
  asm volatile("" : "+w"(x));
  return x;
}

int8x16_t load8(const std::byte* p) {
  return vcombine_s8(vld1_s8(reinterpret_cast<const std::int8_t*>(p)), vdup_n_s8(0));
}

// The sums of the lanes of four vectors.
int32x4_t sums_of(const int32x4_t* x) { return vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3])); }

// The rows that are next, for the first level: the same tokens of the next head, or else the next tokens.
struct Next {
  const std::byte* const* rows;
  std::ptrdiff_t offset;

  // After `count` tokens from t on of head h, whose rows are `own`: they stand in where nothing is known to come.
  Next(const TileRows& tile, int tokens, int heads, int t, int count, int h, const std::byte* const* own)
      : rows(own), offset(0) {
    if (tokens != kTileTokens) return;
    if (h + 1 < heads) {
      rows = tile.rows + t, offset = (h + 1) * tile.head_bytes;
    } else if (t + count < tokens) {
      rows = tile.rows + t + count;
    }
  }

  // For T tokens from `first` on, while C columns from d on are worked on: the share that brings every line once.
  template <int T, int C>
  TREEATTN_FORCE_INLINE void fetch(int first, int d) const {
    constexpr int kLine = 64, kRows = T * C / kLine;
    const int in_line = d % kLine;
    TREEATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      __builtin_prefetch(rows[first + in_line / C * kRows + i] + offset + (d - in_line), 0, 3);
    }
  }
};

// Rows of queries: their limbs begin at q, `stride` apart.
struct Queries {
  const std::int8_t* q;
  int stride;
  int dim;
  const float* units;
};

// R rows against T keys, those of a block from `first` on. kDim: the dim where it is known, which makes the loops a
// tenth faster, or 0. kFetch: what is next is fetched meanwhile.
template <int R, int T, int kDim, bool kFetch>
TREEATTN_FORCE_INLINE inline void dot_block(const Queries& queries, const std::byte* const* k, std::ptrdiff_t offset,
                                            int first, const Next& next, float* logits) {
  int32x4_t low[R][T], high[R][T];
  const std::byte* row[T];
  TREEATTN_UNROLL
  for (int t = 0; t < T; ++t) {
    row[t] = k[first + t] + offset;
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) low[i][t] = fresh_zero(), high[i][t] = fresh_zero();
  }
  struct Limbs {
    int8x16_t low[R], high[R];
  };
  const auto limbs_at = [&](int d) {
    Limbs out;
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const std::int8_t* block = queries.q + i * queries.stride + 2 * d;
      out.low[i] = pinned(vld1q_s8(block)), out.high[i] = pinned(vld1q_s8(block + kDims));
    }
    return out;
  };
  const auto add = [&](int8x16_t key, const Limbs& limbs, int t) {
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      low[i][t] = vdotq_s32(low[i][t], key, limbs.low[i]);
      high[i][t] = vdotq_s32(high[i][t], key, limbs.high[i]);
    }
  };
  const int dim = kDim > 0 ? kDim : queries.dim;
  const int whole = dim / kDims * kDims;
  if (whole > 0) {
    int8x16_t keys[T];
    TREEATTN_UNROLL
    for (int t = 0; t < T; ++t) keys[t] = load16(row[t]);
    Limbs now = limbs_at(0), after;
    // Multiplies what is loaded, and loads what comes at d.
    const auto step = [&](const Limbs& with, Limbs& then, int d) {
      then = limbs_at(d);
      if constexpr (kFetch) next.fetch<T, kDims>(first, d - kDims);
      TREEATTN_UNROLL
      for (int t = 0; t < T; ++t) {
        add(keys[t], with, t);
        keys[t] = pinned(load16(row[t] + d));
      }
    };
    int d = kDims;
    TREEATTN_UNROLL
    for (; d + kDims < whole; d += 2 * kDims) {
      step(now, after, d);
      step(after, now, d + kDims);
    }
    if (d < whole) {
      step(now, after, d);
      now = after;
    }
    if constexpr (kFetch) next.fetch<T, kDims>(first, whole - kDims);
    TREEATTN_UNROLL
    for (int t = 0; t < T; ++t) add(keys[t], now, t);
  }
  if (whole < dim) {
    const Limbs last = limbs_at(whole);
    TREEATTN_UNROLL
    for (int t = 0; t < T; ++t) add(load8(row[t] + whole), last, t);
  }
  TREEATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    TREEATTN_UNROLL
    for (int t = 0; t < T; t += 4) {
      const float32x4_t sums = neon::joined(sums_of(high[i] + t), sums_of(low[i] + t));
      vst1q_f32(logits + i * kTileTokens + first + t, vmulq_n_f32(sums, queries.units[i]));
    }
  }
}

// Where values are summed over whole tiles, all of them have to be there when the keys are scored.
int values_ahead(int rows, int heads, std::ptrdiff_t row_bytes) {
  return rows >= kWholeRows ? kTileTokens : neon::tokens_ahead(heads * row_bytes);
}

template <int kDim>
void dot_heads(const DotArgs& args) {
  const int blocks = (args.tokens + neon::kTokens - 1) / neon::kTokens;
  const bool whole = args.tokens == kTileTokens;
  const Ahead& v = args.ahead;
  neon::Fetcher fetcher(neon::token_rows(whole ? args.k.rows : nullptr, neon::tokens_ahead(args.heads * args.dim),
                                         kTileTokens, args.heads, args.k.head_bytes, args.dim),
                        neon::token_rows(v.rows, 0, values_ahead(args.rows, args.heads, v.row_bytes), args.heads,
                                         v.head_bytes, v.row_bytes),
                        blocks * args.heads * ((args.rows + 1) / 2));
  neon::for_each_key_block(args, [&](const std::byte* const* k, int t) {
    for (int h = 0; h < args.heads; ++h) {
      const std::byte* q = args.q + static_cast<std::size_t>(h) * args.q_head_bytes;
      const PackedHeader* header = reinterpret_cast<const PackedHeader*>(q);
      Queries queries = {neon::row_limbs<kDims>(header, 0, args.dim), neon::limb_bytes<kDims>(args.dim), args.dim,
                         neon::row_units(header)};
      const std::ptrdiff_t offset = h * args.k.head_bytes;
      const Next next(args.k, args.tokens, args.heads, t, neon::kTokens, h, k);
      float* logits = args.logits + h * args.rows * kTileTokens + t;
      const auto two_rows = [&]<bool kFetch>() TREEATTN_FORCE_INLINE {
        fetcher.step();
        dot_block<2, 4, kDim, kFetch>(queries, k, offset, 0, next, logits);
        dot_block<2, 4, kDim, kFetch>(queries, k, offset, 4, next, logits);
        queries.q += 2 * queries.stride, queries.units += 2, logits += 2 * kTileTokens;
      };
      int r = 0;
      if (args.rows >= 2) two_rows.template operator()<true>(), r += 2;
      for (; r + 2 <= args.rows; r += 2) two_rows.template operator()<false>();
      if (r == args.rows) continue;
      fetcher.step();
      dot_block<1, neon::kTokens, kDim, true>(queries, k, offset, 0, next, logits);
    }
  });
}

void dot(const DotArgs& args) {
  if (args.dim == 128) return dot_heads<128>(args);
  if (args.dim == 64) return dot_heads<64>(args);
  dot_heads<0>(args);
}

// The weights of a tile for R rows, one or two, as SDOT takes them: for each four tokens the limbs {high, low} of one
// row and of the other. Zero for missing tokens.
template <int R>
void split_weights(const float* weights, int tokens, const FixedPoint* fixed, std::int8_t* limbs) {
  for (int t = 0; t < kTileTokens; t += 16) {
    int32x4_t high[R], low[R];
    TREEATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      float filled[16];
      const float* from = weights + i * kTileTokens + t;
      if (t + 16 > tokens) {
        for (int j = 0; j < 16; ++j) filled[j] = t + j < tokens ? from[j] : 0.0f;
        from = filled;
      }
      const int16x8_t a = neon::steps_of(from, fixed[i]), b = neon::steps_of(from + 8, fixed[i]);
      high[i] = vreinterpretq_s32_s8(neon::high_limbs(a, b)), low[i] = vreinterpretq_s32_s8(neon::low_limbs(a, b));
    }
    std::int32_t* to = reinterpret_cast<std::int32_t*>(limbs + t * 2 * R);
    if constexpr (R == 1) {
      vst2q_s32(to, (int32x4x2_t{high[0], low[0]}));
    } else {
      vst4q_s32(to, (int32x4x4_t{high[0], low[0], high[1], low[1]}));
    }
  }
}

// Four tokens of C columns, turned: four bytes are the tokens of one column.
template <int C>
struct Turned {
  int8x16_t columns[C / 4];
};

int8x16_t zip1_16(int8x16_t x, int8x16_t y) {
  return vreinterpretq_s8_s16(vzip1q_s16(vreinterpretq_s16_s8(x), vreinterpretq_s16_s8(y)));
}
int8x16_t zip2_16(int8x16_t x, int8x16_t y) {
  return vreinterpretq_s8_s16(vzip2q_s16(vreinterpretq_s16_s8(x), vreinterpretq_s16_s8(y)));
}

// Four tokens of C columns as they lie.
template <int C>
struct Loaded {
  int8x16_t rows[4];
};

template <int C>
TREEATTN_FORCE_INLINE inline Loaded<C> load(const std::byte* const* rows, int d) {
  Loaded<C> out;
  TREEATTN_UNROLL
  for (int i = 0; i < 4; ++i) out.rows[i] = pinned(C == 16 ? load16(rows[i] + d) : load8(rows[i] + d));
  return out;
}

// All of it pinned, or GCC 12 puts half of it right behind the loads.
template <int C>
TREEATTN_FORCE_INLINE inline Turned<C> turn(const Loaded<C>& v) {
  Turned<C> out;
  int8x16_t a = pinned(vzip1q_s8(v.rows[0], v.rows[1])), b = pinned(vzip1q_s8(v.rows[2], v.rows[3]));
  out.columns[0] = pinned(zip1_16(a, b)), out.columns[1] = pinned(zip2_16(a, b));
  if constexpr (C == 16) {
    a = pinned(vzip2q_s8(v.rows[0], v.rows[1])), b = pinned(vzip2q_s8(v.rows[2], v.rows[3]));
    out.columns[2] = pinned(zip1_16(a, b)), out.columns[3] = pinned(zip2_16(a, b));
  }
  return out;
}

// Sums of a row: dim floats, then the integers of the tile at work between its parts: for every four columns {high
// limbs, low limbs}.
int sum_floats(int dim) { return 3 * dim; }
std::int32_t* integers_of(float* sums, int dim) { return reinterpret_cast<std::int32_t*>(sums + dim); }

// What tokens of a tile, a part of it or all, are multiplied with, for R rows.
struct Rows {
  const std::int8_t* limbs;  // two rows' of the whole tile, then those of the next two
  const FixedPoint* fixed;
  const float* shrink;  // null: all are 1, as in most tiles
  int dim;
  float* sums;
};

// Which part of a tile.
enum class Part { kWhole, kFirst, kMiddle, kLast };

// C columns, from d on, of the tokens of a part, an even number of fours, for R rows. `now` and `then` are the first
// four tokens and the four after those, and in the end those at next_d.
template <int R, int C, Part kPart>
TREEATTN_FORCE_INLINE inline void sum_columns(const std::byte* const* v, int fours, const Rows& rows, int d, int next_d,
                                              Turned<C>& now, Loaded<C>& then) {
  constexpr bool kBegins = kPart == Part::kWhole || kPart == Part::kFirst;
  constexpr bool kEnds = kPart == Part::kWhole || kPart == Part::kLast;
  constexpr int kVectors = C / 4;
  const int dim = rows.dim, stride = sum_floats(dim);  // stores could be to rows, for all the compiler knows
  float* const sums = rows.sums;
  const std::int8_t* const limbs = rows.limbs;
  const float* const shrink = rows.shrink;
  int32x4_t high[R][kVectors], low[R][kVectors];
  TREEATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    const std::int32_t* from = integers_of(sums + i * stride, dim) + 2 * d;
    TREEATTN_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      high[i][c] = kBegins ? fresh_zero() : vld1q_s32(from + 8 * c);
      low[i][c] = kBegins ? fresh_zero() : vld1q_s32(from + 8 * c + 4);
    }
  }
  const auto add = [&](const Turned<C>& x, int four) {
    if constexpr (R == 1) {
      const int8x8_t w = vld1_s8(limbs + 8 * four);
      TREEATTN_UNROLL
      for (int c = 0; c < kVectors; ++c) {
        high[0][c] = vdotq_lane_s32(high[0][c], x.columns[c], w, 0);
        low[0][c] = vdotq_lane_s32(low[0][c], x.columns[c], w, 1);
      }
    } else {
      TREEATTN_UNROLL
      for (int i = 0; i < R; i += 2) {
        const int8x16_t w = vld1q_s8(limbs + 2 * i * kTileTokens + 16 * four);
        TREEATTN_UNROLL
        for (int c = 0; c < kVectors; ++c) {
          high[i][c] = vdotq_laneq_s32(high[i][c], x.columns[c], w, 0);
          low[i][c] = vdotq_laneq_s32(low[i][c], x.columns[c], w, 1);
          high[i + 1][c] = vdotq_laneq_s32(high[i + 1][c], x.columns[c], w, 2);
          low[i + 1][c] = vdotq_laneq_s32(low[i + 1][c], x.columns[c], w, 3);
        }
      }
    }
  };
  int four = 0;
  for (; four + 2 < fours; four += 2) {
    const Turned<C> next = turn<C>(then);
    then = load<C>(v + 4 * four + 8, d);
    add(now, four);
    now = turn<C>(then);
    then = load<C>(v + 4 * four + 12, d);
    add(next, four + 1);
  }
  const Turned<C> last = turn<C>(then);
  then = load<C>(v, next_d);
  add(now, four);
  now = turn<C>(then);
  then = load<C>(v + 4, next_d);
  add(last, four + 1);
  TREEATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    float* of_row = sums + i * stride;
    std::int32_t* to = integers_of(of_row, dim) + 2 * d;
    const FixedPoint fixed = kEnds ? rows.fixed[i] : FixedPoint{};
    const float* const shrink_of_row = shrink ? shrink + i : nullptr;
    TREEATTN_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      if constexpr (kEnds) {
        neon::add_tile(high[i][c], low[i][c], fixed, shrink_of_row, of_row + d + 4 * c);
      } else {
        vst1q_s32(to + 8 * c, high[i][c]), vst1q_s32(to + 8 * c + 4, low[i][c]);
      }
    }
  }
}

// R rows with as many columns at a time as there are registers for.
template <int R>
constexpr int kColumns = R == 4 ? 8 : 16;

template <int R, Part kPart>
void sum_part(const std::byte* const* v, int fours, const Rows& rows, const Next& next, neon::Fetcher& fetcher) {
  constexpr int kTokens = kPart == Part::kWhole ? kTileTokens : kPartTokens;
  const int steps = kPart == Part::kWhole ? fours : kPartTokens / 4;
  constexpr int C = kColumns<R>;
  int d = 0;
  if (C <= rows.dim) {
    Turned<C> now = turn<C>(load<C>(v, 0));
    Loaded<C> then = load<C>(v + 4, 0);
    for (; d + C <= rows.dim; d += C) {
      fetcher.step();
      next.fetch<kTokens, C>(0, d);
      sum_columns<R, C, kPart>(v, steps, rows, d, d + 2 * C <= rows.dim ? d + C : d, now, then);
    }
  }
  if (C > 8 && d < rows.dim) {
    Turned<8> now = turn<8>(load<8>(v, d));
    Loaded<8> then = load<8>(v + 4, d);
    sum_columns<R, 8, kPart>(v, steps, rows, d, d, now, then);
  }
}

template <int R>
void sum_rows(Part part, const std::byte* const* v, int fours, const Rows& rows, const Next& next,
              neon::Fetcher& fetcher) {
  if (part == Part::kWhole) return sum_part<R, Part::kWhole>(v, fours, rows, next, fetcher);
  if constexpr (R < kWholeRows) {
    if (part == Part::kFirst) return sum_part<R, Part::kFirst>(v, fours, rows, next, fetcher);
    if (part == Part::kMiddle) return sum_part<R, Part::kMiddle>(v, fours, rows, next, fetcher);
    sum_part<R, Part::kLast>(v, fours, rows, next, fetcher);
  }
}

template <int R>
bool any_shrinks(const float* shrink) {
  bool any = false;
  for (int i = 0; i < R; ++i) any |= shrink[i] != 1.0f;
  return any;
}

void accumulate(const AccumulateArgs& args) {
  FixedPoint fixed[kMaxRowsPerCall];
  std::int8_t limbs[kMaxRowsPerCall * 2 * kTileTokens];
  for (int h = 0; h < args.heads; ++h) {
    int r = h * args.rows;
    const int end = r + args.rows;
    for (int i = r; i < end; ++i) fixed[i] = neon::fixed_point_of(args.weights + i * kTileTokens, args.tokens);
    for (; r + 2 <= end; r += 2) {
      split_weights<2>(args.weights + r * kTileTokens, args.tokens, fixed + r, limbs + 2 * r * kTileTokens);
    }
    if (r < end) split_weights<1>(args.weights + r * kTileTokens, args.tokens, fixed + r, limbs + 2 * r * kTileTokens);
  }
  const bool whole = args.rows >= kWholeRows || args.tokens <= kPartTokens;
  const int part_tokens = whole ? kTileTokens : kPartTokens;
  const int parts = (args.tokens + part_tokens - 1) / part_tokens;
  const int columns = args.rows >= 4 ? kColumns<4> : kColumns<1>;
  const Ahead& k = args.ahead;
  neon::Fetcher fetcher(
      neon::token_rows(args.tokens == kTileTokens ? args.v.rows : nullptr,
                       values_ahead(args.rows, args.heads, args.dim), kTileTokens, args.heads, args.v.head_bytes,
                       args.dim),
      neon::token_rows(k.rows, 0, neon::tokens_ahead(args.heads * k.row_bytes), args.heads, k.head_bytes, k.row_bytes),
      parts * args.heads * ((args.rows + 3) / 4) * ((args.dim + columns - 1) / columns));
  for (int t = 0; t < args.tokens; t += part_tokens) {
    const bool first = t == 0, last = t + part_tokens >= args.tokens;
    const Part part = first ? (last ? Part::kWhole : Part::kFirst) : last ? Part::kLast : Part::kMiddle;
    const int left = args.tokens - t < part_tokens ? args.tokens - t : part_tokens;
    const int fours = (left + 7) / 8 * 2;
    for (int h = 0; h < args.heads; ++h) {
      // Missing tokens have weights of 0, and no byte is infinite: any row will do.
      const std::byte* v[kTileTokens];
      for (int i = 0; i < part_tokens; ++i) v[i] = args.v.rows[t + (i < left ? i : left - 1)] + h * args.v.head_bytes;
      const Next next(args.v, args.tokens, args.heads, t, part_tokens, h, v);
      const auto take = [&]<int R>(int of_head) {
        const int r = h * args.rows + of_head;
        const float* shrink = any_shrinks<R>(args.shrink + r) ? args.shrink + r : nullptr;
        const Rows rows = {limbs + 2 * r * kTileTokens + (R == 1 ? 2 : 4) * t, fixed + r, shrink, args.dim,
                           args.o + r * sum_floats(args.dim)};
        sum_rows<R>(part, v, fours, rows, next, fetcher);
      };
      neon::for_each_rows(args.rows, take);
    }
  }
}

}  // namespace

void use_neon_dot_int8(CpuTarget& target) {
  TileOps& ops = target.ops[static_cast<int>(DType::kInt8)];
  neon::use_limbs<kDims>(ops);
  ops.dot = dot;
  ops.accumulate = accumulate;
  ops.sum_floats = sum_floats;
}

}  // namespace treeattn::kernels
