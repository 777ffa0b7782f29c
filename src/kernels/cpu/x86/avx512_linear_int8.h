// SPDX-License-Identifier: Apache-2.0
// One row of x against int8 weights by VPDPBUSD, which multiplies unsigned with signed bytes. AMX has nothing better
// for one row. Everything is static: see linear_loops.h.
//
// Each group of 32 elements of x is quantised to int8, so the sum over a group is an exact integer, whichever
// instruction makes it. The groups are added one after the other: sum = fma(integer, scale of x * scale of the weights,
// sum). That is the order for any number of rows.
#pragma once

#include "kernels/cpu/x86/avx512_vectors.h"

namespace treeattn::kernels::avx512 {

inline constexpr std::int64_t kGroup = 32;
inline constexpr int kPanelRows = 16;  // of weights, one to a lane

// A row of x: its values, up to whole pairs of groups; its scales; and -128 times the sum of each group.
struct Int8Row {
  const std::int8_t* values;
  const float* scales;
  const std::int32_t* corrections;
};
static inline std::int64_t whole_groups(std::int64_t cols) { return (cols / kGroup + 1) / 2 * 2; }
static inline std::size_t int8_row_bytes(std::int64_t cols) {
  return (static_cast<std::size_t>(whole_groups(cols)) * (kGroup + 8) + 63) / 64 * 64;
}
static inline Int8Row int8_row(const std::byte* packed, std::int64_t cols) {
  const std::int64_t groups = whole_groups(cols);
  const auto* scales = reinterpret_cast<const float*>(packed + groups * kGroup);
  return {reinterpret_cast<const std::int8_t*>(packed), scales, reinterpret_cast<const std::int32_t*>(scales + groups)};
}
static inline void pack_int8_row(const float* x, std::int64_t cols, std::byte* packed) {
  const std::int64_t groups = whole_groups(cols);
  float* scales = reinterpret_cast<float*>(packed + groups * kGroup);
  std::int32_t* corrections = reinterpret_cast<std::int32_t*>(scales + groups);
  for (std::int64_t g = 0; g < groups; ++g) {
    QuantizedGroup group = {_mm256_setzero_si256(), 0.0f};
    if (g < cols / kGroup) group = quantize_group(x + g * kGroup);
    _mm256_store_si256(reinterpret_cast<__m256i*>(packed + g * kGroup), group.values);
    scales[g] = group.scale;
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < kGroup; ++i) sum += reinterpret_cast<const std::int8_t*>(packed)[g * kGroup + i];
    corrections[g] = -128 * sum;
  }
}

// 16 rows of weights from `first` on. The last one stands for those beyond the end.
struct Int8Panel {
  const std::int8_t* row[kPanelRows];
  const float* scales[kPanelRows];

  Int8Panel(const LinearArgs& args, std::int64_t first) {
    TREEATTN_UNROLL
    for (int n = 0; n < kPanelRows; ++n) {
      const std::int64_t at = linear_loops::smaller(first + n, args.end - 1);
      row[n] = reinterpret_cast<const std::int8_t*>(args.w) + at * args.cols;
      scales[n] = args.scales + at * (args.cols / kGroup);
    }
  }
  // Scales of groups [group, group + 16), as far as there are any: out[group][row].
  void load_scales(std::int64_t group, std::int64_t groups, float (&out)[16][kPanelRows]) const {
    __m512i v[kPanelRows];
    TREEATTN_UNROLL
    for (int n = 0; n < kPanelRows; ++n) {
      v[n] = _mm512_castps_si512(_mm512_maskz_loadu_ps(first_lanes(groups - group), scales[n] + group));
    }
    transpose(v);
    TREEATTN_UNROLL
    for (int g = 0; g < 16; ++g) _mm512_store_si512(out[g], v[g]);
  }
};

// The lanes of 16 vectors, each of which has the partial sums of two groups: lane n is the sum of vector n.
struct GroupSums {
  __m512i first, second;
};
static inline GroupSums group_sums(const __m512i (&v)[kPanelRows]) {
  __m512i twos[8], fours[4];
  TREEATTN_UNROLL
  for (int i = 0; i < 8; ++i) {
    twos[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  }
  TREEATTN_UNROLL
  for (int i = 0; i < 4; ++i) {
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(twos[2 * i], twos[2 * i + 1]),
                                _mm512_unpackhi_epi64(twos[2 * i], twos[2 * i + 1]));
  }
  // A quarter of fours[i] has rows 4 i to 4 i + 3; quarters 0 and 1 are the first group, 2 and 3 the second.
  constexpr int kEven = 0x88, kOdd = 0xdd;
  const __m512i low =
      _mm512_add_epi32(_mm512_shuffle_i32x4(fours[0], fours[1], kEven), _mm512_shuffle_i32x4(fours[0], fours[1], kOdd));
  const __m512i high =
      _mm512_add_epi32(_mm512_shuffle_i32x4(fours[2], fours[3], kEven), _mm512_shuffle_i32x4(fours[2], fours[3], kOdd));
  return {_mm512_shuffle_i32x4(low, high, kEven), _mm512_shuffle_i32x4(low, high, kOdd)};
}

static inline __m512 add_group(__m512 sum, __m512i integers, __m512 scale) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), scale, sum);
}

// 16 rows of weights side by side, one to a lane.
static inline void multiply_int8_row(const LinearArgs& args) {
  const Int8Row x = int8_row(args.x, args.cols);
  const std::int64_t groups = args.cols / kGroup;
  for (std::int64_t first = args.begin; first < args.end; first += kPanelRows) {
    const Int8Panel panel(args, first);
    __m512 sum = _mm512_setzero_ps();
    for (std::int64_t begin = 0; begin < groups; begin += 16) {
      alignas(64) float scales[16][kPanelRows];
      panel.load_scales(begin, groups, scales);
      const std::int64_t end = linear_loops::smaller(begin + 16, groups);
      for (std::int64_t g = begin; g < end; g += 2) {
        const __m512i of_x = _mm512_load_si512(x.values + g * kGroup);
        const std::int64_t ahead = bytes_ahead(g * kGroup, args.cols);
        __m512i v[kPanelRows];
        TREEATTN_UNROLL
        for (int n = 0; n < kPanelRows; ++n) {
          _mm_prefetch(panel.row[n] + ahead, _MM_HINT_T0);
          const __m512i weights = load_bytes(panel.row[n] + g * kGroup, args.cols - g * kGroup);
          v[n] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), made_unsigned(weights), of_x);
        }
        const GroupSums sums = group_sums(v);
        const auto integers = [&](__m512i of_group, std::int64_t i) {
          return _mm512_add_epi32(of_group, _mm512_set1_epi32(x.corrections[i]));
        };
        const auto scale = [&](std::int64_t i) {
          return _mm512_mul_ps(_mm512_set1_ps(x.scales[i]), _mm512_load_ps(scales[i - begin]));
        };
        sum = add_group(sum, integers(sums.first, g), scale(g));
        if (g + 1 < end) sum = add_group(sum, integers(sums.second, g + 1), scale(g + 1));
      }
    }
    put(args.y + first, args.end - first, sum, args.add);
  }
}

}  // namespace treeattn::kernels::avx512
