// SPDX-License-Identifier: Apache-2.0
// Linear maps with int8 weights by SDOT (one row of x) and SMMLA (more). The groups are added one after the other:
// sum = fma(integer, scale of x * scale of the weights, sum).
#include "kernels/cpu/arm/neon_linear_int8.h"
#include "kernels/cpu/targets.h"

namespace treeattn::kernels {
namespace {

using linear_loops::put;
using linear_loops::smaller;
using neon::bytes_at;
using neon::floats_at;
using neon::fresh_zero;
using neon::kGroup;
using neon::quantize_group;

constexpr int kTileRows = 8;   // of x, in pairs
constexpr int kPanelRows = 4;  // of weights, in pairs: integers and floats of an 8x4 block fill 16 registers
constexpr int kPanels = kLinearBlock / kPanelRows;
constexpr std::int64_t kDepth = 32;  // groups that are worked on before the next weights are packed
constexpr int kSums = kTileRows * kPanelRows;

// A group of one pair of rows: four 2x8 blocks of a step each, then the scales as the 2x2 result wants them. Blocks of
// a step lie side by side: [step][pair][row of the pair][8] bytes, then [pair][4] floats.
constexpr std::int64_t kPairBytes = 2 * kGroup + 4 * sizeof(float);
constexpr std::int64_t kPanelBytes = kDepth * kPairBytes * kPanelRows / 2;

std::size_t tile_bytes(std::int64_t cols) {
  return (static_cast<std::size_t>(cols / kGroup * kPairBytes * kTileRows / 2) + 63) / 64 * 64;
}

// One row: its bytes, then its scales. More: groups as above.
void pack_tile(const float* x, int rows, std::int64_t cols, std::byte* packed) {
  if (rows == 1) return neon::pack_row(x, cols, packed);
  const int pairs = (rows + 1) / 2;
  std::byte* out = packed;
  for (std::int64_t col = 0; col < cols; col += kGroup, out += pairs * kPairBytes) {
    for (int r = 0; r < 2 * pairs; ++r) {
      std::int8_t values[kGroup] = {};
      const float scale = r < rows ? quantize_group(x + r * cols + col, values) : 0.0f;
      for (int step = 0; step < 4; ++step) __builtin_memcpy(out + (step * 2 * pairs + r) * 8, values + step * 8, 8);
      float* scales = reinterpret_cast<float*>(out + pairs * 2 * kGroup) + 2 * r;
      scales[0] = scales[1] = scale;
    }
  }
}

// A group of four rows of weights: blocks of every step for both pairs, and scales.
struct WeightGroup {
  int8x16_t block[4][2];
  float32x4_t scale[2];
};

// From a packed panel.
struct PackedGroups {
  const std::byte* panel;

  WeightGroup operator[](std::int64_t g) const {
    const std::byte* group = panel + g * 2 * kPairBytes;
    WeightGroup w;
    TREEATTN_UNROLL
    for (int i = 0; i < 8; ++i) w.block[i / 2][i % 2] = vld1q_s8(bytes_at(group) + i * 16);
    TREEATTN_UNROLL
    for (int j = 0; j < 2; ++j) w.scale[j] = vld1q_f32(floats_at(group + 4 * kGroup) + 4 * j);
    return w;
  }
};

// As they lie.
struct PlainGroups {
  const std::int8_t* row[kPanelRows];
  const float* scales[kPanelRows];

  PlainGroups(const LinearArgs& args, std::int64_t first) {
    TREEATTN_UNROLL
    for (int n = 0; n < kPanelRows; ++n) {
      const std::int64_t at = smaller(first + n, args.end - 1);
      row[n] = bytes_at(args.w) + at * args.cols;
      scales[n] = args.scales + at * (args.cols / kGroup);
    }
  }
  WeightGroup operator[](std::int64_t g) const {
    WeightGroup w;
    TREEATTN_UNROLL
    for (int j = 0; j < 2; ++j) {
      TREEATTN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const std::int64_t col = g * kGroup + 16 * half;
        const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(row[2 * j] + col));
        const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(row[2 * j + 1] + col));
        w.block[2 * half][j] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
        w.block[2 * half + 1][j] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
      }
      const float32x2_t both = vset_lane_f32(scales[2 * j + 1][g], vdup_n_f32(scales[2 * j][g]), 1);
      w.scale[j] = vcombine_f32(both, both);
    }
    return w;
  }
};

