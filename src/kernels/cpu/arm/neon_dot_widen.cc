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
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using neon::Floats8;

// Of each type: 8 elements as they are loaded, and how they become float32. The names in Exact are for a type that does
// so in different ways by token: what is seen on the way, logits of four tokens from their sums, weights of four tokens
// as the sums take them, and what is made of the sums if something was seen.
struct Exact {
  static constexpr bool kScaledQueries = false;
  struct Watch {};
  TREEATTN_FORCE_INLINE static float32x4_t logits(float32x4_t sums, float, const Watch&) { return sums; }
  TREEATTN_FORCE_INLINE static float32x4_t weights(float32x4_t w) { return w; }
  TREEATTN_FORCE_INLINE static void mark(const Watch&, int, int, float*) {}
};

struct BFloat16 : Exact {
  static constexpr DType kType = DType::kBFloat16;
  static constexpr int kBytes = 2;
  using Loaded = uint16x8_t;
  TREEATTN_FORCE_INLINE static Loaded load(const std::byte* p) {
    return vld1q_u16(reinterpret_cast<const std::uint16_t*>(p));
  }
  TREEATTN_FORCE_INLINE static Floats8 widen(Loaded x, int, Watch&) { return neon::widened_bf16(x); }
};

struct Float32 : Exact {
  static constexpr DType kType = DType::kFloat32;
  static constexpr int kBytes = 4;
  using Loaded = Floats8;
  TREEATTN_FORCE_INLINE static Loaded load(const std::byte* p) {
    return neon::load_floats8(reinterpret_cast<const float*>(p));
  }
  TREEATTN_FORCE_INLINE static Floats8 widen(Loaded x, int, Watch&) { return x; }
};

// FCVTL takes one of the two pipes for two cycles, so the last token of four goes another way: the bits of a float16,
// moved to their places in a float32, are the number times 2^-112, subnormals included. The other factor makes up for
// it: weights by 2^112, and queries are scaled so that the result is in range either way. Powers of two change no bits.
// Only infinity and NaN become numbers; they are watched for, and make the result NaN, upon which the leaf is computed
// again by CpuTarget::plain.
struct Float16 {
  static constexpr DType kType = DType::kFloat16;
  static constexpr int kBytes = 2;
  static constexpr int kMoved = kTokenBlock - 1;
  using Loaded = float16x8_t;

  // Zeros; NaN in some lane from the first element on that is not finite.
  struct Watch {
    float16x8_t sums = vdupq_n_f16(0);

    // {0, 0, 0, zero or NaN}
    TREEATTN_FORCE_INLINE float32x4_t by_token() const {
      float16x8_t all = vpaddq_f16(sums, sums);
      all = vpaddq_f16(all, all);
      all = vpaddq_f16(all, all);
      return vextq_f32(vdupq_n_f32(0.0f), vcvt_f32_f16(vget_low_f16(all)), 1);
    }
  };

  TREEATTN_FORCE_INLINE static Loaded load(const std::byte* p) {
    return vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const std::uint16_t*>(p)));
  }
  TREEATTN_FORCE_INLINE static Floats8 widen(Loaded x, int t, Watch& watch) {
    if (t != kMoved) return neon::widened(x);
    watch.sums = vfmaq_f16(watch.sums, x, vdupq_n_f16(0));
    const int16x8_t bits = vreinterpretq_s16_f16(x);
    const int32x4_t copies_of_sign = vdupq_n_s32(0x70000000);
    return {vreinterpretq_f32_s32(vbicq_s32(vshll_n_s16(vget_low_s16(bits), 13), copies_of_sign)),
            vreinterpretq_f32_s32(vbicq_s32(vshll_high_n_s16(bits, 13), copies_of_sign))};
  }

  static constexpr bool kScaledQueries = true;
  TREEATTN_FORCE_INLINE static float32x4_t logits(float32x4_t sums, float scale, const Watch& watch) {
    return vfmaq_f32(watch.by_token(), sums, weights(vdupq_n_f32(scale)));
  }
  TREEATTN_FORCE_INLINE static float32x4_t weights(float32x4_t w) {
    static constexpr float kFactors[kTokenBlock] = {1.0f, 1.0f, 1.0f, 0x1p112f};
    return vmulq_f32(w, vld1q_f32(kFactors));
  }
  TREEATTN_FORCE_INLINE static void mark(const Watch& watch, int rows, int dim, float* o) {
    const float sum = vgetq_lane_f32(watch.by_token(), kMoved);
    if (sum == 0.0f) return;
    for (int r = 0; r < rows; ++r) o[r * dim] = sum;
  }
};

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

// Four tokens at a time: neighbours come from four sequential streams (leaf.cc). A core of this kind asks for memory
// too late by itself, so each stream is fetched some way ahead.
constexpr std::ptrdiff_t kAheadBytes = 2048;
constexpr int kLineBytes = 64;

