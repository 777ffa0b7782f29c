// SPDX-License-Identifier: Apache-2.0
// What the kernels for int8 K and V by SMMLA and by SDOT have in common. Both multiply bytes by bytes, so the
// fixed-point numbers (fixed_point.h) are cut into two byte limbs, low + 256 high. The sums over a tile are exact
// integers, so both kernels have the same bits. Static, for the reason in neon_loops.h.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/fixed_point.h"
#include "kernels/cpu/tile_ops.h"

namespace treeattn::kernels::neon {

// Packed queries of a head: rows, then the unit of each row's fixed point, then for every row and every B dims the
// block {B low limbs; B high limbs}, the last one filled with zeros.
struct PackedHeader {
  int rows;
  int padding[15];
};

static inline std::size_t unit_bytes(int rows) {
  return (static_cast<std::size_t>(rows) * sizeof(float) + 63) / 64 * 64;
}

static inline std::size_t packed_query_bytes(int rows, int dim) {
  return sizeof(PackedHeader) + unit_bytes(rows) +
         static_cast<std::size_t>(rows) * 2 * static_cast<std::size_t>((dim + 15) / 16 * 16);
}

static inline const float* row_units(const PackedHeader* header) { return reinterpret_cast<const float*>(header + 1); }

// Bytes of one row's limbs.
template <int B>
static inline int limb_bytes(int dim) {
  return 2 * ((dim + B - 1) / B * B);
}

template <int B>
static inline const std::int8_t* row_limbs(const PackedHeader* header, int row, int dim) {
  return reinterpret_cast<const std::int8_t*>(header + 1) + unit_bytes(header->rows) + row * limb_bytes<B>(dim);
}

template <int B>
static inline void pack_queries(const float* q, DType, int rows, int dim, void* packed) {
  PackedHeader* header = static_cast<PackedHeader*>(packed);
  header->rows = rows;
  float* units = const_cast<float*>(row_units(header));
  for (int r = 0; r < rows; ++r) {
    std::int8_t* limbs = const_cast<std::int8_t*>(row_limbs<B>(header, r, dim));
    __builtin_memset(limbs, 0, static_cast<std::size_t>(limb_bytes<B>(dim)));
    units[r] = fix_query(q + r * dim, dim, [&](int d, int steps) {
      const int low = ((steps + 128) & 255) - 128;
      std::int8_t* block = limbs + d / B * 2 * B + d % B;
      block[0] = static_cast<std::int8_t>(low);
      block[B] = static_cast<std::int8_t>((steps - low) / 256);
    });
  }
}

// The entries of a table that are alike, with blocks of B dims.
template <int B>
static inline void use_limbs(TileOps& ops) {
  ops.packed_query_bytes = packed_query_bytes;
  ops.pack_queries = pack_queries<B>;
  ops.query_error = kFixedQueryError;
  ops.weight_floor = kFixedWeightFloor;
}

static inline int8x16_t load16(const std::byte* p) { return vld1q_s8(reinterpret_cast<const std::int8_t*>(p)); }

// The limbs' sums put together. Exact: those of all dims, and of all tokens of a tile, stay below 2^31.
static inline float32x4_t joined(int32x4_t high, int32x4_t low) {
  return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high, 8), low));
}

static inline FixedPoint fixed_point_of(const float* weights, int tokens) {
  float32x4_t most = vdupq_n_f32(0.0f), more[3] = {most, most, most};  // chains side by side
  const auto size = [&](int at) { return vabsq_f32(vld1q_f32(weights + at)); };
  int t = 0;
  for (; t + 16 <= tokens; t += 16) {
    most = vmaxq_f32(most, size(t)), more[0] = vmaxq_f32(more[0], size(t + 4));  // NaN stays
    more[1] = vmaxq_f32(more[1], size(t + 8)), more[2] = vmaxq_f32(more[2], size(t + 12));
  }
  most = vmaxq_f32(vmaxq_f32(most, more[0]), vmaxq_f32(more[1], more[2]));
  for (; t + 4 <= tokens; t += 4) most = vmaxq_f32(most, size(t));
  for (; t < tokens; ++t) most = vmaxq_f32(most, vdupq_n_f32(__builtin_fabsf(weights[t])));
  return fixed_point_up_to(vmaxvq_f32(most));
}

// Weights of 8 tokens in steps. Adding 1.5 * 2^23 leaves the integer nearest to a number, even if there are two, in
// the lower bits of the sum: less work than a conversion and a narrowing.
static inline int16x8_t steps_of(const float* weights, const FixedPoint& fixed) {
  const auto to_fixed = [&](const float* x) {
    const float32x4_t steps = vmulq_n_f32(vmulq_n_f32(vld1q_f32(x), fixed.first), fixed.second);
    return vreinterpretq_s16_f32(vaddq_f32(steps, vdupq_n_f32(0x1.8p23f)));
  };
  return vuzp1q_s16(to_fixed(weights), to_fixed(weights + 4));
}

// The limbs of 16 tokens. The low one is the lower byte of the steps as a signed number, the high one what is left.
static inline int8x16_t low_limbs(int16x8_t a, int16x8_t b) {
  return vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b));
}
static inline int8x16_t high_limbs(int16x8_t a, int16x8_t b) {
  const int16x8_t half = vdupq_n_s16(128);
  return vuzp2q_s8(vreinterpretq_s8_s16(vaddq_s16(a, half)), vreinterpretq_s8_s16(vaddq_s16(b, half)));
}

// A tile's sums of four columns, added to those of the tiles before, which shrink; null: by 1, which changes no bits.
static inline void add_tile(int32x4_t high, int32x4_t low, const FixedPoint& fixed, const float* shrink, float* sums) {
  float32x4_t before = vld1q_f32(sums);
  if (shrink) before = vmulq_n_f32(before, *shrink);
  vst1q_f32(sums, vfmaq_n_f32(before, joined(high, low), fixed.unit));
}

}  // namespace treeattn::kernels::neon