// Groups [group, group + count) of a panel of weights.
void pack_panel(const PlainGroups& groups, std::int64_t group, std::int64_t count, std::byte* out) {
  for (std::int64_t g = group; g < group + count; ++g, out += 2 * kPairBytes) {
    const WeightGroup w = groups[g];
    std::int8_t* bytes = reinterpret_cast<std::int8_t*>(out);
    float* scales = reinterpret_cast<float*>(out + 4 * kGroup);
    TREEATTN_UNROLL
    for (int i = 0; i < 8; ++i) vst1q_s8(bytes + i * 16, w.block[i / 2][i % 2]);
    TREEATTN_UNROLL
    for (int j = 0; j < 2; ++j) vst1q_f32(scales + 4 * j, w.scale[j]);
  }
}

// P pairs of x by two pairs of weights: sums [P][2] blocks of 2x2.
template <int P, class Groups>
void multiply_panel(const std::byte* x, const Groups& groups, std::int64_t count, float* sums) {
  float32x4_t acc[P][2];
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int j = 0; j < 2; ++j) acc[p][j] = vld1q_f32(sums + (2 * p + j) * 4);
  }
  for (std::int64_t g = 0; g < count; ++g, x += P * kPairBytes) {
    const WeightGroup w = groups[g];
    TREEATTN_UNROLL
    for (int p = 0; p < P; ++p) {
      int32x4_t integers[2] = {fresh_zero(), fresh_zero()};
      TREEATTN_UNROLL
      for (int step = 0; step < 4; ++step) {
        const int8x16_t a = vld1q_s8(bytes_at(x) + (step * P + p) * 16);
        TREEATTN_UNROLL
        for (int j = 0; j < 2; ++j) integers[j] = vmmlaq_s32(integers[j], a, w.block[step][j]);
      }
      const float32x4_t of_x = vld1q_f32(floats_at(x + P * 2 * kGroup) + 4 * p);
      TREEATTN_UNROLL
      for (int j = 0; j < 2; ++j) {
        acc[p][j] = vfmaq_f32(acc[p][j], vcvtq_f32_s32(integers[j]), vmulq_f32(of_x, w.scale[j]));
      }
    }
  }
  TREEATTN_UNROLL
  for (int p = 0; p < P; ++p) {
    TREEATTN_UNROLL
    for (int j = 0; j < 2; ++j) vst1q_f32(sums + (2 * p + j) * 4, acc[p][j]);
  }
}

void store_tile(const LinearArgs& args, std::int64_t row, int rows, std::int64_t first, const float* sums) {
  const int width = static_cast<int>(smaller(kPanelRows, args.end - first));
  for (int r = 0; r < rows; ++r) {
    float* y = args.y + (row + r) * args.y_stride + first;
    for (int n = 0; n < width; ++n) put(y + n, sums[(r / 2 * 2 + n / 2) * 4 + r % 2 * 2 + n % 2], args.add);
  }
}

