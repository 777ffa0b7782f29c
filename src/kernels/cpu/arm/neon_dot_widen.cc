// SPDX-License-Identifier: Apache-2.0
// Decode in bfloat16, float16 and float32 on processors without instructions that multiply the 16-bit types: 8 elements
// of a row become two vectors of float32 for all query rows of the head, and the rest is FMLA. There are no limbs, so
// these operations have no errors but those of float32.
//
// Every sum is one chain in the order of the dimensions or of the tokens: a row's bits do not depend on how many rows
// it is worked on with.
//
// Compiled with flags of its own: no inline function of a shared header may be instantiated here, or the linker could
// give this copy to everybody.
#include "kernels/cpu/arm/neon_loops.h"
#include "kernels/cpu/arm/neon_scaling.h"
#include "kernels/cpu/arm/neon_vectors.h"
#include "kernels/cpu/arm/neon_widen.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::BFloat16;
using neon::Coming;
using neon::Float16;
using neon::Float32;
using neon::Floats8;
using neon::Stream;
using neon::StreamOf;

// float16: behind the rows their scales. A row is brought to 2^100, so that neither its products with numbers below
// 2^16 overflow nor those with 2^-112 of them are subnormal. Within bounds: logits must be scaled back by float32
// numbers.
std::size_t packed_query_bytes(int rows, int dim) {
  return sizeof(float) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim + 1);
}

void pack_queries(const float* q, DType, int rows, int dim, void* packed) {
  float *out = static_cast<float*>(packed), *scales = out + rows * dim;
  for (int r = 0; r < rows; ++r) {
    const int exponent = neon::scaling_exponent(neon::largest_of(q + r * dim, dim), 100, -15, 126);
    const float factor = neon::power_of_two(exponent);
    for (int d = 0; d < dim; ++d) out[r * dim + d] = q[r * dim + d] * factor;
    scales[r] = neon::power_of_two(-exponent);
  }
}

// R rows of q against four tokens.
template <class T, int R>
TREEATTN_FORCE_INLINE inline void dot_rows(const float* q, const float* scales, int dim,
                                           const std::byte* const (&k)[kTokenBlock], Coming coming, float* logits) {
  float32x4_t sums[R][kTokenBlock];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int t = 0; t < kTokenBlock; ++t) sums[r][t] = vreinterpretq_f32_s32(neon::fresh_zero());
  }
  typename T::Watch watch;
  for (int d = 0; d < dim; d += 8) {
    const int at = d * T::kBytes;
    coming.fetch<8 * T::kBytes>();
    Floats8 x[R];
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) x[r] = neon::load_floats8(q + r * dim + d);
    TREEATTN_UNROLL
    for (int t = 0; t < kTokenBlock; ++t) {
      const Floats8 y = T::widen(T::load(k[t] + at), t, watch);
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) sums[r][t] = vfmaq_f32(sums[r][t], x[r].low, y.low);
      TREEATTN_UNROLL
      for (int r = 0; r < R; ++r) sums[r][t] = vfmaq_f32(sums[r][t], x[r].high, y.high);
    }
  }
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    const float32x4_t all = vpaddq_f32(vpaddq_f32(sums[r][0], sums[r][1]), vpaddq_f32(sums[r][2], sums[r][3]));
    vst1q_f32(logits + r * kTileTokens, T::logits(all, T::kScaledQueries ? scales[r] : 1.0f, watch));
  }
}

template <class T>
void dot(const DotArgs& args) {
  const int dim = args.dim, rows = args.rows, heads = args.heads;
  const std::size_t q_head_bytes = args.q_head_bytes;
  const std::ptrdiff_t head_bytes = args.k.head_bytes;
  Stream stream(args.k, args.tokens, args.ahead, heads, dim * T::kBytes);
  for (int t = 0; t < args.tokens; t += kTokenBlock) {
    stream.begin(t);
    if constexpr (neon::kHasSingleRows<T>) {
      if (rows == 1) {
        neon::dot_single_rows<T>(args, t, stream);
        continue;
      }
    }
    const std::byte* k[kTokenBlock];
    TREEATTN_UNROLL
    for (int i = 0; i < kTokenBlock; ++i) k[i] = args.k.rows[t + i];
    const std::byte* packed = args.q;
    float* logits = args.logits + t;
    for (int h = 0; h < heads; ++h) {
      const float* q = reinterpret_cast<const float*>(packed);
      const float* scales = q + rows * dim;
      const Coming coming = stream.with_head(h);
      const auto score = [&]<int R>(int r) TREEATTN_FORCE_INLINE {
        dot_rows<T, R>(q, scales + r, dim, k, coming, logits);
        q += R * dim, logits += R * kTileTokens;
      };
      neon::for_each_rows(rows, score);
      packed += q_head_bytes;
      TREEATTN_UNROLL
      for (int i = 0; i < kTokenBlock; ++i) k[i] += head_bytes;
    }
  }
}

// sums += weight of the token * its values, for R rows.
template <int kToken, int R, int N>
TREEATTN_FORCE_INLINE inline void add_token(Floats8 (&sums)[R], const Floats8 (&v)[N],
                                            const float32x4_t (&weights)[R]) {
  if constexpr (kToken < N) {
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r].low = vfmaq_laneq_f32(sums[r].low, v[kToken].low, weights[r], kToken);
      sums[r].high = vfmaq_laneq_f32(sums[r].high, v[kToken].high, weights[r], kToken);
    }
  }
}