template <int N>
TREEATTN_FORCE_INLINE inline void fetch(const std::byte* const (&rows)[N], std::ptrdiff_t at) {
  if (at % kLineBytes != 0) return;
  TREEATTN_UNROLL
  for (int t = 0; t < N; ++t) __builtin_prefetch(rows[t] + at + kAheadBytes);
}

// R rows of q against four tokens.
template <class T, int R>
TREEATTN_FORCE_INLINE inline void dot_rows(const float* q, const float* scales, int dim,
                                           const std::byte* const (&k)[kTokenBlock], float* logits) {
  float32x4_t sums[R][kTokenBlock];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    TREEATTN_UNROLL
    for (int t = 0; t < kTokenBlock; ++t) sums[r][t] = vdupq_n_f32(0.0f);
  }
  typename T::Watch watch;
  for (int d = 0; d < dim; d += 8) {
    const int at = d * T::kBytes;
    fetch(k, at);
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
  const int dim = args.dim;
  for (int t = 0; t < args.tokens; t += kTokenBlock) {
    for (int h = 0; h < args.heads; ++h) {
      const std::byte* k[kTokenBlock];
      TREEATTN_UNROLL
      for (int i = 0; i < kTokenBlock; ++i) k[i] = args.k.rows[t + i] + h * args.k.head_bytes;
      const float* q = reinterpret_cast<const float*>(args.q + static_cast<std::size_t>(h) * args.q_head_bytes);
      const float* scales = q + args.rows * dim;
      float* logits = args.logits + h * args.rows * kTileTokens + t;
      int r = 0;
      for (; r + 4 <= args.rows; r += 4) dot_rows<T, 4>(q + r * dim, scales + r, dim, k, logits + r * kTileTokens);
      for (; r + 2 <= args.rows; r += 2) dot_rows<T, 2>(q + r * dim, scales + r, dim, k, logits + r * kTileTokens);
      if (r < args.rows) dot_rows<T, 1>(q + r * dim, scales + r, dim, k, logits + r * kTileTokens);
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

// R rows and N tokens, four or one. Values are loaded one round ahead: the core looks too few instructions ahead to do
// so itself.
template <class T, int R, int N>
TREEATTN_FORCE_INLINE inline void accumulate_rows(const float* weights, int dim, const std::byte* const (&v)[N],
                                                  float* o) {
  float32x4_t w[R];
  TREEATTN_UNROLL
  for (int r = 0; r < R; ++r) {
    const float* of_row = weights + r * kTileTokens;
    w[r] = N == kTokenBlock ? T::weights(vld1q_f32(of_row)) : vdupq_n_f32(*of_row);
  }
  typename T::Watch watch;
  typename T::Loaded next[N];
  TREEATTN_UNROLL
  for (int t = 0; t < N; ++t) next[t] = T::load(v[t]);
  for (int d = 0; d < dim; d += 8) {
    fetch(v, d * T::kBytes);
    // As if they changed: GCC 12 takes the lanes out of the loop, into more registers than there are.
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) asm("" : "+w"(w[r]));
    Floats8 x[N], sums[R];
    TREEATTN_UNROLL
    for (int t = 0; t < N; ++t) x[t] = T::widen(next[t], t, watch);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) sums[r] = neon::load_floats8(o + r * dim + d);
    const int then = (d + 8 < dim ? d + 8 : d) * T::kBytes;
    TREEATTN_UNROLL
    for (int t = 0; t < N; ++t) next[t] = T::load(v[t] + then);
    add_token<0>(sums, x, w);
    add_token<1>(sums, x, w);
    add_token<2>(sums, x, w);
    add_token<3>(sums, x, w);
    TREEATTN_UNROLL
    for (int r = 0; r < R; ++r) {
      vst1q_f32(o + r * dim + d, sums[r].low);
      vst1q_f32(o + r * dim + d + 4, sums[r].high);
    }
  }
  if constexpr (N == kTokenBlock) T::mark(watch, R, dim, o);
}

// Tokens [t, t + N) of all heads.
template <class T, int N>
void accumulate_tokens(const AccumulateArgs& args, int t) {
  const int dim = args.dim;
  for (int h = 0; h < args.heads; ++h) {
    const std::byte* v[N];
    TREEATTN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = args.v.rows[t + i] + h * args.v.head_bytes;
    const float* w = args.weights + h * args.rows * kTileTokens + t;
    float* o = args.o + h * args.rows * dim;
    int r = 0;
    for (; r + 4 <= args.rows; r += 4) accumulate_rows<T, 4, N>(w + r * kTileTokens, dim, v, o + r * dim);
    for (; r + 2 <= args.rows; r += 2) accumulate_rows<T, 2, N>(w + r * kTileTokens, dim, v, o + r * dim);
    if (r < args.rows) accumulate_rows<T, 1, N>(w + r * kTileTokens, dim, v, o + r * dim);
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
  for (; t + kTokenBlock <= args.tokens; t += kTokenBlock) accumulate_tokens<T, kTokenBlock>(args, t);
  for (; t < args.tokens; ++t) accumulate_tokens<T, 1>(args, t);
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
}

}  // namespace treeattn::kernels