// Tiles of two or more rows of x (a last row alone is left out) by the weights [first, first + kLinearBlock).
void multiply_tiles(const LinearArgs& args, std::int64_t first) {
  std::byte* packed = args.scratch;                                              // [panel][kPanelBytes]
  float* sums = reinterpret_cast<float*>(args.scratch + kPanels * kPanelBytes);  // [tile][panel][kSums]
  const int panels = static_cast<int>((smaller(kLinearBlock, args.end - first) + kPanelRows - 1) / kPanelRows);
  const std::int64_t groups = args.cols / kGroup;
  const auto bytes = static_cast<std::int64_t>(tile_bytes(args.cols));
  const auto sums_of = [&](std::int64_t row, int panel) { return sums + (row / kTileRows * kPanels + panel) * kSums; };
  __builtin_memset(sums, 0, sizeof(float) * static_cast<std::size_t>((args.rows + 7) / 8 * kPanels * kSums));
  for (std::int64_t group = 0; group < groups; group += kDepth) {
    const std::int64_t count = smaller(kDepth, groups - group);
    for (int panel = 0; panel < panels; ++panel) {
      pack_panel(PlainGroups(args, first + panel * kPanelRows), group, count, packed + panel * kPanelBytes);
    }
    for (std::int64_t row = 0; row + 1 < args.rows; row += kTileRows) {
      const std::int64_t pairs = (smaller(kTileRows, args.rows - row) + 1) / 2;
      const std::byte* x = args.x + row / kTileRows * bytes + group * pairs * kPairBytes;
      for (int panel = 0; panel < panels; ++panel) {
        const PackedGroups w{packed + panel * kPanelBytes};
        float* out = sums_of(row, panel);
        if (pairs == 4) multiply_panel<4>(x, w, count, out);
        if (pairs == 3) multiply_panel<3>(x, w, count, out);
        if (pairs == 2) multiply_panel<2>(x, w, count, out);
        if (pairs == 1) multiply_panel<1>(x, w, count, out);
      }
    }
  }
  for (std::int64_t row = 0; row + 1 < args.rows; row += kTileRows) {
    const int rows = static_cast<int>(smaller(kTileRows, args.rows - row));
    for (int panel = 0; panel < panels; ++panel) {
      store_tile(args, row, rows, first + panel * kPanelRows, sums_of(row, panel));
    }
  }
}

// One tile of P pairs of x by the weights as they lie: nothing is worth packing for so few.
template <int P>
void multiply_few(const LinearArgs& args) {
  for (std::int64_t n = args.begin; n < args.end; n += kPanelRows) {
    float sums[kSums] = {};
    multiply_panel<P>(args.x, PlainGroups(args, n), args.cols / kGroup, sums);
    store_tile(args, 0, static_cast<int>(args.rows), n, sums);
  }
}

// x has to stay in the first-level cache while four rows of weights go through it. With more than this many columns it
// is the least recently used of all before its turn comes again, and would be read from the second level, which costs a
// fifth of the rate. So it is used four times as often: once more a quarter, a half and three quarters of a row ahead.
// Only a load counts, a prefetch does not.
constexpr std::int64_t kTouchFromCols = 4096;

inline void touch(const std::int8_t* x, std::int64_t col, std::int64_t cols) {
  TREEATTN_UNROLL
  for (int quarter = 1; quarter < 4; ++quarter) {
    const std::int64_t ahead = col + quarter * (cols / 4);
    const volatile std::int8_t* line = x + (ahead < cols ? ahead : ahead - cols);
    static_cast<void>(*line);
  }
}

// A group of four rows of weights, or of one four times.
struct WeightBytes {
  int8x16_t half[4][2];

  template <int N>
  __attribute__((always_inline)) WeightBytes(const std::int8_t* const (&w)[N], std::int64_t col) {
    TREEATTN_UNROLL
    for (int n = 0; n < 4; ++n) {
      half[n][0] = vld1q_s8(w[n % N] + col);
      half[n][1] = vld1q_s8(w[n % N] + col + 16);
    }
  }
  // Sums over the group: element n for row n.
  __attribute__((always_inline)) int32x4_t times(const std::int8_t* x) const {
    int32x4_t sums[4];
    TREEATTN_UNROLL
    for (int n = 0; n < 4; ++n) {
      sums[n] = vdotq_s32(vdotq_s32(fresh_zero(), vld1q_s8(x), half[n][0]), vld1q_s8(x + 16), half[n][1]);
    }
    return vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
  }
};