// R rows and N tokens, eight, four or one; of eight one half after the other. Values are loaded one round ahead: the
// core looks too few instructions ahead to do so itself.
template <class T, int R, int N, class Lines>
TREEATTN_FORCE_INLINE inline void accumulate_rows(const float* weights, int dim, const std::byte* const (&v)[N],
                                                  Lines coming, float* o) {
  constexpr int kRound = N < kTokenBlock ? N : kTokenBlock;
  constexpr bool kOneRound = N == kRound;
  float32x4_t w[R];
  const auto load_weights = [&](const float* from) TREEATTN_FORCE_INLINE {
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      const float* of_row = from + r * kTileTokens;
      w[r] = N == 1 ? vdupq_n_f32(*of_row) : T::weights(vld1q_f32(of_row));
    }
  };
  if constexpr (kOneRound) load_weights(weights);
  typename T::Watch watch;
  typename T::Loaded next[kRound];
  TREEATTN_UNROLL
  for (int t = 0; t < kRound; ++t) next[t] = T::load(v[t]);
  for (int d = 0; d < dim; d += 8) {
    coming.template fetch<8 * T::kBytes>();
    Floats8 sums[R];
    const int at = d * T::kBytes, then = (d + 8 < dim ? d + 8 : d) * T::kBytes;
    TREEATTN_UNROLL
    for (int first = 0; first < N; first += kRound) {
      if constexpr (kOneRound) {
        // As if they changed: GCC 12 takes the lanes out of the loop, into more registers than there are.
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) asm("" : "+w"(w[r]));
      } else {
        asm("" : "+r"(weights));  // the same
        load_weights(weights + first);
      }
      Floats8 x[kRound];
      TREEATTN_UNROLL
      for (int t = 0; t < kRound; ++t) {
        x[t] = T::widen(next[t], t, watch);
        // All of them before the products: ZIP waits behind an FMLA.
        if constexpr (!kOneRound) asm volatile("" : "+w"(x[t].low), "+w"(x[t].high));
      }
      if (first == 0) {
        TREEATTN_UNROLL
        for (int r = 0; r < R; ++r) sums[r] = neon::load_floats8(o + r * dim + d);
      }
      const bool last = first + kRound == N;
      TREEATTN_UNROLL
      for (int t = 0; t < kRound; ++t) next[t] = T::load(last ? v[t] + then : v[first + kRound + t] + at);
      add_token<0>(sums, x, w);
      add_token<1>(sums, x, w);
      add_token<2>(sums, x, w);
      add_token<3>(sums, x, w);
    }
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      vst1q_f32(o + r * dim + d, sums[r].low);
      vst1q_f32(o + r * dim + d + 4, sums[r].high);
    }
  }
  if constexpr (N != 1) T::mark(watch, R, dim, o);
}

// Tokens [t, t + N) of all heads.
template <class T, int N, class TokenStream>
void accumulate_tokens(const AccumulateArgs& args, int t, TokenStream& stream) {
  const int dim = args.dim, rows = args.rows, heads = args.heads;
  const std::ptrdiff_t head_bytes = args.v.head_bytes;
  stream.begin(t);
  if constexpr (neon::kHasSingleRows<T> && N == kTokenBlock) {
    if (rows == 1) return neon::accumulate_single_rows<T>(args, t, stream);
  }
  const std::byte* v[N];
  TREEATTN_UNROLL
  for (int i = 0; i < N; ++i) v[i] = args.v.rows[t + i];
  const float* w = args.weights + t;
  float* o = args.o;
  for (int h = 0; h < heads; ++h) {
    const auto coming = stream.with_head(h);
    const auto sum = [&]<int R>(int) TREEATTN_FORCE_INLINE {
      accumulate_rows<T, R, N>(w, dim, v, coming, o);
      w += R * kTileTokens, o += R * dim;
    };
    neon::for_each_rows(rows, sum);
    TREEATTN_UNROLL
    for (int i = 0; i < N; ++i) v[i] += head_bytes;
  }
}

// Once the running maximum has settled, nothing shrinks any more.
void shrink_sums(float factor, int dim, float* o) {
  if (factor == 1.0f) return;
  for (int d = 0; d < dim; d += 4) vst1q_f32(o + d, vmulq_n_f32(vld1q_f32(o + d), factor));
}

template <class T>
void accumulate(const AccumulateArgs& args) {
  for (int i = 0; i < args.heads * args.rows; ++i) shrink_sums(args.shrink[i], args.dim, args.o + i * args.dim);
  int t = 0;
  const auto take = [&]<int N, int kTokens>() {
    StreamOf<kTokens> stream(args.v, args.tokens, args.ahead, args.heads, args.dim * T::kBytes);
    for (; t + N <= args.tokens; t += N) accumulate_tokens<T, N>(args, t, stream);
  };
  if (args.rows > 1) take.template operator()<T::kSummed, T::kSummed>();
  take.template operator()<kTokenBlock, kTokenBlock>();
  take.template operator()<1, kTokenBlock>();
}

template <class T>
void use(CpuTarget& target) {
  TileOps& ops = target.ops[static_cast<int>(T::kType)];
  ops.dot = dot<T>;
  ops.accumulate = accumulate<T>;
}

}  // namespace

void use_neon_dot_widen(CpuTarget& target) {
  use<BFloat16>(target);
  use<Float32>(target);
  use<Float16>(target);
  TileOps& ops = target.ops[static_cast<int>(DType::kFloat16)];
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries;
  // Of subnormal products: 2^-150 each, where the largest query is 2^100 and a key 2^-24 * 2^-112 or more. Rows that no
  // scaling brings there lose more, of logits that are next to nothing.
  ops.query_error = 0x1p-100;
  for (TileOps& each : target.ops) each.streams = 1;
}

}  // namespace treeattn::kernels
