// SPDX-License-Identifier: Apache-2.0
// K and V that become float32 on the way to their products, by type, for processors that multiply no 16-bit types.
// Inlined by force, for the reasons in unroll.h.
#pragma once

#include "kernels/cpu/arm/neon_vectors.h"
#include "kernels/cpu/arm/row_stream.h"

namespace treeattn::kernels::neon {

template <int kTokens>
using StreamOf = RowStream<FetchDistance{.bytes = 16 << 10, .most_tokens = kTileTokens / 2, .locality = 3}, kTokens>;
using Stream = StreamOf<kTokenBlock>;
using Coming = Stream::Lines;

// Of each type: 8 elements as they are loaded, how they become float32, and how many tokens are summed at a time where
// rows share them: eight halve the stores, but float32 was slower from memory with heads of 128, and float16 gained
// next to nothing. The names in Exact are for a type that does so in different ways by token: what is seen on the way,
// logits of four tokens from their sums, weights of four tokens as the sums take them, and what is made of the sums if
// something was seen.
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
  static constexpr int kSummed = 8;
  using Loaded = uint16x8_t;
  TREEATTN_FORCE_INLINE static Loaded load(const std::byte* p) {
    return vld1q_u16(reinterpret_cast<const std::uint16_t*>(p));
  }
  TREEATTN_FORCE_INLINE static Floats8 widen(Loaded x, int, Watch&) { return neon::widened_bf16(x); }
};

struct Float32 : Exact {
  static constexpr DType kType = DType::kFloat32;
  static constexpr int kBytes = 4;
  static constexpr int kSummed = kTokenBlock;
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
  static constexpr int kSummed = kTokenBlock;
  static constexpr int kMoved = kTokenBlock - 1;
  using Loaded = float16x8_t;

  // Zeros; NaN in some lane from the first element on that is not finite.
  struct Watch {
    float16x8_t sums{};  // zeros, where clang takes no vdupq_n_f16 (a macro)

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

// Four tokens, [t, t + 4), of all heads with one row each, to the same bits as among other rows. For the 16-bit types,
// where the order of the instructions decides.
template <class T>
inline constexpr bool kHasSingleRows = T::kBytes == 2;
template <class T>
void dot_single_rows(const DotArgs& args, int t, const Stream& stream);
template <class T>
void accumulate_single_rows(const AccumulateArgs& args, int t, const Stream& stream);

}  // namespace treeattn::kernels::neon