// One row of x against N (1 or 4) rows of weights, `distance` apart, as they lie.
template <int N>
void multiply_row(const LinearArgs& args, std::int64_t first, std::int64_t distance) {
  const std::int64_t groups = args.cols / kGroup;
  const std::int8_t* x = bytes_at(args.x);
  const float* x_scales = floats_at(args.x + args.cols);
  const std::int8_t* w[N];
  const float* scales[N];
  TREEATTN_UNROLL
  for (int n = 0; n < N; ++n) {
    w[n] = bytes_at(args.w) + (first + n * distance) * args.cols;
    scales[n] = args.scales + (first + n * distance) * groups;
  }
  float32x4_t sums = vdupq_n_f32(0.0f);
  const auto add_group = [&](std::int64_t g, float32x4_t scale) __attribute__((always_inline)) {
    const int32x4_t integers = WeightBytes(w, g * kGroup).times(x + g * kGroup);
    sums = vfmaq_f32(sums, vcvtq_f32_s32(integers), scale);
  };
  std::int64_t g = 0;
  for (; N == 4 && g + 4 <= groups; g += 4) {
    // Scales of four groups of four rows, turned round: one vector per group.
    const neon::Turned4 by_group(vld1q_f32(scales[0] + g), vld1q_f32(scales[1 % N] + g), vld1q_f32(scales[2 % N] + g),
                                 vld1q_f32(scales[3 % N] + g));
    const float32x4_t of_x = vld1q_f32(x_scales + g);
    if (args.cols > kTouchFromCols) {
      touch(x, g * kGroup, args.cols);
      touch(x, g * kGroup + 64, args.cols);
    }
    add_group(g, vmulq_laneq_f32(by_group.first, of_x, 0));
    add_group(g + 1, vmulq_laneq_f32(by_group.second, of_x, 1));
    add_group(g + 2, vmulq_laneq_f32(by_group.third, of_x, 2));
    add_group(g + 3, vmulq_laneq_f32(by_group.fourth, of_x, 3));
  }
  for (; g < groups; ++g) {
    float32x4_t scale = vdupq_n_f32(0.0f);
    scale = vsetq_lane_f32(scales[0][g], scale, 0);
    if constexpr (N == 4) {
      scale = vsetq_lane_f32(scales[1][g], scale, 1);
      scale = vsetq_lane_f32(scales[2][g], scale, 2);
      scale = vsetq_lane_f32(scales[3][g], scale, 3);
    }
    add_group(g, vmulq_n_f32(scale, x_scales[g]));
  }
  float out[4];
  vst1q_f32(out, sums);
  TREEATTN_UNROLL
  for (int n = 0; n < N; ++n) put(args.y + first + n * distance, out[n], args.add);
}

void multiply_single(const LinearArgs& args) {
  linear_loops::for_each_stream_step(
      args, [&]<int N>(std::int64_t first, std::int64_t distance) { multiply_row<N>(args, first, distance); });
}

void multiply(const LinearArgs& args) {
  if (args.rows == 1) return multiply_single(args);
  if (args.rows <= 2) return multiply_few<1>(args);
  if (args.rows <= 4) return multiply_few<2>(args);
  if (args.rows <= 6) return multiply_few<3>(args);
  if (args.rows <= 8) return multiply_few<4>(args);
  for (std::int64_t n = args.begin; n < args.end; n += kLinearBlock) multiply_tiles(args, n);
  if (args.rows % kTileRows == 1) multiply_single(linear_loops::last_row(args, kTileRows, tile_bytes(args.cols)));
}

static_assert(kPanels * kPanelBytes + kLinearRows / kTileRows * kPanels * kSums * sizeof(float) <= kLinearScratchBytes);

}  // namespace

void use_neon_linear_int8(ModelKernels& kernels) {
  kernels.linear[static_cast<int>(DType::kInt8)] = {
      Activations::kInt8Groups, kTileRows, 4, tile_bytes, pack_tile, multiply, 0x1p-24, false};
}

}  // namespace treeattn::kernels
